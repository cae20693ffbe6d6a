"""Secrets are hidden, and nothing else is."""

from __future__ import annotations

import json

import plans
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.model import Script
from fleetrun.plan import planner, render
from fleetrun.plan.devices import Share
from fleetrun.rundir import secrets
from fleetrun.rundir.secrets import conceal


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


# Places of secrets in words, variables and texts; § stands for one.
CARRIERS = r"""
https://h/p?access_token=§
https://b.s3.amazonaws.com/k?X-Amz-Signature=§&X-Amz-Expires=60
https://b.oss.aliyuncs.com/k?OSSAccessKeyId=§&Signature=§
https://a.blob.core.windows.net/c/b?sv=2020&sig=§
https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=§
https://hooks.slack.com/services/T000/B000/§
https://open.feishu.cn/open-apis/bot/v2/hook/§
https://api.telegram.org/bot123:§/sendMessage
https://§@o0.ingest.sentry.io/1
postgres://me:§@db/x
redis://:§@db:6379/0
Server=tcp:h,1433;Database=d;User Id=me;Password=§;Encrypt=yes
DefaultEndpointsProtocol=https;AccountName=a;AccountKey=§;EndpointSuffix=core.windows.net
host=h user=me password=§ dbname=d
--config={"db": {"password":"§"}}
{"token": "§"}
{'api_key': '§', 'lr': 1}
--json={\"password\": \"§\"}
password: §
Authorization: Bearer §
Cookie: sid=§; theme=dark
X-Api-Key: §
curl -H "Authorization: Bearer §"
--db-password §
--api-key=§
['curl', '--api-key', '§']
xoxb-1234-§
sk-proj-X-abcdefghijkl
-----BEGIN RSA PRIVATE KEY-----\n§\n-----END RSA PRIVATE KEY-----
export DB_PASSWORD=§; run
client_secret=§&grant_type=x
token = "§"
wandb_api_key: §
ODBC: DSN=d;UID=me;PWD=§
X-Vault-Token: §
"""
# Keys that are recognised by their form alone.
KEYS = """
ghp_0123456789abcdefABCD xoxb-1234-abcdefghijkl sk-proj-0123456789abcdef AKIA0123456789ABCDEF
hf_0123456789abcdefABCD glpat-0123456789abcdefABCD eyJhbGciOiJ9.eyJzdWIiOiIx.c2lnbmF0dXJl
LTAI0123456789abcdef AIzaSyA0123456789abcdefghij npm_0123456789abcdefABCD
github_pat_11ABCDEFG0123456789_abcdefgh
"""
NAMES = """
HF_TOKEN MYPASSWORD MYSQL_PWD CLIENT_SECRET AWS_ACCESS_KEY_ID apiKey AZURE_STORAGE_KEY BASIC_AUTH
SESSION_COOKIE GH_PAT SSHPASS
"""
PLAIN = r"""
--tokenizer=bert
--keyboard=us
max_tokens=512
PASSWORD_FILE=/run/secrets/db
monkey=1
author=me
XDG_SESSION_ID=2
pad_token=[PAD]
--pad_token=<pad>
sort_key=length
public_key=abcdef
key=lambda row: row.x
sorted(x, key=len)
KeyError: 'token'
no such key: fuse_grad_size_in_MB
unknown key: conv1_weights2
https://medium.com/@user/post
https://example.com/search?q=tokens&lang=en
git@github.com:me/repo.git
ssh://git@github.com/me/repo
passthrough=true
path/to/tokens.txt
tokens: 512
--patience=3
--patch-size=16
-p 127.0.0.1:80:80
bearer of bad news
--cache-key-prefix=abc
PADDLE_TRAINER_ENDPOINTS=10.0.0.1:6070,10.0.0.2:6070
--set fuse_grad_size_in_MB=16
def password(self):
if token == tokens[i]:
File "/x/tokenization.py", line 3, in key
use --password to set
/opt/conda/lib/python3.10/site-packages/paddle/nn/layer/transformer.py
FLAGS_allocator_strategy=auto_growth
task-specific-pretraining-large
"""


