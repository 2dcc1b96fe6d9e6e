"""The corners of matrices that ``make test`` leaves to ``make test-all``: patterns of test ids, each with its reason.

What stays runs the settings that differ most: the lowest and the highest stage, every tier, each precision once.
"""

import re
from collections.abc import Iterable

CORNERS: dict[str, str] = {
    r"test_parity_matrix.py::test_corner\[.*-[12]\]": "stages 0 and 3 take every path that a corner of a model takes",
    r"test_parity_matrix.py::test_three_ranks\[.*-[12]\]": "padding is that of stage 3, or none",
    r"test_checkpoint_resume.py::test_optimizers\[.*-0\]": "stage 3 cuts every kind of state, stage 0 none",
    r"test_checkpoint_resume.py::test_models\[.*-1\]": "masters are cut as at stage 3",
    r"test_checkpoint_resume.py::test_meshes_of_four_ranks\[.*-fp32\]": "bf16 has masters and weights apart",
    r"test_checkpoint_layouts.py::test_any_layout_to_any_layout\[(4 ranks mics|4 ranks hpz|2 ranks stage 1)\]": (
        "each is loaded from the other sources as well"
    ),
    r"test_checkpoint_layouts.py::test_half_a_window_keeps_its_mean\[4 ranks stage 0-.*\]": "two other sources stay",
    r"test_invariant_i7_divergence.py::test_invariant_i7_ranks_may_diverge\[.*-train\]": "train_and_eval trains too",
    r"test_invariant_i7_divergence.py::test_invariant_i7_three_ranks\[.*(overlap_comm|10000).*\]": "defaults stay",
    r"test_invariant_i7_divergence.py::test_invariant_i7_under_other_plans\[.*-1\]": "one plan of two that reduce late",
    r"test_invariant_i7_divergence.py::test_invariant_i7_a_surprise_under_other_plans\[1-.*\]": "stages 2 and 3 stay",
    r"test_offload_parity.py::test_every_way_on_one_rank\[wide_accumulation-fp16\]": "fp16 runs on two ranks",
    r"test_offload_parity.py::test_every_way_on_two_ranks\[bf16\]": "bf16 runs on one rank",
    r"test_offload_parity.py::test_lower_stages\[1-fp32\]": "fp16 at the same stage stays",
    r"test_offload_state_access.py::test_as_in_memory\[.*-fp16\]": "fp32 and bf16 stay",
    r"test_one_pass_update.py::test_every_stage\[(1-.*|[02]-fp16)\]": "each stage and precision stays with another",
    r"test_dtypes.py::test_bf16_with_exact_reduction.*-[12]\]": "reduction as at the stages that stay",
    r"test_dtypes.py::test_fp16_static_scale.*-[12]\]": "reduction as at the stages that stay",
    r"test_dtypes.py::test_dynamic_scale_follows.*-[12]\]": "one rule for all stages",
    r"test_example.py::test_every_level_gives_the_same_curve.*": "seven jobs; parity is held cell by cell elsewhere",
    r"test_harness.py::test_a_planted_fault_is_killed_or_survives_in_a_copy": "a test of python -m tests.mutants",
}


def corner(test_id: str) -> str | None:
    """The pattern that makes ``test_id`` a corner."""
    return next((pattern for pattern in CORNERS if re.search("/" + pattern + "$", test_id)), None)


def unmatched(test_ids: Iterable[str]) -> set[str]:
    """Patterns that name no test any more."""
    return set(CORNERS) - {corner(test_id) for test_id in test_ids}
