"""Secrets are hidden, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.rundir import secrets
from fleetrun.rundir.arguments import conceal


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
https://h/p?a=1&access_token=§&b=2
https://b.s3.amazonaws.com/k?X-Amz-Signature=§&X-Amz-Expires=60
https://b.s3.amazonaws.com/k?X-Amz-Credential=§
https://b.s3.amazonaws.com/k?X-Amz-Security-Token=§
https://storage.googleapis.com/b/k?X-Goog-Signature=§
https://b.oss.aliyuncs.com/k?OSSAccessKeyId=§&Signature=§
https://a.blob.core.windows.net/c/b?sv=2020&sig=§
https://oapi.dingtalk.com/robot/send?access_token=§
https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=§
https://hooks.slack.com/services/T000/B000/§
https://discord.com/api/webhooks/123/§
https://open.feishu.cn/open-apis/bot/v2/hook/§
https://api.telegram.org/bot123:§/sendMessage
https://§@o0.ingest.sentry.io/1
postgres://me:§@db/x
mongodb+srv://me:§@db/x
redis://:§@db:6379/0
Server=tcp:h,1433;Database=d;User Id=me;Password=§;Encrypt=yes
Server=h;Uid=me;Pwd=§;
DefaultEndpointsProtocol=https;AccountName=a;AccountKey=§;EndpointSuffix=core.windows.net
Endpoint=sb://h/;SharedAccessKeyName=Root;SharedAccessKey=§
host=h user=me password=§ dbname=d
--config={"password": "§"}
--config={"db": {"password":"§"}}
{"token": "§"}
{'api_key': '§', 'lr': 1}
--json={\"password\": \"§\"}
db: {password: §}
password: §
Authorization: Bearer §
Authorization: Basic §
Authorization: token §
Cookie: sid=§; theme=dark
X-Api-Key: §
curl -H "Authorization: Bearer §"
GH_PAT=§
SSHPASS=§
AUTHORIZATION=§
SESSION=§
BEARER=§
--db-password §
--api-key=§
['curl', '--api-key', '§']
['--password=§']
xoxb-1234-§
sk-proj-X-abcdefghijkl
-----BEGIN RSA PRIVATE KEY-----\n§\n-----END RSA PRIVATE KEY-----
export DB_PASSWORD=§; run
env PASSWORD="§" cmd
client_secret=§&grant_type=x
fetch("https://h", auth_token="§")
token = "§"
wandb_api_key: §
spring.datasource.password=§
ODBC: DSN=d;UID=me;PWD=§
s3://b?secret_access_key=§
jdbc:mysql://h/d?user=me&password=§
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
--tokenizer_path=/m/tok
--keyboard=us
--keyword=image
max_tokens=512
max_token=512
PASSWORD_FILE=/run/secrets/db
--password-file=/run/x
monkey=1
author=me
--author=Ada Lovelace
session-less
XDG_SESSION_ID=2
DESKTOP_SESSION=gnome
--authors a,b
pad_token=[PAD]
--pad_token=<pad>
--bos_token_id=128000
sort_key=length
--sort-key=attention_weights
primary_key=id
public_key=abcdef
key=lambda row: row.x
sorted(x, key=len)
KeyError: 'token'
SyntaxError: unexpected token: ')'
no such key: fuse_grad_size_in_MB
unknown key: conv1_weights2
https://medium.com/@user/post
https://example.com/a?page=2&sort=asc
https://example.com/search?q=tokens&lang=en
me@example.org
git@github.com:me/repo.git
ssh://git@github.com/me/repo
compass=1
passage=3
passthrough=true
bypass=1
--passes=3
path/to/tokens.txt
tokens: 512
--token_type_ids
--num_tokens=1e9
--patience=3
--pattern=*.txt
--patch-size=16
-p 8080
-p 127.0.0.1:80:80
-p fp16
-p /data/train
-p config.yaml
mkdir -p logs
--signal=TERM
--design=big
--basic
Basic understanding of things
bearer of bad news
hidden_size=1024
glob=*.py
--secretary=Bob
accessible=1
--cache-key-prefix=abc
PADDLE_TRAINER_ENDPOINTS=10.0.0.1:6070,10.0.0.2:6070
127.0.0.1:6070
--set fuse_grad_size_in_MB=16
def password(self):
if token == tokens[i]:
class TokenEmbedding:
File "/x/tokenization.py", line 3, in key
skip=1
sigma=0.1
--sigmoid
assignee=me
use --password to set
signal=9
hooks=3
/opt/conda/lib/python3.10/site-packages/paddle/nn/layer/transformer.py
FLAGS_allocator_strategy=auto_growth
NCCL_SOCKET_IFNAME=eth0
risk-aware-scheduling-for-all
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
    assert secret not in conceal([text])[0][0]
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
    assert conceal([line]) == ((line,), ())
    words = line.split()
    if words[0].startswith("-"):
        assert conceal(words) == (tuple(words), ())


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
        *("a" * 20_000, "a=" * 10_000, "://" + "a@" * 10_000, "mysql " * 2_000, "\\" * 20_000),
        *("://" * 6_000, "a/" * 10_000),
    ],
)
def test_long_texts_take_no_long_time(text: str) -> None:
    # A pattern that looked at everything from everywhere would not end within the test's limit.
    assert secrets.mask(text) == text.replace("://a@", "://***@")
    list(secrets.in_arguments(["train.py", text]))
