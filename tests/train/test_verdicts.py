"""The table of verdicts, measured: the effect of each field in each Paddle and graph, on CPUs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import devices
import ports
import pytest
from training import PYTHONS, run

from fleetrun.errors import UsageError
from fleetrun.rundir import rankfile
from fleetrun.strategy import fields, load

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.train

SCRIPT = Path(__file__).parent / "models" / "every_field.py"
AT_ONCE = 3
OLD, NEW = ("2.6.2",), ("3.3.1",)
BOTH_PADDLES = (*OLD, *NEW)


class Case(NamedTuple):
    """Fields that are tried together; STOPS is what Paddle says when it stops with them.

    Each runs on the Paddles VERSIONS, with --long also on LATER ones: where the table says the same
    of both Paddles, small cases take turns, and what other tests train is left to --long.
    """

    asked: str
    graph: str
    versions: tuple[str, ...] = BOTH_PADDLES
    stops: str = ""
    options: str = ""
    ranks: int = 2
    later: tuple[str, ...] = ()


BOTH = """
    fuse_all_reduce_ops=true fuse_grad_size_in_MB=1 fuse_grad_size_in_num=2
    fuse_grad_size_in_TFLOPS=4 last_comm_group_size_MB=0.5 nccl_comm_num=2
    calc_comm_same_stream=true find_unused_parameters=true split_data=true
    gradient_merge=true gradient_merge_configs.k_steps=2 fuse_grad_merge=true
    gradient_scale_configs.scale_strategy=sum adam_d2sum=true sync_batch_norm=true
    cudnn_exhaustive_search=true conv_workspace_size_limit=512
    cudnn_batchnorm_spatial_persistent=true pipeline_configs.accumulate_steps=1
    tensor_parallel_configs.tensor_init_seed=3 hybrid_configs.dp_degree=2 a_sync=true
    a_sync_configs.k_steps=4 is_fl_ps_mode=true with_coordinator=true elastic=true
    qat_configs.weight_bits=8 without_graph_optimization=true
    fuse_elewise_add_act_ops=true fuse_all_optimizer_ops=true fuse_bn_act_ops=true
    fuse_bn_add_act_ops=true fuse_relu_depthwise_conv=true fuse_broadcast_ops=true
    fuse_gemm_epilogue=true fused_attention=true fused_feedforward=true enable_inplace=true
    enable_addto=true enable_backward_optimizer_op_deps=true enable_auto_fusion=true
    enable_sequential_execution=true fix_op_run_order=true cache_runtime_context=true
    allow_cuda_graph_capture=true reduce_strategy=1 debug_graphviz_path=graph num_threads=2
    num_iteration_per_drop_scope=3 num_iteration_per_run=2 use_thread_barrier=true
