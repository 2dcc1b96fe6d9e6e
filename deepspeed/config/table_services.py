"""Rows of the key table: IO, checkpoints, parallel layouts, experts, monitors, profiling, tuning, data, compilation, inference."""

from collections.abc import Mapping
from types import MappingProxyType

from deepspeed.config.support import Key, honoured, inert, not_yet

__all__ = ["SERVICES"]


def _inert(why: str, prefix: str, meanings: Mapping[str, str]) -> dict[str, Key]:
    """Keys below ``prefix`` that are accepted without effect for one reason."""
    return {prefix + name: inert(meaning, why) for name, meaning in meanings.items()}


def _honoured(prefix: str, meanings: Mapping[str, str]) -> dict[str, Key]:
    """Keys below ``prefix`` that take effect."""
    return {prefix + name: honoured(meaning) for name, meaning in meanings.items()}


def _details(gate: str, prefix: str, meanings: Mapping[str, str]) -> dict[str, Key]:
    """Keys below ``prefix`` that matter only where the switch ``gate`` is on."""
    return {prefix + name: not_yet(meaning, gate=gate) for name, meaning in meanings.items()}


_AIO = {
    "aio.block_size": honoured("Size of one IO request in bytes, rounded up to a multiple of 4096."),
    "aio.queue_depth": honoured("IO requests under way at once; absent means 32."),
    "aio.intra_op_parallelism": honoured("Threads for transfers that the kernel's queue cannot take."),
    "aio.single_submit": inert("Hand requests to the kernel one by one instead of in batches.", "requests go in batches as they come"),
    "aio.overlap_events": inert("Submit new requests while earlier ones complete.", "that is always done"),
    "aio.use_gds": not_yet("Copy between drive and GPU memory without passing through host memory."),
    "memory.host_limit": honoured('Most host memory of one rank, in bytes or as "3GiB"; the run is refused at once when it needs more.'),
    "memory.device_limit": honoured("Most device memory of one rank, likewise; where the device is the host, host_limit counts."),
    "aio.thread_count": inert(
        "An old name of intra_op_parallelism that was never read.", "never had an effect; use aio.intra_op_parallelism"
    ),
}

_PIPELINE = _inert(
    "PipelineModule, which is not in this release, would read it",
    "pipeline.",
    {
        "activation_checkpoint_interval": "Layers per recomputed block; above 0 it overrides the module's own setting.",
        "pipe_partitioned": "Split activations over tensor-parallel ranks when they are sent to the next stage.",
        "grad_partitioned": "Split gradients over tensor-parallel ranks when they are sent to the previous stage.",
        "use_reentrant": "false takes the non-reentrant recomputation; null and true the reentrant one.",
    },
) | _inert(
    "a note for people: the arguments of PipelineModule decide",
    "pipeline.",
    {
        "stages": "Number of pipeline stages.",
        "partition": "How layers are dealt out to the stages.",
        "seed_layers": "Seed every layer on its own when it is built.",
        "<any>": "A key of the client's own; it is stored and not read.",
    },
)

_TP = "tensor_parallel."
_SPEC = "tensor_parallel.partition_config.layer_specs[]."
_TENSOR_PARALLEL = {
    "tensor_parallel.autotp_size": not_yet("Ranks that share each layer; 0 and 1 are off.", "layers are not split over ranks", off=(0, 1)),
    # Not behind autotp_size: alone it would ask for the same thing.
    "tensor_parallel.tensor_parallel.tp_size": not_yet(
        "Ranks that share each layer; equal to autotp_size.", "layers are not split over ranks"
    ),
    **_details(
        "tensor_parallel.autotp_size",
        _TP,
        {
            "dtype": "Dtype of the model that is split.",
            "tp_overlap_comm": "Overlap the all-reduce of a layer with computation.",
            "vocab_parallel_lm_head": "Split the output head along the vocabulary; null follows the model's own plan.",
            "vocab_parallel_ce_backend": "Implementation of the cross-entropy over a split output head.",
            "tensor_parallel.tp_grain_size": "Shards are multiples of this many elements.",
            "tensor_parallel.mpu": "Object with the process groups of a model-parallel program (from Python only).",
            "tensor_parallel.tp_group": "Process group of the ranks that share a layer (from Python only).",
            "injection_policy_tuple": "Layer classes and the projections whose output is summed (internal).",
            "preset_model": "Built-in splitting rules of a model family.",
            "keep_module_on_host": "Split the weights in host memory instead of moving them to the device first.",
            "replace_with_kernel_inject": "Replace layers by fused kernels.",
            "partition_config": "Splitting rules of your own; they win over the model's plan.",
            "partition_config.tp_size": "Ranks that share each layer; autotp_size wins.",
            "partition_config.use_default_specs": "Try the preset's rules after your own.",
            "partition_config.strict_mode": "Fail when a linear layer matches no rule.",
            "partition_config.embedding_partition_dim": "Dimension along which embeddings are split.",
            "partition_config.lm_head_patterns": "Module names that are output heads.",
        },
    ),
    **_details(
        "tensor_parallel.autotp_size",
        _SPEC,
        {
            "patterns": "Regular expressions on parameter names, matched from the start; the first match wins.",
            "partition_type": "Split by output (column), by input (row), or not at all (skip).",
            "shape": "Shape as which the weight is split: sizes, -1 for the rest, one inner list of unequal parts.",
            "partition_dim": "Dimension to split; null is 0 for column and 1 otherwise.",
            "model_types": "Model types, in any case, to which the rule is limited.",
            "gather_output": "Gather the output of a column split on every rank.",
            "grad_allreduce": "Sum the gradients of a skipped layer over the ranks that share it.",
        },
    ),
}