@pytest.mark.parametrize("line", CARRIERS.strip().splitlines())
@pytest.mark.parametrize("secret", ["s3cr3t-Value9x", "Zq83kfLw02mXv71"])
def test_secrets_are_known_by_where_they_stand(line: str, secret: str) -> None:
    text = line.replace("§", secret)
    masked = secrets.mask(text)
    assert secret not in masked
    assert "***" in masked
    assert secrets.mask(masked) == masked
    assert secret not in secrets.redact("A", text)
    assert secret not in conceal([text])[0]
    assert secret not in secrets.mask(f"ValueError: cannot use {text}")


@pytest.mark.parametrize("name", NAMES.split())
def test_s70_names_of_secrets_are_known(name: str) -> None:
    assert secrets.redact(name, "value") == "***"


@pytest.mark.parametrize("key", KEYS.split())
def test_keys_are_known_by_their_shape(key: str) -> None:
    assert secrets.mask(f"see {key}.") == "see ***."
    assert secrets.redact("A", key) == "***"


@pytest.mark.parametrize("line", PLAIN.strip().splitlines())
def test_ordinary_words_are_left_alone(line: str) -> None:
    assert secrets.mask(line) == line
    assert secrets.redact("A", line) == line
    assert conceal([line]) == (line,)
    words = line.split()
    if words[0].startswith("-"):
        assert conceal(words) == tuple(words)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--password=X", "--password=***"),
        ("--db-password X --lr 1", "--db-password *** --lr 1"),
        ("--env HF_TOKEN=X", "--env HF_TOKEN=***"),
        ("--env=HF_TOKEN=X=Y", "--env=HF_TOKEN=***"),
        ("+model.api_key=X", "+model.api_key=***"),
        ("--repo=https://me:X@h/p", "--repo=https://***@h/p"),
        ("--token X --token Y", "--token *** --token ***"),
        ("-c TOKEN=X;train", "-c TOKEN=***"),
        ('{"api_key":"X"}', '{"api_key":"***"}'),
        ("--max_token 512 --pad_token=<pad> --unk-token [UNK] --pad_token_id=0", ""),
        ("--use_auth_token --lr 0.1", ""),
        ("--tokenizer=bert --author me --use_token true --password", ""),
        ('{"sort_key":"a=b"} = == a=b', ""),
    ],
)
def test_secret_words_of_a_command_are_hidden(words: str, shown: str) -> None:
    typed = [word.replace("X", "s3cr3t-Value") for word in words.split()]
    assert " ".join(conceal(typed)) == (shown or words)


def test_s70_no_form_of_a_plan_shows_a_secret_argument() -> None:
    script = Script("file", "train.py", ("--password=hush1234", "--api-key", "hush1234"))
    request = plans.a_request(script=script)
    roster = plans.a_roster(ranks=1, cpu=True)
    share = Share("cpu", roster.members[0].groups, "gloo")
    plan = planner.plan(request, plans.some_facts(), share, roster)
    assert plan.processes[0].argv[-1] == "hush1234"
    forms = [form([plan], request) for form in (render.table, render.as_json)]
    forms.append(render.overview([plan], request))
    assert not any("hush1234" in form for form in forms)
    assert json.loads(forms[1])["script"]["args"] == ["--password=***", "--api-key", "***"]


@given(st.text())
def test_any_text_is_taken_and_masked_once(text: str) -> None:
    masked = secrets.mask(text)
    assert secrets.mask(masked) == masked


def test_known_values_are_hidden_wherever_they_stand() -> None:
    environ = {"DB_PASSWORD": "Tr0ub4dor", "MODEL_KEY": "attention", "U": "redis://:Zq83kf@h/0"}
    hide = secrets.Hider(environ, ["train.py", "--db-password", "hunter2"])
    assert hide("no Tr0ub4dor, hunter2 or Zq83kf") == "no ***, *** or ***"
    assert hide("attention is all you need") == "attention is all you need"


@pytest.mark.parametrize(
    "text",
    [
        *("a" * 20_000, "a=" * 90_000, "://" + "a@" * 10_000, "mysql " * 2_000, "\\" * 20_000),
        *("://" * 6_000, "a/" * 10_000, "://" + "a:" * 90_000),
    ],
)
def test_long_texts_take_no_long_time(text: str) -> None:
    # A pattern that looked at everything from everywhere would not end within the test's limit.
    assert secrets.mask(text) == text.replace("://a@", "://***@")
    list(secrets.in_arguments(["train.py", text]))