"""
RECOMPUTE = "recompute=true recompute_configs.checkpoints=relu_1.tmp_0"
LARS = "lars=true lars_configs.lars_coeff=0.002"
LAMB = "lamb=true lamb_configs.lamb_weight_decay=0.02"
LOCALSGD = "localsgd=true localsgd_configs.k_steps=2"
ADAPTIVE = "adaptive_localsgd=true adaptive_localsgd_configs.init_k_steps=2"
AMP = "amp=true amp_configs.incr_ratio=3"
SHARDING = "sharding=true sharding_configs.sharding_degree=2"
TWO_LEVELS = "use_hierarchical_allreduce=true hierarchical_allreduce_inter_nranks=2"
CUDNN = "fuse_dot_product_attention=true fuse_resunit=true"
OVERLAPPED = "nccl_comm_num=2 fuse_grad_size_in_num=2"

# Every boolean as false, except where that is refused or only one Paddle has the field.
OFF = " ".join(
    f"{field.name}=false"
    for field in fields.TABLE
    if field.kind == "bool"
    and not field.only
    and (field.refused is None or field.refused[0] is True)
)

DYNAMIC = (
    f"{BOTH} {RECOMPUTE} {LARS} {LAMB} {LOCALSGD} {ADAPTIVE} {AMP} {SHARDING} {CUDNN}"
    " dgc=true dgc_configs.rampup_step=2 pipeline=true"
    " tensor_parallel=true auto=true semi_auto=true auto_search=true"
)

CASES = (
    Case(DYNAMIC, "dygraph"),
    # Merged gradients are sent when the last backward has ended.
    Case(f"sync_nccl_allreduce=false {OVERLAPPED}", "dygraph", (), later=BOTH_PADDLES),
    # These run without the groups that hybrid_configs makes.
    Case("heter_ccl_mode=true", "dygraph", OLD),
    # Plain data parallel, as fleet with three ranks does not connect over gloo.
    Case(TWO_LEVELS, "dygraph", (), options="--plain", ranks=3, later=BOTH_PADDLES),
    Case("fp16_allreduce=true", "dygraph", (), later=BOTH_PADDLES),
    Case("bf16_allreduce=true", "dygraph", (), later=BOTH_PADDLES),
    Case("fp16_allreduce=true bf16_allreduce=true", "static", OLD, later=NEW),
    Case("heter_ccl_mode=true", "dygraph", NEW, "has no attribute '_hcg'"),
    Case(f"{BOTH} sync_nccl_allreduce=true heter_ccl_mode=true", "static", NEW),
    Case(f"{BOTH} sync_nccl_allreduce=true heter_ccl_mode=true {CUDNN}", "static", OLD),
    Case(TWO_LEVELS, "static", (), ranks=3, later=BOTH_PADDLES),
    Case(f"{LARS} {RECOMPUTE} {AMP}", "static", OLD, later=NEW),
    Case(LAMB, "static", (), options="--adam", later=BOTH_PADDLES),
    Case(f"{LOCALSGD} {OVERLAPPED}", "static", (), later=BOTH_PADDLES),
    Case(ADAPTIVE, "static", NEW, later=OLD),
    Case(SHARDING, "static", OLD, "FLAGS_dynamic_static_unified_comm"),
    Case(SHARDING, "static", (), later=NEW),
    Case("auto=true", "static", (), "global work size [2]", later=BOTH_PADDLES),
    Case("tensor_parallel=true", "static", (), "not in groups of 1", later=BOTH_PADDLES),
)


# Over one communicator Paddle's reducer sends the gradients of a small network, and never waits.
OFFS = (
    Case(f"{OFF} nccl_comm_num=2", "dygraph", NEW, later=OLD),
    Case(OFF, "static", OLD, later=NEW),
)


class Stop(NamedTuple):
    """Fields, the switch first, with which Paddle stops before a rank waits for another."""

    names: str
    says: str
    versions: tuple[str, ...] = tuple(PYTHONS)


# For static graphs; one process per Paddle tries them all, without fleetrun.
STOPS = (
    Stop("pipeline", "without op_device set"),
    Stop("dgc dgc_configs", "DGC is only support GPU"),
    Stop("semi_auto", "AssertionError"),
    Stop("auto_search", "IndexError"),
    Stop("fuse_dot_product_attention", "has not been registered", NEW),
    Stop("fuse_resunit", "not built with CUDNN Frontend", NEW),
)


class Done(NamedTuple):
    """How a case ended in one Paddle: exit code, output, and what is said of each field."""

    code: int
    output: str
    statuses: dict[str, str]


def names(case: Case) -> list[str]:
    return list(
        dict.fromkeys(word.partition("=")[0].partition(".")[0] for word in case.asked.split())
    )


def launch(version: str, case: Case, folder: Path) -> Done:
    folder.mkdir()
    words = [f"--set={word}" for word in case.asked.split()]
    options = [*case.options.split(), *(["--static"] if case.graph == "static" else [])]
    argv: list[str | Path] = [
        "-m",
        "fleetrun",
        f"--nproc_per_node={case.ranks}",
        *words,
        SCRIPT,
        *options,
    ]
    ended = run(PYTHONS[version], argv, folder)
    proof = rankfile.evidence(str(folder / "log" / "latest"), "0")
    rows: list[dict[str, Any]] = [] if proof is None else proof["fields"]
    logs = "".join(log.read_text() for log in folder.glob("log/workerlog.*"))
    statuses = {str(row["name"]): str(row["status"]) for row in rows}
    return Done(ended.returncode, ended.stdout + logs, statuses)


def stop(version: str, folder: Path) -> str:
    """Let a rank without a peer try what stops Paddle; return its output."""
    folder.mkdir()
    ends = [f"127.0.0.1:{port}" for port in ports.free(3)]
    tried = [refusal.names.split()[0] for refusal in STOPS if version in refusal.versions]
    ended = run(
        PYTHONS[version],
        [SCRIPT, "--static", "--each", *tried],
        folder,
        PADDLE_TRAINER_ID="0",
        PADDLE_TRAINERS_NUM="2",
        PADDLE_CURRENT_ENDPOINT=ends[0],
        PADDLE_TRAINER_ENDPOINTS=",".join(ends[:2]),
        PADDLE_MASTER=ends[2],
    )
    return ended.stdout


class Tried(NamedTuple):
    """What runs: launches by case, and each Paddle's process that tries what stops it."""

    launches: dict[tuple[str, Case], Future[Done]]
    stops: dict[str, Future[str]]