_EXPERTS = {
    "use_data_before_expert_parallelism": not_yet(
        "Number ranks by data parallelism first, then by experts.", "experts are not spread over ranks"
    ),
    "expert_parallel.enabled": not_yet("Spread the experts of a Hugging Face model over ranks."),
    **_details(
        "expert_parallel.enabled",
        "expert_parallel.",
        {
            "autoep_size": "Ranks over which the experts are spread.",
            "expert_tensor_parallel_size": "Ranks that share one expert; only 1 exists.",
            "validate_folding_routing": "Check that ranks which share layers route alike.",
            "async_split_plan": "Exchange the numbers of routed tokens while computing.",
            "preset_model": "Built-in layout of a mixture-of-experts model family.",
            "moe_layer_pattern": "Regular expression on the module paths of mixture-of-experts layers.",
            "expert_pattern": "Attribute of a layer that holds its experts.",
            "router_pattern": "Attribute of a layer that holds its router.",
            "use_grouped_mm": "Multiply all local experts in one grouped kernel.",
            "disable_triton_grouped_mm": "Use no Triton kernel for that.",
            "route_norm": "Normalise the weights of the chosen experts; null follows the model.",
            "route_scale": "Factor on the routing weights.",
            "score_apply": "Weight tokens before (pre) or after (post) the experts.",
            "combine_impl": "How the outputs of several experts are summed.",
            "row_weighting_impl": "How tokens are weighted.",
            "gate_up_impl": "Gate and up projection as two multiplications or one.",
            "comm_backend": "Library that exchanges tokens between ranks.",
            "comm_num_sm": "Multiprocessors of the device that the exchange may use.",
            "comm_qp_margin": "Extra network queue pairs of the deepep backend.",
            "comm_max_tokens_per_rank": "Most tokens that one rank may receive; deepep needs it.",
            "num_expert_groups": "Groups of experts for limited routing; null follows the model.",
            "num_limited_groups": "Groups that one token may use; null follows the model.",
            "score_func": "Activation of the router.",
            "top_k": "Experts per token.",
            "load_balance_coeff": "Not supported by the format: null only.",
            "routed_scaling_factor": "Scale of sigmoid routing weights.",
            "expert_w1": "Name of an expert's first weight.",
            "expert_w2": "Name of an expert's down projection.",
            "expert_w3": "Name of an expert's up projection; null means one tensor with the gate, absence follows the preset.",
            "num_experts_attr": "Attribute of the model's config with the number of experts.",
            "top_k_attr": "Attribute of the model's config with the experts per token.",
            "has_shared_experts": "Whether some experts see every token; null follows the preset.",
            "shared_experts_pattern": "Attribute of a layer that holds its shared experts.",
            "shared_experts_gate_pattern": "Attribute of a layer that holds the gate of its shared experts.",
            "expert_activation": "Activation inside an expert; null follows the preset.",
        },
    ),
}

