"""The corners of matrices that ``make test`` leaves to ``make test-all``: patterns of test ids, each with its reason.

What stays runs the settings that differ most: the lowest and the highest stage, every tier, each precision once.
"""

import re
from collections.abc import Iterable

CORNERS: dict[str, str] = {
    r"test_one_pass_update.py::test_units_updated.*\[(?!2-3-bf16|1-2-fp16|3-2-fp32).*\]": "each once",
    r"test_tensor_parallel.py::test_two_ways.*\[(llama|llama, tied|neox|llama with.*)-.*\]": "two models stay",
    r"test_tensor_parallel.py::test_two_ways.*\[(llama, tied.*-[012]|gpt2-[023])\]": "each at one stage",
    r"test_tensor_parallel.py::test_four_ranks.*\[(llama|neox|gpt2|llama, tied.*|llama without.*)\]": "one stays",
    r"test_tensor_parallel.py::test_norms_on.*\[(llama|llama, tied|llama with.*)\]": "one stays",
    r"test_tensor_parallel.py::test_whole_values.*\[[02]\]": "at stage 3 there is most to gather",
    r"test_tensor_parallel.py::test_saved_at.*\[llama.*\]": "packed weights have several boxes",
    r"test_tensor_parallel.py::test_(sixteen.*\[fp16|a_model_born.*\[0|parameters_that.*\[1)\]": "the other stays",
    r"test_weights_from_files.py::test_each_rank.*\[(gpt2-[01]|llama-[03])\]": "each model stays at one stage",
    r"test_weights_from_files.py::test_a_part_of.*\[(gpt2-3|llama-1)\]": "each model stays at one stage",
    r"test_weights_from_files.py::test_a_rank_holds.*\[2-[03]\]": "without tensor parallelism it stays",
    r"test_mesh_axes.py::test_a_megatron.*\[([012]-True|[123]-False)\]": "both orders of ranks, first and last stage",
    r"test_pipeline_failures.py::test_a_layer_that_raises\[4-(gpipe|zero_bubble).*\]": "on two ranks they stay",
    r"test_pipeline_checkpoints.py::.*\[(one rank-2 stages 1f1b|2 stages interleaved-one rank)\]": "four others stay",
    r"test_pipeline_engine.py::test_sources_of_data\[set_data.*\]": "a function over an iterator stays",
    r"test_parity_matrix.py::test_corner\[.*-[12]\]": "stages 0 and 3 take every path that a corner of a model takes",
    r"test_parity_matrix.py::test_three_ranks\[.*-[12]\]": "padding is that of stage 3, or none",
    r"test_parity_matrix.py::test_parity\[(?!plain|accumulation|by_hand-|clipping).*-1\]": "four show stage 1",
    r"test_parity_matrix.py::test_parity\[(checkpoint_non.*|retain_graph|used_twice|manual|by_hand_twice|tied)-2\]": (
        "stages 0 and 3 stay, and the other cases at stage 2"
    ),
    r"test_parity_matrix.py::test_three_ranks\[(conditional|tied)-0\]": "nothing is cut at stage 0",
    r"test_checkpoint_resume.py::test_optimizers\[.*-0\]": "stage 3 cuts every kind of state, stage 0 none",
    r"test_checkpoint_resume.py::test_models\[.*-1\]": "masters are cut as at stage 3",
    r"test_checkpoint_resume.py::test_meshes_of_four_ranks\[.*-fp32\]": "bf16 has masters and weights apart",
    r"test_checkpoint_resume.py::test_optimizers\[(NAdam|RMSprop|Adagrad|Adamax|Rprop|RAdam|Lion)-.*\]": (
        "a tensor or two a parameter, as with AdamW and SGD"
    ),
    r"test_checkpoint_resume.py::test_half_finished_windows\[3-[12]\]": "stages 0 and 3, and a window of one, stay",
    r"test_checkpoint_resume.py::test_windows_under_no_sync\[2-[12]\]": "stages 0 and 3, and a window of one, stay",
    r"test_checkpoint_layouts.py::test_any_layout_to_any_layout\[(4 ranks mics|4 ranks hpz|2 ranks stage 1)\]": (
        "each is loaded from the other sources as well"
    ),
    r"test_checkpoint_layouts.py::test_half_a_window_keeps_its_mean\[4 ranks stage 0-.*\]": "two other sources stay",
    r"test_invariant_i7_divergence.py::test_invariant_i7_ranks_may_diverge\[.*-train\]": "train_and_eval trains too",
    r"test_invariant_i7_divergence.py::test_invariant_i7_three_ranks\[.*(overlap_comm|10000).*\]": "defaults stay",
    r"test_invariant_i7_divergence.py::test_invariant_i7_under_other_plans\[.*-1\]": "one plan of two that reduce late",
    r"test_invariant_i7_divergence.py::test_invariant_i7_a_surprise_under_other_plans\[1-.*\]": "stages 2 and 3 stay",
    r"test_invariant_i7_divergence.py::test_invariant_i7_three_ranks\[(disjoint_experts|swapping)-.*\]": (
        "two scenarios on three ranks, all of them on two"
    ),
    r"test_invariant_i7_divergence.py::test_invariant_i7_a_surprise_after_a_habit\[needs_(the_tower|an_expert)\]": (
        "needs_another_one, and the mirror images skips_..., stay"
    ),
    r"test_invariant_i7_divergence.py::.*with_two_engines_interleaved\[(needs_the_tower|twice)\]": "one of three kinds",
    r"test_invariant_i7_divergence.py::.*on_one_of_three_ranks\[twice\]": "two of three kinds",
    r"test_invariant_i7_divergence.py::.*before_a_collective_of_the_users\[needs_the_tower\]": "two of three kinds",
    r"test_invariant_i8_errors.py::test_invariant_i8_a_failed_batch.*\[[12]-.*\]": "windows have 1 and 2",
    r"test_offload_parity.py::test_every_way_on_one_rank\[wide_accumulation-fp16\]": "fp16 runs on two ranks",
    r"test_offload_parity.py::test_every_way_on_two_ranks\[bf16\]": "bf16 runs on one rank",
    r"test_offload_parity.py::test_lower_stages\[1-fp32\]": "fp16 at the same stage stays",
    r"test_offload_parity.py::test_models\[(manual_accumulation|frozen_checkpointed|checkpoint_reentrant|unused)\]": (
        "paths of the gradients, which the matrix without offload takes"
    ),
    r"test_offload_parity.py::test_loops\[2-.*\]": "stage 3 takes every path",
    r"test_offload_parity.py::test_every_way_on_one_rank\[wide-fp32\]": "fp32 runs on two ranks",
    r"test_offload_state_access.py::test_as_in_memory\[.*-fp16\]": "fp32 and bf16 stay",
    r"test_one_pass_update.py::test_every_stage\[(1-.*|[02]-fp16)\]": "each stage and precision stays with another",
    r"test_offload_state_access.py::test_as_in_memory_at_lower_stages\[(read.*|edit_local)\]": "stage 3 has all",
    r"test_one_pass_update.py::test_every_stage\[2-bf16\]": "stages 0 and 3 stay",
    r"test_one_pass_update.py::test_classes_with_groups\[(AdamW-False|.*Adagrad-True)\]": "three of five stay",
    r"test_invariant_i7_divergence.py::.*error_mode_after_a_habit\[(needs_(the_tower|an_expert)|skips_an_.*|twice)\]": (
        "three of seven surprises"
    ),
    r"test_invariant_i7_divergence.py::test_ranks_that_have_not_differed.*\[(0-1|1-.*|2-1)\]": "stages 0, 2 and 3 stay",
    r"test_invariant_i7_divergence.py::test_invariant_i7_a_surprise_after_a_habit\[twice\]": "five kinds stay",
    r"test_invariant_i7_divergence.py::.*error_mode_names_rank_module_and_step\[.*-eval\]": "training has a forward",
    r"test_invariant_i7_divergence.py::.*ranks_may_diverge\[(nothing_in_common|skip_last|swapping)-train_and_eval\]": (
        "eight of eleven scenarios; error mode and accumulation have these"
    ),
    r"test_invariant_i7_divergence.py::test_invariant_i7_three_ranks\[twice-.*\]": "one scenario on three ranks",
    r"test_checkpoint_resume.py::test_models\[(shared_module|odd_shapes|mixed_dtype|batch_norm)-3\]": (
        "frozen, tied and unused stay; odd shapes and batch norm are in 16 bits on three ranks"
    ),
    r"test_checkpoint_resume.py::test_optimizers\[(Lamb|SGD|AdamW_amsgrad)-3\]": "the states of odd kinds stay",
    r"test_checkpoint_resume.py::test_(half_finished_windows|windows_under_no_sync)\[1-[12]\]": "stages 0 and 3 stay",
    r"test_offload_parity.py::test_models\[(functional_tied|tied|frozen|mixed_dtype)\]": "everything has them all",
    r"test_parity_matrix.py::test_corner\[(constants|containers|rotary|shared_module|functional_tied|frozen_.*)-0\]": (
        "nothing is released at stage 0"
    ),
    r"test_parity_matrix.py::test_three_ranks\[unused-.*\]": "conditional leaves parameters out as well",
    r"test_parity_matrix.py::test_two_level_sharding\[conditional-.*\]": "conditional runs on three ranks",
    r"test_parity_matrix.py::test_parity\[(by_hand|clipping)-[12]\]": "stages 0 and 3 stay",
    r"test_dtypes.py::test_frozen_8_bit_floats_stay_the_codes_they_are\[.*float8_e5m2\]": "one code of two",
    r"test_gathered_parameters.py::test_what_is_taken_inside_keeps_its_values_after_the_exit\[.*-built\]": (
        "models born sharded have the same units, and no whole copy"
    ),
    r"test_invariant_i8_errors.py::test_invariant_i8_a_failed_batch_has_not_happened\[.*-loss_backward\]": (
        "one way into the backward of two"
    ),
    r"test_offload_state_access.py::test_as_in_memory\[(edit_gathered|edit_local)-bf16\]": "fp32 stays for both",
    r"test_one_pass_update.py::test_every_stage\[3-fp16\]": "bf16 stays",
    r"test_lr.py::test_trace_does_not_depend_on_ranks_or_accumulation\[.*-4-4\]": "two ranks stay",
    r"test_cuda_sources.py::test_every_op_compiles_for_ampere_and_hopper_in_one_library": "half a minute of compiling",
    r"test_aio_sanitizers.py::test_no_report\[thread-(libaio|threads)\]": "the engine around a backend is the same",
    r"test_dtypes.py::test_bf16_with_exact_reduction.*-[12]\]": "reduction as at the stages that stay",
    r"test_dtypes.py::test_fp16_static_scale.*-[12]\]": "reduction as at the stages that stay",
    r"test_dtypes.py::test_dynamic_scale_follows.*-[12]\]": "one rule for all stages",
    r"test_example.py::test_every_level_gives_the_same_curve.*": "seven jobs; parity is held cell by cell elsewhere",
    r"test_harness.py::test_a_planted_fault_is_killed_or_survives_in_a_copy": "a test of python -m tests.mutants",
    r"test_mutants.py::test_each_is_seen_or_cannot_be": "two minutes; the planted faults of the matrix stay",
    r"test_mutants.py::test_a_few_are_seen_by_the_case_that_is_named": "as above",
    r"test_matrix.py::test_agreement_is_hidden_in_a_step_whatever_the_number_of_ranks\[8\]": "1024 ranks stay",
}


def corner(test_id: str) -> str | None:
    """The pattern that makes ``test_id`` a corner."""
    return next((pattern for pattern in CORNERS if re.search("/" + pattern + "$", test_id)), None)


def unmatched(test_ids: Iterable[str]) -> set[str]:
    """Patterns that name no test any more."""
    return set(CORNERS) - {corner(test_id) for test_id in test_ids}
