"""The corners of matrices that ``make test`` leaves to ``make test-all``: patterns of test ids, each with its reason.

What stays runs the settings that differ most: the lowest and the highest stage, every tier, each precision once.
"""

import re
from collections.abc import Hashable, Iterable, Sequence, Set
from itertools import combinations

CORNERS: dict[str, str] = {
    r"test_hybrid_engine.py::test_it_generates_as.*_without\[(0|3, small.*)\]": "bf16, and layers all cut, stay",
    r"test_hybrid_engine.py::test_(an_error.*\[1-True|adapters.*\[(1-eval|3-train))\]": "each kind stays once",
    r"test_hybrid_engine.py::test_a_model_that_leaves.*\[True\]": "layer by layer more can go wrong",
    r"test_hybrid_parts.py::test_two_ranks_gen.*without\[0, decoder\]": "stages 2 and 3 stay",
    r"test_hybrid_parts.py::test_(weights_move.*\[3\]|parts_take.*\[True\]|an_error.*\[1\])": "the other stays",
    r"test_hybrid_parts.py::test_ranks_that_share_layers_in_training.*": "generation in parts is tested elsewhere",
    r"test_several_engines.py::test_states_of_an_idle.*\[(1-bf16|3-fp32)\]": "stages 2 and 3 stay, and both precisions",
    r"test_several_engines.py::test_engines_with_adapters.*\[\((0, 2|1, 3)\)\]": "one pair of stages stays",
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
    r"test_normalize_tokens.py::test_an_update.*\[(plain|told|half and half|now.*)-[12]\]": "stages 0 and 3 stay",
    r"test_normalize_tokens.py::test_any_split.*\[\((1, 8|2, 2).*\]": "the finest splits stay",
    r"test_reallocate.py::test_any_layout.*\[(tp4|zero3 on the host|tp2 zero3)-.*\]": "one pair of each axis stays",
    r"test_reallocate.py::test_(ranks_that_train.*\[zero3\]|masters_.*\[bf16\])": "other layouts stay",
    r"test_quantized_base.py::test_adapters.*-[12]\]": "stages 0 and 3 stay",
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
    r"test_invariant_i7_divergence.py::.*a_surprise_after_predictions\[needs_(the_tower|an_expert)\]": (
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
    r"test_invariant_i7_divergence.py::.*mode_after_predictions\[(needs_(the_tower|an_expert)|skips_an_.*|twice)\]": (
        "three of seven surprises"
    ),
    r"test_invariant_i7_divergence.py::test_ranks_that_have_not_differed.*\[(0-1|1-.*|2-1)\]": "stages 0, 2 and 3 stay",
    r"test_invariant_i7_divergence.py::.*a_surprise_after_predictions\[twice\]": "five kinds stay",
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
    r"test_parity_matrix.py::test_parity\[(?!plain|used_twice|tied|unused|manual_acc).*-0\]": "six cases stay",
    r"test_parity_matrix.py::test_parity\[(unused|checkpoint_reentrant|manual_accumulation|two_losses)-2\]": (
        "four cases stay at stage 2"
    ),
    r"test_parity_matrix.py::test_(corner|three_ranks)\[(?!everything).*-0\]": "everything stays at stage 0",
    r"test_parity_matrix.py::test_two_level_sharding\[plain-.*\]": "accumulation stays",
    r"test_checkpoint_resume.py::test_every_stage_and_precision\[stage [12] (?!fp32|nvme).*\]": ("stages 0 and 3 stay"),
    r"test_checkpoint_resume.py::test_every_stage_and_precision\[stage [02] (async save|fp32|uneven shards|nvme)\]": (
        "stages 1 and 3 stay"
    ),
    r"test_checkpoint_resume.py::test_optimizers\[(OddElements|Shampooish)-3\]": "OddState, Adafactor and Muon stay",
    r"test_checkpoint_resume.py::test_models\[.*-3\]": "these are in 16 bits on three ranks",
    r"test_checkpoint_resume.py::test_meshes_of_four_ranks\[hpz-.*\]": "mics stays",
    r"test_checkpoint_resume.py::test_half_finished_windows\[3-.*\]": "a window of one step stays",
    r"test_checkpoint_resume.py::test_windows_under_no_sync\[[12]-0\]": "stage 3 stays",
    r"test_offload_parity.py::test_lower_stages\[2-bf16\]": "stage 1 in fp16 stays",
    r"test_offload_parity.py::test_every_way_on_two_ranks\[fp16\]": "fp32 stays",
    r"test_offload_parity.py::test_models\[(conditional|everything|single)\]": "by_hand and odd_shapes stay",
    r"test_offload_parity.py::test_four_ranks\[(plain|hpz)\]": "mics stays",
    r"test_offload_parity.py::test_loops\[3-(unsynced|froze_later)\]": "interrupted stays",
    r"test_offload_parity.py::test_other_backends\[threads\]": "libaio stays; the tests of the engine take each",
    r"test_offload_parity.py::test_a_rank_without_an_element.*\[Lamb\]": "AdamW stays",
    r"test_invariant_i7_divergence.py::.*with_two_engines_interleaved.*": "the surprises of one engine stay",
    r"test_invariant_i7_divergence.py::.*on_one_of_three_ranks\[needs_another_one\]": "one of three kinds",
    r"test_invariant_i7_divergence.py::.*a_surprise_after_predictions\[(needs_another_one|other_order)\]": (
        "three kinds stay"
    ),
    r"test_invariant_i7_divergence.py::.*before_a_collective_of_the_users\[other_order\]": "one of three kinds",
    r"test_invariant_i7_divergence.py::.*under_other_plans\[2-(skips_an_expert|needs_another_one)\]": "one kind stays",
    r"test_invariant_i7_divergence.py::.*mode_after_predictions\[(other_order|needs_another_one)\]": (
        "one of seven surprises"
    ),
    r"test_invariant_i7_divergence.py::.*ranks_may_diverge\[(twice|recomputed|disjoint_experts|skip_tower)-.*\]": (
        "five of eleven scenarios"
    ),
    r"test_invariant_i7_divergence.py::.*with_accumulation\[.*-[12]\]": "stage 3 stays",
    r"test_invariant_i7_divergence.py::.*under_other_plans\[(skip_tower|disjoint_experts)-.*\]": (
        "the plans that differ most stay"
    ),
    r"test_launcher_hosts.py::test_(two_hosts_reduce_through_ssh|a_silence_ends_the_job_over_ssh.*)": (
        "nodes that are started by hand reduce; a dead host ends the job"
    ),
    r"test_launcher_hosts.py::.*dead_host_ends_the_job\[b\]": "the other host stays",
    r"test_update_behind.py::test_every_door_waits\[.*-2-.*\]": "stage 3 stays",
    r"test_update_behind.py::test_nor_on_two.*\[(bf16|fp16)\]": "fp32 stays",
    r"test_dtypes.py::test_bf16_with_exact_reduction.*\[(accumulation|unused|clipping|constants|rotary|tied)-0\]": (
        "stage 3 stays"
    ),
    r"test_dtypes.py::test_bf16_with_exact_reduction.*\[(constants|rotary|tied|clipping)-3\]": "four cases stay",
    r"test_dtypes.py::test_fp16_static_scale.*\[.*-0\]": "stage 3 stays",
    r"test_dtypes.py::test_dynamic_scale.*-0\]": "stage 3 stays",
    r"test_dtypes.py::test_bf16_default_reduction.*\[[012]\]": "stage 3 stays",
    r"test_dtypes.py::test_the_gate_sees_a_changed_dtype\[fp32\]": "bf16 stays",
    r"test_loops.py::test_loop\[.*-[12]\]": "stages 0 and 3 stay",
    r"test_loops.py::test_(scale_wrt_gas_false_does_not_divide|unmanaged_accumulation)\[[012]\]": "stage 3 stays",
    r"test_offload_optimizers.py::test_optimizers_on_two_ranks\[(Adagrad|adafactor|Lamb)\]": (
        "an elementwise one, Muon and a user's stay"
    ),
    r"test_optimizers.py::test_optimizer_by_name\[.*-[12]\]": "stages 0 and 3 stay",
    r"test_optimizers.py::test_client_optimizer_with_groups\[.*-callable-.*\]": (
        "an object stays; by name is a callable of ours"
    ),
    r"test_checkpoint_crash.py::test_killed_at_random_instants": "the turning points stay",
    r"test_checkpoint_crash.py::test_killed_at_a.*of_a_save\[(before the [om].*|after latest.*)\]": (
        "five turning points stay"
    ),
    r"test_checkpoint_crash.py::test_killed_twice_in_a_row.*": "once stays",
    r"test_one_pass_update.py::test_units_updated.*": "every stage stays",
    r"test_one_pass_update.py::test_classes_with_groups\[(FusedLion-True|SGD-False)\]": "one stays; FusedAdam's groups",
    r"test_one_pass_update.py::test_parts_that_are_frozen_later_are_put_back\[1\]": "stage 3 stays",
    r"test_one_pass_update.py::test_two_levels\[mics\]": "hpz stays",
    r"test_launched.py::test_fresh_processes\[init_first-deepspeed-2\]": (
        "the launcher's own tests and the examples start such jobs"
    ),
    r"test_compile.py::test_compiled_as_plain_in_whole_graphs\[(plain-0-2|used_twice-3-1)\]": (
        "frozen on two ranks stays"
    ),
    r"test_compile.py::test_blocks_that_the_client_compiles.*\[(_compile_blocks-False|_compile_forwards-True)\]": (
        "one of each stays"
    ),
    r"test_compile.py::test_a_block_entered_by_what_is_inside\[(Pairs|Within)-.*\]": "one stays",
    r"test_example.py::test_an_interrupted_run_goes_on.*": "resuming is held cell by cell elsewhere",
    r"test_checkpoint_layouts.py::test_any_layout_to_any_layout\[(1 rank stage 0)\]": (
        "each is loaded from the other sources as well"
    ),
    r"test_checkpoint_layouts.py::test_half_a_window_keeps_its_mean\[.*-reduced\]": "without reduction stays",
    r"test_checkpoint_layouts.py::test_odd_models_change_their_layout\[(frozen|tied)\]": "odd shapes stay",
    r"test_tensor_parallel.py::test_norms_on.*": "a second layout of the sequence; the refusals stay",
    r"test_started_by_others.py::test_(torchrun|two_ranks_of_a_scheduler\[_open_mpi\])": "Slurm's variables stay",
    r"test_offload_delayed.py::test_beside_the_next_step.*\[fp(16|32)-3\]": "bf16 stays",
    r"test_changed_models.py::test_what_is_frozen_in_the_middle.*\[(1-device|2-device|3-host)\]": (
        "the ends of the table, and what rests elsewhere at one stage"
    ),
    r"test_offload_doors.py::test_no_door.*\[(?!edited between-early|in each other-early|stepped inside-delayed"
    r"|one raised inside-delayed).*\]": "each way has two doors",
    r"test_offload_doors.py::test_nor_do_two.*\[(?!edited between-delayed).*\]": "one pair of engines",
    r"test_offload_doors.py::test_nor_where.*\[(?!saved-early).*\]": "one save",
    r"test_offload_delayed.py::test_one_rank_that_fails.*\[thread-(16 bit|pretrained|unsharded|edit|load)-3.*\]": (
        "a save and a stream stay, with a delay and without"
    ),
    r"test_failed_late_update.py::test_what_has.*\[(?!gradient-zenflow|load-delayed|set slot-behind|read-behind"
    r"|forward-behind-3-True).*\]": "each kind of update has a door that reads and one that writes",
    r"test_failed_late_update.py::test_doors_of.*\[(?!behind-local master|zenflow-local slot).*\]": "two doors stay",
    r"test_offload_zenflow.py::test_it_is_the_rule_for.*\[(2-.*|3-(?!odd_shapes).*)\]": "parameters of all ranks stay",
    r"test_zenflow_windows.py::test_settings_that.*\[3-False\]": "the host's update beside the window stays",
    r"test_zenflow_windows.py::test_a_hook_sees.*\[3-False\]": "beside the window it stays",
    r"test_zenflow_windows.py::test_what_is_frozen.*\[(2-True-|3-False-read)\]": "a save, and a hook, stay",
    r"test_zenflow_windows.py::test_the_window_goes_on"
    r".*\[(2-fp16-(?!.*overflow)|3-bf16-(?!.*(lost|loaded|restored))).*\]": (
        "an overflow, a lost batch and both ways to load stay"
    ),
    r"test_zenflow_windows.py::test_(an_overflow|two_engines).*": "an overflow in the middle of a window stays",
    r"test_zenflow_windows.py::test_a_rank_with.*\[5\]": "the middle of the first window stays",
    r"test_zenflow_windows.py::test_a_step_that_fails.*\[(?!_until_ended-4-2-True-thread|_bring_out-0).*\]": (
        "two parts stay"
    ),
    r"test_zenflow_windows.py::test_the_memory_plan.*\[(?!3-True).*\]": "one stays",
    r"test_offload_delayed.py::test_a_hook_on_one_rank.*\[(bf16|fp16)\]": "fp32 stays",
    r"test_offload_state_access.py::test_as_in_memory\[(edit_full|edit_gathered|edit_local)-fp32\]": (
        "lower stages edit whole weights, bf16 reads"
    ),
    r"test_offload_state_access.py::test_optimizer_state_round_trip\[ways[034]-.*\]": "two ways stay",
    r"test_invariant_i8_errors.py::test_invariant_i8_with_recomputation\[checkpoint_reentrant\]": (
        "the other kind stays"
    ),
    r"test_invariant_i8_errors.py::test_invariant_i8_no_memory_for_a_gather\[[36]\]": "two gathers stay",
    r"test_invariant_i8_errors.py::.*destroy_leaves_a_plain_model\[.*-at_rest\]": "amid a backward stays",
    r"test_three_axes.py::test_a_run_goes_on_at_any_other_layout\[stages of parts-(parts|stages of data ranks)\]": (
        "the others stay"
    ),
    r"test_zero_init.py::test_the_model_is_never_whole\[device\]": "meta stays",
    r"test_memory_present.py::test_states_go_to_the_drive_until_they_fit\[2\]": "one rank stays",
    r"test_verify_training.py::test_splits_that_are_too_far_from_the_whole_batch_fail": "what passes stays",
    r"test_bad_input.py::test_the_command_names_what_is_missing_and_fails\[odd batch\]": "in one process it stays",
    r"test_data_position.py::test_samplers_of_the_user\[.*-[01]-2\]": "three samplers stay with workers",
    r"test_data_position.py::test_only_batches_handed_out_count\[[0135]-2\]": "one stays with workers",
    r"test_invariant_i5_recomputation.py::test_invariant_i5_recomputation_never_releases\[.*-False\]": (
        "the other half of each stays"
    ),
    r"test_checkpoint_full_disk.py::test_a_full_and_then_a_read_only_filesystem": "a save that finds no space stays",
    r"test_calibrate.py::test_(one_rank_says|two_ranks_write).*": "several nodes stay",
    r"test_pipelines.py::test_(messages_travel.*\[(gpipe|1f1b)\]|four_stages_wait.*\[(interleaved|zbv)\])": (
        "one of each stays"
    ),
    r"test_checkpoint_held.py::test_(state_on_a_drive.*\[(SGD-.*|A.*-True)\]|an_update_waits.*\[(SGD|Adafactor)\])": (
        "one of each kind of state stays"
    ),
    r"test_io_tools.py::test_an_interrupted_run_leaves_no_file\[.*(-9|15)-.*\]": "interrupts stay",
    r"test_late_norm.py::test_not_one_bit_and_no_count_differs\[[012]-.*-Lion-.*\]": "Lion stays at stage 3",
    r"test_pipeline_parity.py::test_four_ranks\[4-zero_bubble.*\]": "two stages stay",
    r"test_aio_failures.py::test_full_disk\[ext4\]": "tmpfs stays",
    r"test_elastic_ranks.py::test_a_signal_to_the_command.*-10-200\]": "another signal stays",
    r"test_offload_visits.py::test_an_update_away_from_home_is_the_same\[(fp16|fp32)\]": "bf16 stays",
    r"test_invariant_i6_prefetch.py::test_invariant_i6_mispredictions.*\[(poked|eval)\]": "four kinds stay",
    r"test_agreement_cost.py::test_agreement_costs_what_the_formulas_say\[12\]": "other numbers of ranks stay",
    r"test_weights_from_files.py::test_each_rank_reads.*\[gpt2-3\]": "llama stays",
    r"test_failures_of_one_rank.py::test_a_micro_batch_that_only_one_rank_takes.*\[0\]": "stage 3 stays",
    r"test_hang.py::test_an_endless_loop.*": "the other faults stay",
    r"test_example_nvme.py::.*": "half a minute of jobs; the tests of drives stay",
    r"test_offload_early.py::test_not_one_bit.*\[[12]-.*\]": "stage 3 stays, and stage 2 where somebody meddles",
    r"test_offload_early.py::.*meddles_before_the_step\[(looking|dropped|twice|by hand|held|unsynced)-2\]": (
        "the others stay at stage 2"
    ),
    r"test_three_axes.py::test_a_run_goes_on.*\[stages of parts-four parts\]": "to one rank and from one rank stay",
    r"test_offload_parity.py::test_models\[by_hand\]": "by hand without offload, and odd shapes, stay",
    r"test_offload_delayed.py::test_a_save_brings.*\[(fp32|bf16)\]": "fp16 stays: masters and a scale",
    r"test_offload_birth_and_loan.py::test_a_model_born_on_a_drive.*\[1\]": "two ranks stay",
    r"test_parity_matrix.py::test_three_ranks\[(everything-0|tied-3)\]": "everything stays at stage 3",
    r"test_one_pass_update.py::test_models\[(frozen|odd_shapes|tied)\]": "everything has them all",
    r"test_overlap.py::test_a_few_blocks_of_seven_billion": "the other widths stay, in test_matrix.py",
    r"test_launcher_hosts.py::test_(silence_ends_the_job_over_ssh.*|node_that_stays_away_is_named)": (
        "a pulled cable stays; the hub's counts of silence and absence are held by test_verdict.py"
    ),
    r"test_launcher_hosts.py::test_nodes_started_by_hand_reduce_in_any_order": "two hosts over ssh stay",
    r"test_launcher_hosts.py::test_paused_terminal_ends_no_job": "the suspended command stays",
    r"test_elastic_nodes.py::test_a_signal_to_one_launcher.*": "a node whose ranks have ended hears signals, too",
    r"test_lora_plan.py::test_planned_bytes_are_what_a_rank_holds\[1\]": "the other number of ranks stays",
}


def corner(test_id: str) -> str | None:
    """The pattern that makes ``test_id`` a corner."""
    return next((pattern for pattern in CORNERS if re.search("/" + pattern + "$", test_id)), None)


def unmatched(test_ids: Iterable[str]) -> set[str]:
    """Patterns that name no test any more."""
    return set(CORNERS) - {corner(test_id) for test_id in test_ids}


def covering(rows: Sequence[tuple[object, ...]]) -> set[int]:
    """Choose rows of a matrix so that each value of each column is there, and of three columns and more each pair of
    values that the matrix has: positions, greedily, the row with the most that is new first (a covering array).

    ``rows``: for each row its value in every column, hashable. Columns that always change together count as one.
    """
    columns = {column: None for column in zip(*rows, strict=True) if len(set(column)) > 1}
    if len(columns) < 2:
        return set(range(len(rows)))
    sizes = (1, 2) if len(columns) > 2 else (1,)
    wanted = [
        {(chosen, tuple(column[row] for column in chosen)) for size in sizes for chosen in combinations(columns, size)}
        for row in range(len(rows))
    ]
    return cover(wanted)


def cover(features: Sequence[Set[Hashable]]) -> set[int]:
    """Choose positions of rows that together have every feature, greedily, the row with the most that is new first."""
    kept, missing = set[int](), set[Hashable]().union(*features)
    while missing:
        best = max(range(len(features)), key=lambda row: (len(features[row] & missing), -row))
        kept.add(best)
        missing -= features[best]
    return kept
