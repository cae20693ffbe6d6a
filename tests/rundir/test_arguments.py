"""Secrets on command lines are hidden, and nothing else is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import a_request, a_roster, some_facts

from fleetrun.model import Script
from fleetrun.plan import planner, render
from fleetrun.plan.devices import Share
from fleetrun.rundir.arguments import conceal

HUSH = "s3cr3t-Value"


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        ("--password=X", "--password=***", ["--password= PASSWORD"]),
        ("--db-password X --lr 1", "--db-password *** --lr 1", [" DB_PASSWORD"]),
        ("--env HF_TOKEN=X", "--env HF_TOKEN=***", ["HF_TOKEN= HF_TOKEN"]),
        ("--env=HF_TOKEN=X=Y", "--env=HF_TOKEN=***", ["--env=HF_TOKEN= HF_TOKEN"]),
        ("+model.api_key=X", "+model.api_key=***", ["+model.api_key= MODEL_API_KEY"]),
        ("--repo=https://me:X@h/p", "--repo=https://***@h/p", ["--repo= REPO"]),
        ("https://me:X@h/p", "https://***@h/p", [" FLEETRUN_ARG_0"]),
        ("--token X --token Y", "--token *** --token ***", [" TOKEN", " TOKEN_2"]),
        ("--token=X a --token=X", "--token=*** a --token=***", ["--token= TOKEN"] * 2),
        ("-c TOKEN=X;train", "-c TOKEN=***", ["TOKEN= TOKEN"]),
        ("--1.key=X", "--1.key=***", ["--1.key= FLEETRUN_1_KEY"]),
        ('{"api_key":"X"}', '{"api_key":"***"}', [" FLEETRUN_ARG_0"]),
    ],
)
def test_secrets_are_hidden(words: str, shown: str, hidden: list[str]) -> None:
    typed = [word.replace("X", HUSH) for word in words.split()]
    concealed = conceal(typed)
    assert " ".join(concealed[0]) == shown
    assert [f"{word.before} {word.variable}" for word in concealed[1]] == hidden
    assert all(concealed[0][word.at] != typed[word.at] for word in concealed[1])


@pytest.mark.parametrize(
    "words",
    [
        "train.py --lr 0.1 --epochs=3",
        "--max_token 512 --pad_token=<pad> --unk-token [UNK] --pad_token_id=0",
        "--use_auth_token --lr 0.1",
        "--tokenizer=bert --author me --use_token true",
        '{"sort_key":"a=b"} = == a=b',
        "--password",
    ],
)
def test_what_is_no_secret_stays(words: str) -> None:
    typed = tuple(words.split())
    assert conceal(typed) == (typed, ())


@given(st.lists(st.text(max_size=8)))
def test_any_words_are_taken(words: list[str]) -> None:
    shown, hidden = conceal(words)
    kept = {word.at for word in hidden}
    assert all(shown[at] == word for at, word in enumerate(words) if at not in kept)
    assert all(words[word.at].startswith(word.before) for word in hidden)


def test_s70_no_form_of_a_plan_shows_a_secret_argument() -> None:
    script = Script("file", "train.py", (f"--password={HUSH}", "--api-key", HUSH))
    request = a_request(script=script)
    roster = a_roster(ranks=1, cpu=True)
    share = Share("cpu", roster.members[0].groups, "gloo")
    plan = planner.plan(request, some_facts(), share, roster)
    assert plan.processes[0].argv[-1] == HUSH
    forms = [form([plan], request) for form in (render.table, render.as_json)]
    forms.append(render.overview([plan], request))
    assert not any(HUSH in form for form in forms)
    assert json.loads(forms[1])["script"]["args"] == ["--password=***", "--api-key", "***"]
