"""No secret is shown, and what is no secret is not hidden."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.plan import secrets

HIDDEN = """
HF_TOKEN GITHUBTOKEN hf_token DB_PASSWORD MYPASSWORD MYSQL_PWD PASSWD SSH_PASSPHRASE
CLIENT_SECRET SECRETS AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY OPENAI_API_KEY apiKey
GOOGLE_APPLICATION_CREDENTIALS PRIVATE_KEY AZURE_STORAGE_KEY BASIC_AUTH NPM_OAUTH DB_PASS
SESSION_COOKIE MY-API-KEY
"""
SHOWN = """
PWD OLDPWD PATH TOKENIZERS_PARALLELISM MAX_TOKENS AUTHOR KEYBOARD MONKEY_PATCH OMP_NUM_THREADS
PADDLE_TRAINER_ID NCCL_DEBUG XAUTHORITY COMPASS
"""


@pytest.mark.parametrize("name", HIDDEN.split())
def test_s70_names_of_secrets_are_known(name: str) -> None:
    assert secrets.is_secret(name)
    assert secrets.redact(name, "value") == "***"


@pytest.mark.parametrize("name", SHOWN.split())
def test_other_names_are_shown(name: str) -> None:
    assert not secrets.is_secret(name)
    assert secrets.redact(name, "value") == "value"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://me:pw@proxy:3128/x", "http://***@proxy:3128/x"),
        ("http://me:p/w@proxy:3128", "http://***@proxy:3128"),
        ("http://a:b@c,https://d:e@f", "http://***@c,https://***@f"),
        ("http://proxy:3128/", "http://proxy:3128/"),
        ("me@example.org", "me@example.org"),
        ("", ""),
    ],
)
def test_s70_passwords_in_addresses_are_hidden(value: str, shown: str) -> None:
    assert secrets.redact("http_proxy", value) == shown


@given(st.text(), st.text(st.characters(exclude_characters=" ,;@:/"), min_size=1))
def test_no_password_of_an_address_comes_through(user: str, password: str) -> None:
    secret = f"<{password}>"
    user = "".join(char for char in user if char not in " ,;@:/")
    assert secret not in secrets.redact("https_proxy", f"https://{user}:{secret}@host:1/")
