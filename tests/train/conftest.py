"""Skips the tests of what Paddle refuses on the device under test."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import devices
import pytest
from training import PYTHONS, run_program


class Refusal(NamedTuple):
    """What Paddle refuses: the program of device/programs.py that shows it, and Paddle's words.

    `tests` names files or functions; after "[" come the parameters of those that are skipped.
    """

    sentence: str
    program: str
    words: str
    tests: str
    nranks: int = 1


REFUSALS = (
    Refusal(
        "Paddle connects the ranks of static graphs on GPUs and XPUs only: fleetrun refuses them",
        "static",
        # The words of 3.3.1, and of 2.6.2, whose builds for CPUs lack this flag.
        "comm_id must be generated|FLAGS_dynamic_static_unified_comm cannot get its value",
        """
        test_verdicts.py[static]
        test_a_build_for_gpus_trains_on_cpus_as_a_build_for_cpus
        test_a_rank_that_lacks_what_the_others_do_not_use_ends_no_job[static]
        test_hierarchical_sums_are_the_sums_of_all_ranks
        test_merged_programs_learn_what_larger_batches_teach_over_two_communicators
        test_one_communicator_of_gloos_is_always_waited_for
        test_optimizers_of_large_batches_take_the_place_of_the_scripts
        test_packed_programs_learn_what_plain_ones_learn
        test_shards_of_parameters_learn_what_all_learn
        test_what_the_fused_operator_would_get_wrong_is_left_alone
        test_the_computation_goes_on_while_gradients_are_summed_unless_that_is_waited_for
        """,
        nranks=2,
    ),
    Refusal(
        "gradients are no views of a buffer: fleetrun leaves them to Paddle's reducer",
        "views",
        r"the buffer is \[0.0, 0.0, 0.0, 0.0\]",
        """
        test_compression.py[2.6.2] test_profile.py[2.6.2] test_rank_checks.py[2.6.2]
        test_strategy_dygraph.py[2.6.2] test_strategy_kinds.py[2.6.2]
        test_strategy_matrix.py[2.6.2] test_strategy_reducer.py[2.6.2]
        test_strategy_settings.py[2.6.2] test_verdicts.py[2.6.2-dygraph]
        test_ranks_do_not_wait_for_one_whose_check_fails[2.6.2]
        """,
    ),
    Refusal(
        "Paddle runs no static graphs on the device",
        "static",
        "no kernels which are registered in the memcpy_d2h operator",
        """
        test_each_update_is_a_heartbeat[static-2.6.2]
        test_programs_and_losses_that_cannot_be_merged_are_refused[2.6.2]
        """,
    ),
    Refusal(
        "Paddle cuts tensors for ranks on CPUs only",
        "cut",
        "The (Slice|Split) in reshard only supported on CPU",
        "test_updates_of_auto_parallel_are_seen_and_compared",
        nranks=2,
    ),
    Refusal(
        "Paddle has no kernel add of bfloat16 for the device nor the CPU",
        "halves",
        "of kernel `add` is not registered and fail to fallback to CPU",
        "test_models_that_are_cast_or_compiled_after_they_were_wrapped_are_averaged",
    ),
)
# Tests of gloo itself: sizes that are measured on it, its wrong sums, its failed connections.
OF_GLOO = """
    test_what_the_backend_sums_wrongly_is_refused_and_sent_in_32_bits
    test_fleet_connects_four_ranks_over_gloo
"""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip ITEM if Paddle, when asked now, refuses what it tries."""
    if not devices.kind():
        return
    if _is_named(item, OF_GLOO):
        pytest.skip("gloo connects CPUs only")
    parameters = getattr(item, "callspec", None)
    given = {*map(str, parameters.params.values())} if parameters else set()
    version = next((name for name in PYTHONS if name in given), "3.3.1")
    for refusal in REFUSALS:
        if _is_named(item, refusal.tests) and _refuses(refusal, version):
            pytest.skip(f"Paddle {version}: {refusal.sentence}")


def _is_named(item: pytest.Item, names: str) -> bool:
    function, _, chosen = item.name.rstrip("]").partition("[")
    named = [name.rstrip("]").partition("[") for name in names.split()]
    return any(
        test in (function, item.path.name) and parameters in chosen for test, _, parameters in named
    )


@cache
def _refuses(refusal: Refusal, version: str) -> bool:
    """Whether the Paddle of VERSION fails with the words of REFUSAL; any others are an error."""
    with tempfile.TemporaryDirectory() as folder:
        codes, outputs, _ = run_program(
            Path(folder), refusal.program, refusal.nranks, version, FLAGS_enable_pir_api="0"
        )
    assert not any(codes) or re.search(refusal.words, outputs[0]), (codes, outputs)
    return any(codes)