_FORMAT = "the engine writes a format of its own, in its own way"
_CHECKPOINT = {
    "checkpoint.load_universal": inert("Load checkpoints in the universal format.", "every kind is recognised by its files"),
    "checkpoint.checkpoint_serialization": inert("Write files in torch's zip format; false takes the older one.", _FORMAT),
    "checkpoint.tag_validation": honoured("When ranks save under different tags: WARN and take the first rank's, IGNORE, or FAIL."),
    "checkpoint.async": honoured("save_checkpoint copies the state and writes it while training goes on."),
    "checkpoint.keep_last": honoured("Remove all but so many of the newest checkpoints after each save."),
    "checkpoint.rate_limit": honoured("Most bytes a second that a rank writes in the background; absent for no limit."),
    "checkpoint.allow_pickle": honoured("Save and load client state that needs pickle; loading it can run any code."),
    "checkpoint.client_files": honoured("Write small *_states.pt files for programs that look for them."),
    "checkpoint.restore_data": honoured("load_checkpoint brings the engine's data loader to where it was."),
    "checkpoint.restore_rng": honoured("load_checkpoint restores the random number generators of each rank."),
    "checkpoint.writer.decoupled": not_yet("Write from a helper process while training goes on.", "use checkpoint.async"),
    **_inert(
        _FORMAT,
        "checkpoint.",
        {
            "parallel_write.pipeline_stage": "Deal the layer files of a pipeline stage out to its data-parallel ranks.",
            "writer": "How bytes reach the disk; null is torch.save.",
            "writer.type": "Implementation of the writer.",
            "writer.io_buffer_size": "Size of the pinned write buffer in bytes.",
            "writer.io_buffer_double": "Fill one buffer while the other is written.",
            "writer.show_statistics": "Log how fast files were written.",
            "writer.data_parallel": "Ranks that share the writing of one file.",
            "writer.io_multiplier": "Files per writer.",
        },
    ),
    "checkpoint.use_node_local_storage": inert(
        "Every node writes a whole copy of the model file, for disks that are not shared.", "every byte is written by one rank"
    ),
    "datastates_ckpt": not_yet("Options of the external DataStates checkpoint engine; false is off.", "use checkpoint.async"),
    "datastates_ckpt.host_cache_size": not_yet("Host memory that the DataStates engine may use.", "use checkpoint.async"),
}

_OUTPUT = {
    "output_path": "Folder for the files; empty is the working directory.",
    "job_name": "Name of the sub-folder.",
}
_MONITORS = {
    "tensorboard.enabled": honoured("Write TensorBoard event files on rank 0."),
    **_honoured("tensorboard.", _OUTPUT),
    "csv_monitor.enabled": honoured("Append metrics to CSV files on rank 0."),
    **_honoured("csv_monitor.", _OUTPUT),
    "wandb.enabled": honoured("Report metrics to Weights and Biases from rank 0."),
    **_honoured(
        "wandb.",
        {"group": "Group of runs.", "team": "Account or team that owns the run.", "project": "Name of the project."},
    ),
    "comet.enabled": honoured("Report metrics to Comet from rank 0."),
    **_honoured(
        "comet.",
        {
            "samples_log_interval": "Samples between two reports.",
            "project": "Name of the project.",
            "workspace": "Workspace that owns the project.",
            "api_key": "Key of the account; better kept in the environment.",
            "experiment_name": "Name under which the run is shown.",
            "experiment_key": "Identity of the experiment to create or continue.",
            "online": "false stores the report locally; null leaves it to the library.",
            "mode": "Whether to create the experiment, to continue it, or either.",
        },
    ),
}

_PROFILING = {
    "comms_logger.enabled": honoured("Record every collective of the engine and of deepspeed.comm, for deepspeed.comm.log_summary()."),
    **_honoured(
        "comms_logger.",
        {
            "prof_all": "Record all operations.",
            "prof_ops": "Operations to record when prof_all is false.",
            "verbose": "Log each call as it happens.",
            "debug": "Name the calling function in each record.",
        },
    ),
    "flops_profiler.enabled": not_yet("Count the floating-point operations of one step."),
    **_details(
        "flops_profiler.enabled",
        "flops_profiler.",
        {
            "recompute_fwd_factor": "Share of the forward that is computed again in the backward.",
            "profile_step": "Step (optimizer update) that is measured.",
            "module_depth": "Depth of the modules in the report; -1 is the innermost.",
            "top_modules": "Modules shown per depth.",
            "detailed": "Show every module.",
            "output_file": "File for the report; null writes it to the log.",
        },
    ),
    "timers.throughput.enabled": honoured("Measure samples per second, reported every steps_per_print steps."),
    "timers.throughput.synchronized": honoured("Wait for the device around each measurement; false counts the host's time only."),
}

