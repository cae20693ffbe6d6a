"""What the tests of this folder leave out on the device under test, and why."""

from __future__ import annotations

import devices
import pytest

# What Paddle says, what fleetrun says first, and the tests: of a file or function, "[": with those
# parameters.
LEFT_OUT = {
    # test_what_paddle_refuses_on_plugins_is_refused_first
    "Paddle connects the ranks of static graphs on GPUs and XPUs only: fleetrun refuses them": """
        test_strategy_setups.py[static] test_verdicts.py[static]
        test_a_build_for_gpus_trains_on_cpus_as_a_build_for_cpus
        test_a_static_graph_merges_in_a_block_of_its_own
        test_computation_fusion_makes_fewer_operators_of_a_static_graph
        test_hierarchical_sums_are_the_sums_of_all_ranks
        test_merged_programs_learn_what_larger_batches_teach_over_two_communicators
        test_one_communicator_of_gloos_is_always_waited_for
        test_optimizers_of_large_batches_take_the_place_of_the_scripts
        test_packed_programs_learn_what_plain_ones_learn
        test_ranks_part_ways_between_averages_with_localsgd
        test_shards_of_parameters_learn_what_all_learn
        test_the_computation_goes_on_while_gradients_are_summed_unless_that_is_waited_for
        test_what_the_fused_operator_would_get_wrong_is_left_alone
        """,
    # test_a_paddle_without_kernels_of_a_plugin_averages_itself
    "Paddle 2.6.2 has no kernels of the device, so gradients are no views of a buffer: fleetrun "
    "leaves them to Paddle's reducer": """
        test_compression.py[2.6.2] test_profile.py[2.6.2] test_rank_checks.py[2.6.2]
        test_strategy_dygraph.py[2.6.2] test_strategy_kinds.py[2.6.2]
        test_strategy_matrix.py[2.6.2] test_strategy_reducer.py[2.6.2]
        test_strategy_setups.py[2.6.2] test_verdicts.py[2.6.2-dygraph]
        test_ranks_do_not_wait_for_one_whose_check_fails[2.6.2]
        test_updates_of_sharding_stage_1_are_seen[2.6.2]
        """,
    "Paddle 2.6.2 has no kernel memcpy_d2h of the device, with which it runs static graphs": """
        test_each_update_is_a_heartbeat[static-2.6.2]
        test_each_update_is_a_heartbeat[tests-2.6.2]
        test_programs_and_losses_that_cannot_be_merged_are_refused[2.6.2]
        """,
    # test_paddle_itself_mixes_up_strided_gradients_and_crashes_on_sparse_ones
    "Paddle crashes where it adds up sparse gradients on plug-ins: the report says what to do": """
        test_sparse_gradients_of_functions_are_averaged_as_dense_ones[asked2]
        """,
    "Paddle has no kernel add of bfloat16 for the device nor the CPU": """
        test_models_that_are_cast_after_they_were_wrapped_are_averaged_in_their_new_dtype
        """,
    "only times of gloo's allreduces are measured: fleetrun takes the sizes of auto": """
        test_planned_buckets_are_those_that_are_reduced_and_train_as_one_process
        """,
    "it is gloo that sums float16 wrongly": """
        test_what_the_backend_sums_wrongly_is_refused_and_sent_in_32_bits
        """,
    "it is gloo that does not connect four ranks": """
        test_fleet_connects_four_ranks_over_gloo
        """,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is left out."""
    if not devices.kind():
        return
    for item in items:
        for reason, names in LEFT_OUT.items():
            if any(_is_named(item, name) for name in names.split()):
                item.add_marker(pytest.mark.skip(reason=reason))
                break


def _is_named(item: pytest.Item, name: str) -> bool:
    test, _, parameters = name.rstrip("]").partition("[")
    function, _, chosen = item.name.rstrip("]").partition("[")
    return (not test or test in (function, item.path.name)) and parameters in chosen