@pytest.fixture(scope="module")
def tried(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tried]:
    folder = tmp_path_factory.mktemp("verdicts")
    is_long = request.config.getoption("--long")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield Tried(
            {
                (version, case): pool.submit(launch, version, case, folder / f"{version}-{place}")
                for place, case in enumerate((*CASES, *OFFS))
                for version in (*case.versions, *(case.later if is_long else ()))
            },
            {version: pool.submit(stop, version, folder / version) for version in PYTHONS},
        )
        pool.shutdown(cancel_futures=True)


def expected(version: str, graph: str, name: str, *, is_off: bool = False) -> str:
    if (name, graph, devices.kind()) == ("fp16_allreduce", "dygraph", "npu") and not is_off:
        # Only gloo sums them wrongly.
        return fields.EFFECTIVE
    field = next(row for row in fields.TABLE if row.name == name)
    return fields.outcome(field, paddle=version, graph=graph, device="cpu", is_off=is_off).status


def measured(done: Done, case: Case) -> dict[str, str]:
    """Return the status of each field of CASE, in the words of the table."""
    if case.stops:
        assert done.code != 0, case
        assert case.stops in done.output, done.output[-4000:]
        return dict.fromkeys(names(case), fields.REFUSED)
    assert done.code == 0, done.output[-4000:]
    return {name: done.statuses.get(name, "no word").replace("_", " ") for name in names(case)}


@pytest.mark.parametrize(
    ("version", "graph"),
    [
        pytest.param(version, case.graph, marks=pytest.mark.long if version in case.later else ())
        for case in OFFS
        for version in fields.PADDLES
    ],
)
def test_false_is_off_but_where_that_is_said(tried: Tried, version: str, graph: str) -> None:
    (case,) = [case for case in OFFS if case.graph == graph]
    seen = measured(tried.launches[version, case].result(), case)
    seen.pop("nccl_comm_num", None)
    table = {name: expected(version, graph, name, is_off=True) for name in seen}
    assert seen == table


@pytest.mark.parametrize("graph", fields.GRAPHS)
@pytest.mark.parametrize("version", fields.PADDLES)
def test_each_verdict_is_what_this_paddle_does(tried: Tried, version: str, graph: str) -> None:
    seen: dict[str, str] = {}
    for (paddle, case), future in tried.launches.items():
        if (paddle, case.graph) == (version, graph) and case not in OFFS:
            seen |= measured(future.result(), case)
    if graph == "static":
        lines = tried.stops[version].result().splitlines()
        for refusal in STOPS:
            if version in refusal.versions:
                name, *parts = refusal.names.split()
                (how,) = [line for line in lines if line.startswith(f"{name} stopped: ")]
                assert refusal.says in how
                seen |= dict.fromkeys((name, *parts), fields.REFUSED)
    table = {name: expected(version, graph, name) for name in seen}
    wrong = {name: (status, table[name]) for name, status in seen.items() if status != table[name]}
    assert wrong == {}, "measured, and what the table says"
    others = {field.name for field in fields.TABLE if field.refused is None}
    tried_later = {name for case in CASES if version in case.later for name in names(case)}
    assert seen.keys() | tried_later == {*others, "without_graph_optimization"}


REFUSED = [(field, field.refused) for field in fields.TABLE if field.refused is not None]


@pytest.mark.parametrize(("field", "refused"), REFUSED, ids=[field.name for field, _ in REFUSED])
def test_what_makes_ranks_diverge_never_comes_so_far(
    field: fields.Field, refused: tuple[object, str]
) -> None:
    value, why = refused
    with pytest.raises(UsageError, match="is refused") as told:
        load.parse_set(f"{field.name}={str(value).lower()}")
    assert why in str(told.value)
    for version in fields.PADDLES:
        assert expected(version, "static", field.name, is_off=value is False) == fields.REFUSED