_AUTOTUNING = {
    "autotuning.enabled": not_yet("Search for the fastest batch size and ZeRO settings."),
    **_details(
        "autotuning.enabled",
        "autotuning.",
        {
            "fast": "Search only the ZeRO level and the micro-batch.",
            "results_dir": "Folder for the results.",
            "exps_dir": "Folder for the experiments.",
            "overwrite": "Delete the experiments of an earlier search.",
            "start_profile_step": "First measured step.",
            "end_profile_step": "Last measured step; the experiment ends there.",
            "metric": "What decides: throughput, latency or flops.",
            "metric_path": "File into which one experiment writes its figures.",
            "tuner_type": "Order in which settings are tried.",
            "tuner_early_stopping": "Trials without improvement after which the search ends.",
            "tuner_num_trials": "Most trials.",
            "arg_mappings": "Command-line flag of the script for each configuration key.",
            "model_info": "Facts about the model.",
            "model_info.profile": "Measure these facts instead of reading them here.",
            "model_info.num_params": "Parameters in elements.",
            "model_info.hidden_size": "Width of the hidden state in elements.",
            "model_info.num_layers": "Number of layers.",
            "model_info_path": "File into which measured facts are written.",
            "mp_size": "Model-parallel ranks.",
            "max_train_batch_size": "Largest global batch in samples.",
            "min_train_batch_size": "Smallest global batch in samples.",
            "max_train_micro_batch_size_per_gpu": "Largest micro-batch in samples.",
            "min_train_micro_batch_size_per_gpu": "Smallest micro-batch in samples.",
            "num_tuning_micro_batch_sizes": "How many micro-batch sizes are tried.",
        },
    ),
}

_SAMPLING = "data_efficiency.data_sampling."
_CURRICULUM = _SAMPLING + "curriculum_learning."
_METRIC = _CURRICULUM + "curriculum_metrics.<metric>."
_BATCHING = _SAMPLING + "dynamic_batching."
_ROUTING = "data_efficiency.data_routing."
_LTD = _ROUTING + "random_ltd."


def _gated(gate: str, path: str, meaning: str) -> dict[str, Key]:
    return {path: not_yet(meaning, gate=gate)}


_DATA = {
    "data_efficiency.enabled": not_yet("Switch on data sampling and data routing."),
    **_details("data_efficiency.enabled", "data_efficiency.", {"seed": "Seed of the sampler."}),
    **_gated("data_efficiency.enabled", _SAMPLING + "enabled", "Choose samples and batches by difficulty or length."),
    **_details(
        _SAMPLING + "enabled",
        _SAMPLING,
        {
            "num_epochs": "Most passes over the data.",
            "num_workers": "Worker processes of the data loader.",
            "pin_memory": "Pin the batches in host memory.",
            "curriculum_learning.enabled": "Start with easy samples.",
            "dynamic_batching.enabled": "Make batches of a token budget instead of a number of samples.",
        },
    ),
    **_details(
        _CURRICULUM + "enabled",
        _CURRICULUM,
        {"data_cluster_path": "Folder for samples grouped by difficulty."},
    ),
    **_details(
        _CURRICULUM + "enabled",
        _METRIC,
        {
            "index_to_sample_path": "Index from difficulty group to samples.",
            "index_to_metric_path": "Index from difficulty group to difficulty.",
            "difficulty_type": "Difficulty as a value or as a percentile of the data.",
            "clustering_type": "Group samples along the schedule, or keep them in one group.",
            "min_difficulty": "Difficulty at the start.",
            "max_difficulty": "Difficulty at the end.",
            "schedule_type": "How the difficulty grows.",
            "schedule_config.total_curriculum_step": "Steps until the greatest difficulty.",
            "schedule_config.difficulty_step": "Difficulty grows in multiples of this.",
            "schedule_config.root_degree": "Degree of the root along which the difficulty grows.",
            "schedule_config.difficulty": "Difficulties of a discrete schedule.",
            "schedule_config.max_step": "Last step of each difficulty but the final one.",
        },
    ),
    **_details(
        _BATCHING + "enabled",
        _BATCHING,
        {
            "max_tokens": "Most tokens of one batch.",
            "lr_scaling_method": "How the learning rate follows the batch size.",
            "min_batch_size": "Smallest batch in samples.",
            "max_batch_size": "Largest batch in samples.",
            "sequence_picking_order": "Order in which sequences are taken.",
            "metrics_path": "Analysis of the data with the length of each sequence.",
            "verbose": "Log how batches are made.",
        },
    ),
    **_gated("data_efficiency.enabled", _ROUTING + "enabled", "Let layers skip tokens."),
    **_gated(_ROUTING + "enabled", _LTD + "enabled", "Drop random tokens layer by layer."),
    **_details(
        _LTD + "enabled",
        _LTD,
        {
            "total_layer_num": "Layers of the model.",
            "random_ltd_layer_num": "Layers that drop tokens.",
            "random_ltd_layer_id": "Positions of these layers, from 0.",
            "model_mask_name": "Keyword of forward that carries the attention mask.",
            "model_type": "Encoder or decoder.",
            "hidden_state_order": "Order of the batch and the sequence dimension of hidden states.",
            "random_ltd_schedule.min_value": "Tokens kept at the start.",
            "random_ltd_schedule.max_value": "Tokens kept at the end.",
            "random_ltd_schedule.schedule_type": "How the number of kept tokens grows.",
            "random_ltd_schedule.schedule_config.require_steps": "Steps until all tokens are kept.",
            "random_ltd_schedule.schedule_config.seq_per_step": "The number of kept tokens grows in multiples of this.",
            "layer_token_lr_schedule.enabled": "Couple the learning rate to the dropped tokens (unfinished in the format).",
        },
    ),
    **_details(
        _LTD + "layer_token_lr_schedule.enabled",
        _LTD + "layer_token_lr_schedule.",
        {
            "total_layer_tokens": "Tokens of all layers together.",
            "warmup_type": "Kind of warm-up.",
            "warmup_layer_tokens": "Tokens of the warm-up.",
        },
    ),
}

