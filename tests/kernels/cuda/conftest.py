"""Chooses which of the shim's suites run with ``make test``: a quick one of each op. The rest are thorough.

The SIMT shim computes a GPU's threads one by one, so these suites take minutes. ``make cuda-check`` runs them all
and keeps a record of the sources that they ran on; ``make check`` refuses sources that no run has seen.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.kernels.cuda.check import LAUNCHED_ENV
from baton.kernels.cuda.library import launched

HERE = f"{Path(__file__).parent}/"
QUICK_FILES = {
    "test_ahead",
    "test_dense",
    "test_moe",
    "test_dispatch",
    "test_fused_step",
    "test_gates",
    "test_meetings",
    "test_rank_heads",
    "test_rank_meetings",
    "test_table",
}
QUICK = {  # beginnings of test names, by file
    "test_by_row": (
        "test_few_rows_are_the_float64_oracles[100-72",
        "test_more_than_64_rows",
        "test_what_the_library",
    ),
    "test_branches": ("test_a_captured_tree", "test_planted_bugs_of_trees_are_caught[STEP_BRANCH_ORDER"),
    "test_branches_at_once": ("test_no_schedule_changes_a_bit_of_a_tree[0]",),
    "test_cascade_attention": ("test_suffixes_of_any_length_are_merged[fp8_e4m3-0]",),
    "test_linear": ("test_the_cpus_suite_holds_on_the_shim[bad_rows", "test_a_gate_in_the_epilogue"),
    "test_lm_head": ("test_logits_are_those_of_float64", "test_more_rows_than_one_tile"),
    "test_long_chunks": ("test_long_and_short",),
    "test_lora": ("test_the_cpus_suite_holds_on_the_shim[parts", "test_a_rows_bits"),
    "test_megakernel": ("test_a_batch_of_more_rows", "test_no_access_of_shared_memory_races"),
    "test_on_demand": ("test_pages_that_others", "test_what_a_step_brings"),
    "test_paged_attention": ("test_narrow_heads_of_bfloat16_are_too[(1, 1, 8)]",),
    "test_prefill": ("test_bfloat16_rows_in_and_out", "test_a_row_has_the_same_bits_alone"),
    "test_prompt_attention": (
        "test_long_chunks_are_the_float64_oracles[bfloat16-(6, 2, 32)]",
        "test_wide_heads_of_bfloat16_are_by_warp_groups_and_the_float64_oracles[(1, 1, 64)]",
    ),
    "test_row_ops": ("test_the_cpu_twins_checks_hold_on_the_shim[race",),
    "test_shared_prefixes": ("test_who_shares_a_prefix_answers_as_on_the_cpu[bfloat16-1]",),
    "test_shim": ("test_",),
    "test_split": (
        "test_a_product_in_parts_is_the_float64_oracles[bf16-8]",
        "test_eight_parts_have_the_bits",
        "test_parts_of_an_earlier",
    ),
    "test_speculative_accept": ("test_what_else_holds_of_it", "test_no_schedule_races"),
    "test_step": (
        "test_each_op_answers",
        "test_pages_that_others",
        "test_a_step_that_fails",
        "test_the_host",
        "test_after_warming",
        "test_a_card_without",
        "test_nothing_is",
    ),
}
SLOW = (
    "test_a_barrier_orders_a_block_under_any_schedule",
    "spin-no progress",
    "norms_are_right",
    "[ranks_to_256_and_parameters_beside_layers]",
    "test_the_bits_are_the_cpus[385]",
    "test_a_planted_bug_beside_experts_is_caught",
)


def quick(item: pytest.Item) -> bool:
    """Tells whether ``item`` is one of the tests that run in every suite."""
    if any(slow in item.name for slow in SLOW):
        return False
    return item.path.stem in QUICK_FILES or item.name.startswith(QUICK.get(item.path.stem, ("-",)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE) and not quick(item):
            item.add_marker(pytest.mark.thorough)


def pytest_sessionfinish() -> None:
    """Tells ``make cuda-check`` which kernels were launched."""
    if path := os.environ.get(LAUNCHED_ENV):
        with Path(path).open("a") as file:  # several processes may run the tests
            file.write("".join(f"{kernel}\n" for kernel in sorted(launched())))
