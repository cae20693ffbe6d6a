"""What is asked for: command line > environment > config file > default, and who said it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.cli import configfile, options, request
from fleetrun.cli.argv import split
from fleetrun.cli.configfile import Config
from fleetrun.cli.option import Option
from fleetrun.errors import UsageError
from fleetrun.model import Request, Setting
from fleetrun.rundir import secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    ConfigFile = Callable[[str], Config]

EXAMPLE = Path(__file__).parents[2] / "configs" / "fleetrun.yaml"
CLOUD = {
    "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
    "POD_IP": "10.0.0.2",
    "PADDLE_TRAINER_ID": "1",
    "TRAINER_PORTS_NUM": "2",
}


@pytest.fixture
def config_file(elsewhere: Path) -> ConfigFile:
    """Return a function that reads its text as ./fleetrun.yaml."""

    def read(text: str) -> Config:
        Path("fleetrun.yaml").write_text(text, encoding="utf-8")
        return configfile.read("fleetrun.yaml")

    return read


def asked(
    *words: str, environ: Mapping[str, str] | None = None, config: Config | None = None
) -> Request:
    """Return the request that WORDS make before a script."""
    return request.resolve(split([*words, "train.py"]), environ or {}, config or Config())


def refusal(
    *words: str, environ: Mapping[str, str] | None = None, config: Config | None = None
) -> str:
    """Return what is said when there is no such request."""
    with pytest.raises(UsageError) as error:
        asked(*words, environ=environ, config=config)
    return str(error.value)


def bare(request: Request) -> Request:
    """Return REQUEST without what was said about it."""
    return request._replace(notes=(), typed=(), given=(), settings=())


def setting(request: Request, name: str) -> Setting:
    """Return the one setting called NAME."""
    (only,) = [setting for setting in request.settings if setting.name == name]
    return only


# -- who wins --

# Two values as texts of an option of each kind, but for those that want others.
BY_KIND = {
    "flag": ("true", "false"),
    "bool": ("true", "false"),
    "int": ("1", "2"),
    "float": ("0.5", "0.6"),
    "duration": ("60", "90"),
    "text": ("one", "two"),
    "texts": ("one", "two"),
    "list": ("0", "1"),
}
VALUES = {
    "strategy": ("amp", "comm_fusion"),
    "nnodes": ("1", "1:1"),
    # A config file needs quotes around a colon and a space.
    "wrap": ("0:nice", "1:nice"),
    "profile": ("0:3-7", "1:2-2"),
    "log_max_size": ("100M", "2G"),
}


def values(option: Option) -> tuple[str, str]:
    """Return two values of OPTION as texts."""
    usual = option.kind.words[:2] if option.kind.name == "choice" else BY_KIND[option.kind.name]
    first, second = VALUES.get(option.label, usual)
    return first, second


FILLING = [
    option
    for option in options.OPTIONS
    if not option.is_pair and option.label not in {"config", "help", "version"}
]


@pytest.mark.parametrize("option", FILLING, ids=lambda option: option.label)
def test_s75_the_command_line_wins_over_the_environment_over_the_file_over_the_default(
    option: Option, config_file: ConfigFile
) -> None:
    first, second = values(option)
    name = option.label
    default = asked()
    assert setting(default, name).source == "default"
    words, environ, config = [f"{option.opts[0]}={first}"], {}, None
    if name not in configfile._NOT_HERE:
        config = config_file(f"# a comment\n{name}: {second}\n")
        assert setting(asked(config=config), name).source == "fleetrun.yaml:2"
    for variable in option.env:
        environ = {variable: second}
        requested = asked(environ=environ, config=config)
        assert setting(requested, name).source == f"${variable}"
    requested = asked(*words, environ=environ, config=config)
    assert setting(requested, name).source == "command line"
    shown = secrets.HIDDEN if secrets.is_secret(name) else first
    assert setting(requested, name).value == shown
    # A strategy keeps what belongs to it together.
    field = "strategy" if option.group == "strategy" else option.field
    assert field in requested._fields


def test_without_anything_the_defaults_are_those_of_the_model() -> None:
    plain = asked()
    fields = type(plain)._field_defaults
    others = {"script", "settings", "typed"}
    assert {name: value for name, value in plain._asdict().items() if name not in others} == {
        name: value for name, value in fields.items() if name not in others
    }


def test_a_variable_that_makes_no_sense_only_matters_when_it_counts() -> None:
    environ = {"PADDLE_NPROC_PER_NODE": "many"}
    assert asked("--nproc_per_node=2", environ=environ).nproc_per_node == 2
    assert refusal(environ=environ).startswith(
        "--nproc_per_node=many (from $PADDLE_NPROC_PER_NODE): give a whole number"
    )


@pytest.mark.parametrize("word", ["--gpus=", "--log_dir= ", "--ips=", "--job_id=", "--tee="])
def test_an_empty_value_counts_as_not_given(word: str) -> None:
    made = asked(word)
    name = word.partition("=")[0]
    assert bare(made) == bare(asked())
    assert made.notes == (f"{name} is empty and counts as not given.",)


# -- values of their own kind --


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True), st.text()))
def test_variables_come_through_as_they_are(variables: dict[str, str]) -> None:
    clean = {name: value.replace("\0", "") for name, value in variables.items()}
    made = asked(*(f"--env={name}={value}" for name, value in clean.items()))
    assert dict(made.env) == clean


def test_variables_of_file_and_command_line_are_put_together(config_file: ConfigFile) -> None:
    config = config_file("env:\n  A: 1\n  B: 2\n")
    requested = asked("--env=B=3", config=config)
    assert requested.env == (("A", "1"), ("B", "3"))
    assert setting(requested, "env.A").source == "fleetrun.yaml:2"
    assert setting(requested, "env.B").source == "command line"


def test_s70_secrets_are_not_among_the_settings(config_file: ConfigFile) -> None:
    config = config_file("env: {DB_PASSWORD: hunter2, http_proxy: 'http://me:hunter2@p:1'}\n")
    requested = asked("--env=HF_TOKEN=hunter2", config=config)
    assert ("HF_TOKEN", "hunter2") in requested.env
    assert "hunter2" not in str(requested.settings)
    assert setting(requested, "env.HF_TOKEN").value == "***"
    assert setting(requested, "env.http_proxy").value == "http://***@p:1"


# -- what is meant --

XCCL, TRAINERS = "PADDLE_XCCL_BACKEND", "PADDLE_TRAINER_ENDPOINTS"
ENDPOINTS = "10.0.0.1:6170,10.0.0.1:6171,10.0.0.2:6170,10.0.0.2:6171"
MET = "--nnodes=2 --master=a:1"
TYPED_WINS = "(in Paddle's launcher, the variable overrides the option)."
MEET = "--master: give HOST:PORT, the address of the job's first host"
ONE_HOST = "has no effect: the job is on one host; for several, give all --nnodes=N."
ROLE = {"TRAINING_ROLE": "TRAINER"}
SERVERS = {**ROLE, "PADDLE_PSERVERS_IP_PORT_LIST": "a:1"}
# Words, variables, fields of the request, and all remarks (None: whatever is said).
# fmt: off
MEANT: list[tuple[str, Mapping[str, str], Mapping[str, object], tuple[str, ...] | None]] = [
    # The first variable of an option counts; a typed option wins, and says so.
    ("", {"FLAGS_START_PORT": "7000", "PADDLE_START_PORT": "6000"}, {"start_port": 6000}, ()),
    ("", {"FLAGS_START_PORT": "7000", "PADDLE_START_PORT": ""}, {"start_port": 7000}, ()),
    ("--nproc=2 --log_level=debug",
     {"PADDLE_NPROC_PER_NODE": "4", "PADDLE_LOG_LEVEL": "DEBUG", "PADDLE_JOB_ID": "j"},
     {"nproc_per_node": 2},
     ("--nproc is read as --nproc_per_node.",
      f"--nproc=2 overrides $PADDLE_NPROC_PER_NODE=4 {TYPED_WINS}")),
    # A range of hosts makes an elastic job; others stand by where hosts meet.
    ("--nnodes=2:4 --master=10.0.0.1:6170 --elastic_timeout=5", {},
     {"nnodes": "2:4", "elastic_timeout_s": 5.0}, ()),
    ("--nnodes=2:2 --master=10.0.0.1:6170", {}, {"nnodes": "2"}, ()),
    ("--nnodes=1:8 --ips=10.0.0.1,10.0.0.2", {}, {"nnodes": "1:2"}, ()),
    (f"--spares=1 {MET}", {}, {"spares": 1}, ()),
    ("--spares=1", {}, {"spares": 0}, ()),
    ("--spares=1 --ips=10.0.0.1,10.0.0.2", {}, {"spares": 0}, ()),
    # Endpoints in the environment name the hosts, but not those of a rank, or of one host.
    *((words, {name: ENDPOINTS, "PADDLE_TRAINERS_NUM": "2"},
       {"ips": ("10.0.0.1", "10.0.0.2"), "nnodes": "2", "start_port": 6170}, ())
      for name in (TRAINERS, "DISTRIBUTED_TRAINER_ENDPOINTS") for words in ("", "--nnodes=2")),
    *(("", {TRAINERS: ENDPOINTS, name: value}, {"ips": (), "nnodes": "1"}, None)
      for name, value in (("PADDLE_LOCAL_RANK", "0"), ("PADDLE_RANK_IN_NODE", "0"),
                          ("FLEETRUN_JOB", "outer"), (TRAINERS, "10.0.0.1:6170,10.0.0.1:6171"))),
    ("--nnodes=1", {TRAINERS: ENDPOINTS}, {"ips": (), "nnodes": "1"}, None),
    ("--ips=a,b,c", {TRAINERS: ENDPOINTS}, {"ips": ("a", "b", "c")}, None),
    ("", {TRAINERS: "n1,n2"}, {"ips": ("n1", "n2")}, None),
    # Listed hosts are counted; a variable gives way to a typed list.
    ("--ips=10.0.0.1,,10.0.0.2", {}, {"ips": ("10.0.0.1", "10.0.0.2"), "nnodes": "2"},
     ("--ips=10.0.0.1,,10.0.0.2 has an empty entry, which counts as not given.",)),
    ("--ips=a,b --nnodes=2", {}, {"nnodes": "2"}, ()),
    ("--ips=a", {"PADDLE_NNODES": "2"}, {"nnodes": "1"},
     ("$PADDLE_NNODES=2 is ignored: --ips names 1 host.",)),
    # A host without the address of another is the first.
    ("--nnodes=2", {}, {"master": ":0", "nnodes": "2"}, ()),
    ("--nnodes=2:4 --rank=0", {}, {"master": ":0", "nnodes": "2:4"}, ()),
    ("--nnodes=2 --master=:8080", {}, {"master": ":8080", "nnodes": "2"}, ()),
    ("--master=:8080 --nnodes=1", {}, {"master": ":8080", "nnodes": "1"},
     (f"--master {ONE_HOST}",)),
    ("--nnodes=1", {}, {"master": None, "nnodes": "1"}, ()),
    # Paddle's variable says which of several hosts this is, where nothing else does, as in Paddle.
    (MET, {"PADDLE_TRAINER_ID": "1"}, {"rank": 1}, ()),
    (f"{MET} --rank=-1", {"PADDLE_TRAINER_ID": "1"}, {"rank": 1}, ()),
    (f"{MET} --rank=0", {"PADDLE_TRAINER_ID": "1"}, {"rank": 0}, ()),
    (MET, {"PADDLE_TRAINER_ID": "1", "PADDLE_RANK": "0"}, {"rank": 0}, ()),
    (MET, {"PADDLE_TRAINER_ID": "-1"}, {"rank": None}, ()),
    (MET, {"PADDLE_TRAINER_ID": "1", "PADDLE_CURRENT_ENDPOINT": "a:1"}, {"rank": None}, ()),
    (MET, {"PADDLE_TRAINER_ID": "1", "PADDLE_LOCAL_RANK": "0"}, {"rank": None}, ()),
    ("--ips=a,b", {"PADDLE_TRAINER_ID": "1"}, {"rank": None}, ()),
    ("", {"PADDLE_TRAINER_ID": "1"}, {"rank": None}, None),
    # As PaddleMIX writes it.
    ("--master 127.0.0.1 --nnodes 1 --ips 127.0.0.1:8080", {},
     {"ips": ("127.0.0.1",), "nnodes": "1"},
     (f"--master {ONE_HOST}",)),
    # Paddle's words for elastic jobs.
    *((words, environ, {"master": "etcd://a:1", "nnodes": "2:4", "job_id": "bert"}, ())
      for words, environ in (
          ("--master=etcd://a:1 --nnodes=2:4 --job_id=bert", {}),
          ("--elastic_server=a:1 --np=2:4 --job_id=bert", {}),
          ("", {"PADDLE_ELASTIC_SERVER": "a:1", "PADDLE_ELASTIC_NP": "2:4",
                "PADDLE_ELASTIC_JOB_ID": "bert"}))),
    ("--elastic_server=etcd://a:1 --np=2", {}, {"master": "etcd://a:1"}, ()),
    # Where hosts meet.
    *((f"--nnodes=2 --master={master} --rank=1 --rdzv_timeout=5", {},
       {"nnodes": "2", "master": master, "rank": 1, "rdzv_timeout_s": 5.0,
        "heartbeat_timeout_s": 10.0}, ())
      for master in ("a:1", "etcd://a:1,10.0.0.2:2379", "http://10.0.0.1:6170")),
    ("--nnodes=1 --master=127.0.0.1:6768", {}, {"master": "127.0.0.1:6768"},
     (f"--master {ONE_HOST}",)),
    ("", {"PADDLE_MASTER": "127.0.0.1:6768"}, {}, ()),
    ("", {"POD_IP": "fd00::7"}, {"host": None},
     ("$POD_IP=fd00::7 is ignored: Paddle reads no IPv6.",)),
    ("--host=fd00::1", {}, {"host": None}, ("--host=fd00::1 is ignored: Paddle reads no IPv6.",)),
    # A place among hosts needs several hosts.
    ("--ips=a,b --rank=1", {}, {"rank": 1}, ()),
    ("--ips=a,b --rank -1", {}, {"rank": None}, ()),
    ("--rank=0", {}, {"rank": None}, ()),
    ("--rank=2", {}, {"rank": None}, (f"--rank {ONE_HOST}",)),
    ("--rank=1 --master=:1 --nnodes=1", {}, {"rank": None},
     (f"--master and --rank {ONE_HOST.replace('has', 'have')}",)),
    ("", {"PADDLE_RANK": "2"}, {"rank": None},
     ("this job is on one host and ignores what another launcher left behind: $PADDLE_RANK.",)),
    ("--rank=1", CLOUD, {"rank": 1}, ()),
    # The kind of devices is what an option or a variable names.
    ("", {}, {"device_kind": None}, ()),
    ("--devices=0", {}, {"device_kind": None}, ()),
    ("--mlus=0", {}, {"device_kind": "mlu"}, ()),
    ("--devices=0 --device_kind=foo", {}, {"device_kind": "foo"}, ()),
    ("--dcus=0", {}, {"device_kind": "gpu"}, ()),
    ("--device_kind=dcu --gpus=0", {}, {"device_kind": "gpu"}, ()),
    ("--devices=0", {XCCL: "sdaa"}, {"device_kind": "sdaa"}, ()),
    ("--devices=0 --device_kind=mlu", {XCCL: "sdaa"}, {"device_kind": "mlu"}, None),
    ("--device_kind=MLU", {}, {"device_kind": "mlu"}, ()),
    (f"--devices=0 --env {XCCL}=mlu", {XCCL: "sdaa"}, {"device_kind": "mlu"}, None),
    ("", {XCCL: " "}, {"device_kind": None}, ()),
    *((listed, {XCCL: "iluvatar_gpu"}, {"devices": "0,1", "device_kind": "iluvatar_gpu"},
       (f"{listed} names ILUVATAR_GPUs: ${XCCL}=iluvatar_gpu.",))
      for listed in ("--gpus=0,1", "--npus=0,1", "--xpus=0,1")),
    ("--gpus=0,1 --mlus=2", {}, {"devices": "2", "device_kind": "mlu"}, ()),
    ("--gpus=0,1 --gpus=2", {}, {"devices": "2"}, ()),
    # torchrun's word.
    *((words, {}, {"redirects": True}, ()) for words in ("--redirects 3", "--redirects")),
    ("--redirects 0", {}, {"redirects": False}, ()),
    # Variables of a cluster are no leftovers of another launcher.
    ("", CLOUD, {"host": "10.0.0.2"}, ()),
    ("", {**CLOUD, "PADDLE_NNODES": "2"}, {"nnodes": "2"}, ()),
    # The mode, named or by what only it has.
    *((words, environ, {"run_mode": mode.lower()}, ())
      for mode in ("ps", "PS-heter", "heter", "rpc")
      for words, environ in ((f"--run_mode={mode}", {}), ("", {"PADDLE_RUN_MODE": mode}))),
    *((words, {}, {"run_mode": "ps"}, ())
      for words in ("--server_num=1 --worker_num=2", "--servers=a:1 --workers=a:2",
                    "--coordinators=a:1", "--heter_worker_num=1;2")),
    ("--server_num=0", {}, {"run_mode": "collective"}, ()),
    ("--heter_worker_num=0", {}, {"run_mode": "collective"}, ()),
    ("", ROLE, {"run_mode": "collective"}, None),
    ("--run_mode=collective", SERVERS, {"run_mode": "collective"}, None),
    # The cluster knows its hosts, whatever their number.
    ("", {**SERVERS, "PADDLE_NNODES": "4"}, {"nnodes": "4"}, ()),
    ("", {"PADDLE_WITH_GLOO": "1"}, {}, ()),
    ("", {"PADDLE_SORT_IP": "1"}, {},
     (f"$PADDLE_SORT_IP has no effect: {options.find('sort_ip').reason}",)),
    ("", {"PADDLE_ELASTIC_LEVEL": "1"}, {},
     (f"$PADDLE_ELASTIC_LEVEL has no effect: {options.find('elastic_level').reason}",)),
    ("", {"PADDLE_SORT_IP": "0", "PADDLE_ELASTIC_LEVEL": "-1"}, {}, ()),
]
NO_NUMBER = "give a number of hosts, 1 or more, or MIN:MAX."
NO_NAME = "give a name without slashes and spaces"
# Words, variables, and what stands in the refusal.
REFUSED: list[tuple[str, Mapping[str, str], str]] = [
    ("--tee=x", {}, "--tee=x: give all, or ranks such as 0,3 or 0-3."),
    ("--tee=0-99999999", {}, "--tee=0-99999999: give all, or ranks such as 0,3 or 0-3."),
    ("--profile=0:0-3", {}, "--profile=0:0-3: give ranks and steps, such as"),
    ("--tee=1-x", {}, "--tee=1-x: give all, or ranks such as 0,3 or 0-3."),
    *((f"--job_id={name}", {}, f"--job_id={name}: {NO_NAME}") for name in ("a/b", "..", "a\x7fb")),
    ("--env=1A=2", {}, "--env=1A=***: give KEY=VALUE"),
    ("--env==2", {}, "--env==***: give KEY=VALUE"),
    ("--env=\xe9=2", {}, "--env=\xe9=***: give KEY=VALUE"),
    *((f"--nnodes={count}", {}, f"--nnodes={count}: {NO_NUMBER}")
      for count in ("\u0662", "0", "x", "9" * 5000, "1:x")),
    ("--max_restart=x", {}, "--max_restart=x: give a whole number, 0 or more."),
    ("--nnodes=3", {TRAINERS: ENDPOINTS}, "names 2 hosts"),
    ("--master=a:7000 --nnodes=3", {TRAINERS: ENDPOINTS}, "names 2 hosts; omit one of them."),
    ("--ips=a,b --nnodes=3", {}, "--nnodes=3: --ips names 2 hosts; omit one of them."),
    ("", {"PADDLE_NNODES": "2", "PADDLE_IPS": "a"}, "names 1 host;"),
    ("--nnodes=2 --rank=1", {}, "or give --master=HOST:PORT"),
    ("--np=2", {}, "or give --master=HOST:PORT"),
    ("--nnodes=2 --master=:many", {}, MEET),
    ("--nnodes=2 --master=a", {}, MEET),
    ("--nnodes=2 --master=fd00::1:80", {}, MEET),
    ("--nnodes=2 --master=[fd00::1]:80", {}, MEET),
    ("--nnodes=2 --master=etcd://[fd00::1]:2379", {}, MEET),
    ("--nnodes=4:2 --master=a:1", {}, NO_NUMBER),
    ("--nnodes=2 --master=a:1 --rank=2", {}, "--rank=2: the job has 2 hosts, 0 to 1."),
    ("--nnodes=2:3 --spares=1 --master=a:1 --rank=4", {}, "the job has 4 hosts, 0 to 3."),
    ("--nnodes=2 --master=a:1", {"PADDLE_TRAINER_ID": "7"},
     "--rank=7 (from $PADDLE_TRAINER_ID): the job has 2 hosts, 0 to 1."),
    ("--nnodes=2:4 --ips=a", {}, "names 1 host"),
    ("--nnodes=2:4 --master=a:1 --run_mode=rpc", {}, "only collective jobs"),
    ("--nnodes=2 --master=etcd://a", {}, MEET),
    ("--nnodes=2 --master=etcds://a:1", {}, MEET),
    ("--nnodes=2 --master=etcd://me:secret@a:1", {}, MEET),
    ("--elastic_server=a --np=2", {}, "--elastic_server: give HOST:PORT, the"),
    ("--gpus=0 --device_kind=mlu", {},
     "--device_kind=mlu: --gpus=0 names GPUs; give one of the two, or --devices."),
    ("--device_kind=a:8", {}, "give the name that Paddle has for it: npu, mlu, gpu."),
    ("", {"PADDLE_DISTRI_BACKEND": "hccl"},
     "--backend=hccl (from $PADDLE_DISTRI_BACKEND): give one of auto, nccl, "),
    ("--run_mode=collective --server_num=1", {},
     "--run_mode=collective: --server_num requests parameter servers; omit one of them."),
    ("--server_num=1", {"PADDLE_RUN_MODE": "collective"},
     "--run_mode=collective (from $PADDLE_RUN_MODE): --server_num requests parameter servers;"),
]
# fmt: on


@pytest.mark.parametrize(("words", "environ", "fields", "notes"), MEANT)
def test_what_words_and_variables_mean_together(
    words: str,
    environ: Mapping[str, str],
    fields: Mapping[str, object],
    notes: tuple[str, ...] | None,
) -> None:
    made = asked(*words.split(), environ=environ)
    assert {name: getattr(made, name) for name in fields} == fields
    assert notes in {None, made.notes}
    assert setting(made, "run_mode").value.lower() == made.run_mode


@pytest.mark.parametrize(("words", "environ", "sentence"), REFUSED)
def test_what_makes_no_sense_together_is_one_sentence(
    words: str, environ: Mapping[str, str], sentence: str
) -> None:
    refused = refusal(*words.split(), environ=environ)
    assert sentence in refused
    assert refused.startswith(sentence) or not sentence.startswith("--")


# -- hosts --


def test_a_password_of_etcd_is_not_repeated() -> None:
    assert "secret" not in refusal("--nnodes=2", "--master=etcd://me:secret@a:1")


# -- what another launcher left behind --


def test_s11_rank_variables_of_another_launcher_are_ignored_with_one_warning() -> None:
    environ = {"PADDLE_TRAINER_ID": "3", "PADDLE_TRAINERS_NUM": "8"}
    assert bare(asked(environ=environ)) == bare(asked())
    (note,) = asked(environ=environ).notes
    assert note == (
        "this job is on one host and ignores what another launcher left behind: "
        "$PADDLE_TRAINERS_NUM, $PADDLE_TRAINER_ID."
    )


def test_s11_a_launch_inside_a_rank_does_not_join_the_job_around_it() -> None:
    environ = {
        "PADDLE_GLOBAL_RANK": "3",
        "PADDLE_NNODES": "2",
        "PADDLE_MASTER": "etcd://a:1",
        "PADDLE_RANK": "1",
    }
    made = asked(environ=environ)
    assert (made.nnodes, made.master, made.rank) == ("1", None, None)
    assert len(made.notes) == 1
    assert "$PADDLE_NNODES" in made.notes[0]
    assert "give --master=HOST:PORT" in refusal(environ={"PADDLE_NNODES": "2"})


# -- without effect --


@pytest.mark.parametrize("option", options.UNUSED, ids=lambda option: option.label)
def test_what_has_no_effect_says_so(option: Option) -> None:
    made = asked(f"{option.opts[0]}=1")
    assert made.notes == (f"{option.opts[0]} has no effect: {option.reason}",)
    assert bare(made) == bare(asked())
    # As a variable that is exported once for all jobs may say.
    assert bare(asked(f"{option.opts[0]}=0")) == bare(asked())


# -- the config file --


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: 0\n", "fleetrun.yaml:1: no such option: gpu; did you mean gpus?"),
        ("\nxyzzy: 0\n", "fleetrun.yaml:2: no such option: xyzzy; `fleetrun --help=all` lists"),
        ("[a]: 0\n", "fleetrun.yaml:1: write one `option: value` a line."),
        ("quiet: 1\n? [a, b]\n: c\n", "fleetrun.yaml:2: write one `option: value` a line."),
        ("? {a: b}\n: c\n", "fleetrun.yaml:1: write one `option: value` a line."),
        ("nproc_per_node: abc\n", "fleetrun.yaml:1: nproc_per_node=abc: give a whole number"),
        ("tee: x\n", "fleetrun.yaml:1: tee=x: give all, or ranks"),
        ("quiet: maybe\n", "fleetrun.yaml:1: quiet=maybe: give true or false."),
        ("job_id: a\nlog_dir: [a]\n", "fleetrun.yaml:2: log_dir: give plain values: give DIR."),
        ("gpus: {a: 1}\n", "fleetrun.yaml:1: gpus: give plain values: give LIST."),
        ('log_dir: "a\\0b"\n', "fleetrun.yaml:1: log_dir: give plain values: give DIR."),
        ("gpus: [[0]]\n", "fleetrun.yaml:1: gpus: give plain values: give LIST."),
        ("env: {A: {B: 1}}\n", "fleetrun.yaml:1: env: give plain values: give KEY=VALUE"),
        ("env: [[A]]\n", "fleetrun.yaml:1: env: give plain values: give KEY=VALUE"),
        ("dry-run: json\n", "fleetrun.yaml:1: dry-run belongs on the command line."),
        ("config: a\n", "fleetrun.yaml:1: config belongs on the command line."),
        ("env: [A]\n", "fleetrun.yaml:1: env=A: give KEY=VALUE"),
        ("env: A\n", "fleetrun.yaml:1: env=A: give KEY=VALUE"),
        ("\nenv:\n  1A: 2\n", "fleetrun.yaml:3: env=1A=***: give KEY=VALUE"),
        ("- gpus\n", "fleetrun.yaml:1: write one `option: value` a line."),
        ("gpus\n", "fleetrun.yaml:1: write one `option: value` a line."),
        ("a: b: c\n", "fleetrun.yaml:1: this is not YAML: "),
        ("a: 'b\n", "fleetrun.yaml:2: this is not YAML: "),
        ("a: \x01\n", "fleetrun.yaml: this is not YAML: "),
    ],
)
def test_a_bad_file_is_refused_with_its_line(
    text: str, message: str, config_file: ConfigFile
) -> None:
    with pytest.raises(UsageError) as error:
        config_file(text)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "gpus:\n", "gpus: null\n", "gpus: ''\n", "env:\n"]
)
def test_a_file_may_say_nothing(text: str, config_file: ConfigFile) -> None:
    made = asked(config=config_file(text))
    assert made.devices is None
    assert setting(made, "config") == Setting("config", "fleetrun.yaml", "current folder")


def test_a_file_may_use_any_spelling_and_an_empty_variable(config_file: ConfigFile) -> None:
    made = asked(config=config_file("selected-gpus: 0\nenv: {A: }\nscale: 2\n"))
    assert made.devices == "0"
    assert made.env == (("A", ""),)
    assert made.notes[0].startswith("scale has no effect")


def test_the_file_names_strategies_and_its_fields_stand_below_those_typed(
    config_file: ConfigFile,
) -> None:
    config = config_file("strategy: [amp, overlap]\nset:\n  nccl_comm_num: 3\n  lamb: true\n")
    strategy = asked("--set=nccl_comm_num=4", config=config).strategy
    assert strategy is not None
    assert strategy.sources == ("amp", "overlap", "--set")
    last = {setting.name: (setting.value, setting.source) for setting in strategy.settings}
    assert (last["nccl_comm_num"], last["lamb"]) == ((4, "--set"), (True, "fleetrun.yaml:4"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        configfile.read(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(UsageError, match="Is a directory"):
        configfile.read(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"job_id: \xe9\n")
    with pytest.raises(UsageError, match=r"latin\.yaml: this config file is not UTF-8 text"):
        configfile.read(str(tmp_path / "latin.yaml"))


def test_the_example_file_shows_every_option_and_can_be_used(config_file: ConfigFile) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert configfile.read(str(EXAMPLE)).given == ()
    config = config_file(re.sub(r"(?m)^#(?=\w|  \w)", "", text))
    shown = {option.label for option in options.OPTIONS}
    missing = shown - {given.name for given in config.given}
    by_ssh = {"hosts", "hostfile"}
    assert missing == {"config", "detach", "dry_run", "help", "version"} | by_ssh
    assert asked(config=config).ips == ("10.0.0.1", "10.0.0.2")