_COMPILE = {
    "compile.deepcompile": not_yet("Plan gathers and reductions inside the compiled graph.", "use engine.compile() without it"),
    "compile.autoep_non_moe": not_yet("Compile everything but the experts.", "experts are not spread over ranks"),
    **_details(
        "compile.deepcompile",
        "compile.",
        {
            "free_activation": "Free large activations early.",
            "free_activation_threshold": "Size in bytes from which activations are freed early.",
            "offload_activation": "Keep saved activations in host memory.",
            "offload_activation_pin_memory": "Pin that host memory.",
            "offload_opt_states": "Keep optimizer states in host memory during forward and backward.",
            "double_buffer": "Use two communication buffers in turn.",
            "symmetric_memory": "Use symmetric memory for collectives.",
            "debug_log": "Write the graphs out.",
            "offload_parameters": "Keep parameters in host memory.",
            "sync_before_reduce": "Wait for the device before each reduction (debugging).",
            "sync_after_reduce": "Wait for the device after each reduction (debugging).",
            "sync_before_allgather": "Wait for the device before each all-gather (debugging).",
            "sync_after_allgather": "Wait for the device after each all-gather (debugging).",
            "keep_int_input_tensors": "Store integer inputs for compiling again.",
            "keep_all_input_tensors": "Store all inputs for compiling again.",
            "passes": "Passes over the graph, in order.",
        },
    ),
}

_INFERENCE = {
    "hybrid_engine.enabled": not_yet("Train and generate with one engine."),
    **_details(
        "hybrid_engine.enabled",
        "hybrid_engine.",
        {
            "max_out_tokens": "Longest prompt and answer together, in tokens.",
            "inference_tp_size": "Ranks that share each layer while generating.",
            "release_inference_cache": "Free the key-value cache after each generation.",
            "pin_parameters": "Keep gathered weights in place during a generation.",
            "tp_gather_partition_size": "Layers gathered at once.",
            "enable_cuda_graph": "Capture the generation as a device graph.",
        },
    ),
    **_inert(
        "training never read it: quantized_initialization and post_init_quant say what is quantized",
        "weight_quantization.",
        {
            "enabled": "Switch of weight quantization at inference.",
            "num_bits": "Bits per weight at inference.",
            "q_type": "Symmetric or asymmetric quantization at inference.",
            "q_groups": "Groups of weights with a scale of their own at inference.",
        },
    ),
    "weight_quantization.quantized_initialization": not_yet("Quantize the weights while the model is built."),
    "weight_quantization.post_init_quant": not_yet("Settings per module name for quantizing a built model."),
}

SERVICES: Mapping[str, Key] = MappingProxyType(
    {
        **_AIO,
        **_PIPELINE,
        **_TENSOR_PARALLEL,
        **_EXPERTS,
        **_CHECKPOINT,
        **_MONITORS,
        **_PROFILING,
        **_AUTOTUNING,
        **_DATA,
        **_COMPILE,
        **_INFERENCE,
    }
)
