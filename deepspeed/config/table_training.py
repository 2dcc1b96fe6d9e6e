"""Rows of the key table: batch, optimizer, schedule, precision, communication, ZeRO, offload, activations, reports."""

from collections.abc import Mapping
from types import MappingProxyType

from deepspeed.config.support import Key, honoured, inert, not_yet

__all__ = ["TRAINING"]

_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
_OFFLOAD_PARAM = "zero_optimization.offload_param.device"

_BATCH = {
    "train_batch_size": honoured("Samples per optimizer update over all data-parallel ranks."),
    "train_micro_batch_size_per_gpu": honoured("Samples that one rank takes through one forward and backward."),
    "gradient_accumulation_steps": honoured("Micro-batches whose gradients are summed before one update."),
    "managed_gradient_accumulation": honoured("The engine counts micro-batches; false makes every step() an update."),
    "dataloader_drop_last": honoured("Leave out the last, shorter batch in the loader that the engine builds."),
    "sequence_parallel_size": not_yet("Ranks that share one sequence.", "sequence parallelism", off=(1,)),
    "data_parallel_size": not_yet(
        "Ranks of the data axis of the mesh that sequence_parallel_size asks for.", gate="sequence_parallel_size"
    ),
    "seq_parallel_communication_data_type": not_yet("Dtype of gradient sums over sequence ranks.", gate="sequence_parallel_size"),
}

_OPTIMIZER = {
    "optimizer.type": honoured("Name of the optimizer: a known name in any case, or a class of torch.optim by its exact name."),
    "optimizer.params": honoured("Settings of the optimizer; which ones depends on its name."),
    "optimizer.params.lr": honoured("Learning rate."),
    "optimizer.params.betas": honoured("Decay rates of the first and the second moment."),
    "optimizer.params.eps": honoured("Added to the denominator of the update."),
    "optimizer.params.weight_decay": honoured("Weight decay; decoupled for AdamW, Lion, Muon, and for Adam with adam_w_mode."),
    "optimizer.params.torch_adam": honoured("Build torch.optim's Adam or AdamW instead of this package's (Adam, AdamW)."),
    "optimizer.params.foreach": honoured("Handed to torch's Adam: true updates all tensors in one call, false one by one."),
    "optimizer.params.adam_w_mode": honoured("Decoupled weight decay for type Adam; AdamW always has it."),
    "optimizer.params.bias_correction": honoured("Correct the bias of young moments (Adam, AdamW, Lamb)."),
    "optimizer.params.amsgrad": honoured("Divide by the largest second moment so far; chooses torch's Adam, and Lamb refuses it."),
    "optimizer.params.set_grad_none": inert(
        "zero_grad() drops gradients instead of filling them with zeros.", "the engine owns the gradient buffers and resets them itself"
    ),
    "optimizer.params.fp32_optimizer_states": inert(
        "The host optimizer keeps its moments in fp32.", "the moments follow the master weights, which are fp32"
    ),
    "optimizer.params.momentum": honoured("Momentum of Muon (0.95), or of a torch optimizer that has one (SGD: 0)."),
    "optimizer.params.muon_lr": honoured("Learning rate of the matrices under Muon; lr when absent."),
    "optimizer.params.adam_lr": honoured("Learning rate of everything else under Muon; lr when absent."),
    "optimizer.params.ns_method": honoured("How Muon orthogonalises: gram iterates on the Gram matrix, standard on the matrix."),
    "optimizer.params.per_head_muon": not_yet("Muon orthogonalises each attention head by itself.", off=(False,)),
    "optimizer.params.max_coeff": honoured("Upper limit of Lamb's trust ratio."),
    "optimizer.params.min_coeff": honoured("Lower limit of Lamb's trust ratio."),
    "optimizer.params.eps_inside_sqrt": honoured("Lamb adds eps under the square root instead of after it."),
    "optimizer.params.max_grad_norm": honoured("Deprecated and refused: the top-level gradient_clipping clips."),
    "optimizer.legacy_fusion": inert("Older code path of the fp16 wrapper.", "there is one step for all dtypes"),
    "zero_allow_untested_optimizer": inert(
        "Allow optimizers outside the tested list under ZeRO.", "any optimizer is sharded by elements or by whole parameters, as it needs"
    ),
    "zero_force_ds_cpu_optimizer": inert(
        "Insist on a host optimizer of this package under offload.", "any optimizer updates offloaded state where it rests"
    ),
    "gradient_clipping": honoured("Largest L2 norm of all gradients together; 0 switches clipping off."),
}

_SCHEDULER = {
    "scheduler.type": honoured("Name of the schedule, or a class of torch.optim.lr_scheduler; case matters."),
    "scheduler.params": honoured("Settings of the schedule; which ones depends on its name."),
    "scheduler.params.lr_range_test_min_lr": honoured("LRRangeTest: the first learning rate."),
    "scheduler.params.lr_range_test_step_size": honoured("LRRangeTest: updates per interval."),
    "scheduler.params.lr_range_test_step_rate": honoured("LRRangeTest: growth per interval, as a share of the first rate."),
    "scheduler.params.lr_range_test_staircase": honoured("LRRangeTest: grow once per interval instead of at every update."),
    "scheduler.params.cycle_min_lr": honoured("OneCycle: learning rate at both ends of the cycle."),
    "scheduler.params.cycle_max_lr": honoured("OneCycle: learning rate at the top of the cycle."),
    "scheduler.params.decay_lr_rate": honoured("OneCycle: decay of the rate per decay_step_size after the cycle; 0 for none."),
    "scheduler.params.cycle_first_step_size": honoured("OneCycle: updates of the rising half."),
    "scheduler.params.cycle_second_step_size": honoured("OneCycle: updates of the falling half; null takes those of the first."),
    "scheduler.params.cycle_first_stair_count": honoured("OneCycle: stairs of the rising half; 0 rises evenly."),
    "scheduler.params.cycle_second_stair_count": honoured("OneCycle: stairs of the falling half; null takes those of the first."),
    "scheduler.params.decay_step_size": honoured("OneCycle: updates per decay interval after the cycle; 0 for no decay."),
    "scheduler.params.cycle_momentum": honoured("OneCycle: move the first beta against the learning rate."),
    "scheduler.params.cycle_min_mom": honoured("OneCycle: lowest first beta."),
    "scheduler.params.cycle_max_mom": honoured("OneCycle: highest first beta."),
    "scheduler.params.decay_mom_rate": honoured("OneCycle: growth of the first beta per decay_step_size after the cycle."),
    "scheduler.params.warmup_min_lr": honoured("WarmupLR, WarmupDecayLR: learning rate at the start."),
    "scheduler.params.warmup_max_lr": honoured(
        "Rate after the warm-up. WarmupLR: null takes the optimizer's; WarmupDecayLR: 0.001 if absent."
    ),
    "scheduler.params.warmup_num_steps": honoured("Warmup schedules: updates of the warm-up; 0 and 1 count as 2."),
    "scheduler.params.warmup_type": honoured("Warmup schedules: the curve, logarithmic or linear."),
    "scheduler.params.total_num_steps": honoured("WarmupDecayLR, WarmupCosineLR: updates of the whole training."),
    "scheduler.params.warmup_min_ratio": honoured("WarmupCosineLR: share of the optimizer's rate at the start."),
    "scheduler.params.cos_min_ratio": honoured("WarmupCosineLR: share of the optimizer's rate at the end."),
    "scheduler.params.last_batch_iteration": honoured("Where to resume, in updates; -1 starts anew and writes the first rate."),
}

_PRECISION = {
    "fp16.enabled": honoured("Compute in fp16 with loss scaling; master weights stay fp32."),
    "fp16.auto_cast": honoured("Cast floating inputs of the forward to fp16."),
    "fp16.loss_scale": honoured("A fixed loss scale; 0 lets it adapt."),
    "fp16.initial_scale_power": honoured("The first adaptive loss scale is 2 to this power."),
    "fp16.loss_scale_window": honoured("Updates without overflow before the loss scale doubles."),
    "fp16.hysteresis": honoured("The loss scale halves at this overflow, counted from 1."),
    "fp16.consecutive_hysteresis": honoured("Every update without overflow restores the hysteresis."),
    "fp16.min_loss_scale": honoured("The adaptive loss scale never falls below this."),
    "fp16.fp16_master_weights_and_grads": not_yet("Keep master weights and their gradients in fp16.", "master weights are fp32"),
    "bf16.enabled": honoured("Compute in bf16; master weights stay fp32."),
    "bf16.immediate_grad_update": inert("Add gradients to the fp32 sum inside the hooks.", "gradients are always summed by the hooks"),
    "bf16.check_grad_overflow": honoured("Skip an update whose gradients are not finite."),
    "bf16.bf16_master_weights_and_grads": not_yet("Keep master weights and their gradients in bf16.", "master weights are fp32"),
    "bf16.bf16_optimizer_states": not_yet("Keep the moments of the optimizer in bf16.", "they are fp32"),
    "torch_autocast.enabled": honoured("Run the forward inside torch.autocast."),
    "torch_autocast.dtype": honoured("Dtype of autocast; null means bf16."),
    "torch_autocast.lower_precision_safe_modules": honoured(
        "Classes (torch.nn.Linear) whose parameters rest and travel in the autocast dtype; null for none."
    ),
    "data_types.grad_accum_dtype": honoured("Dtype in which micro-batches are summed; null means fp32."),
    "data_types.param_dtype": honoured("Says the compute dtype once more; refused unless the fp16 and bf16 blocks agree."),
    "data_types.buffer_dtype": honoured("Dtype of floating buffers; null follows the parameters."),
    "data_types.keep_in_fp32_modules": honoured("Modules by name that keep fp32; auto asks the model's class."),
}

_COMMUNICATION = {
    "communication_data_type": honoured("Dtype in which gradients travel between ranks; null follows the parameters."),
    "prescale_gradients": honoured("Divide by the number of ranks before the reduction, whatever gradient_predivide_factor says."),
    "gradient_predivide_factor": honoured("Divide by this before the reduction, by the rest of the ranks after it."),
    "gradient_allreduce_op": honoured("Mean or sum of gradients over data-parallel ranks."),
    "disable_allgather": inert("Once replaced the gathering of updated weights by broadcasts.", "weights are always gathered"),
}

_ZERO = {
    "zero_optimization": honoured("Deprecated as true or false: true means stage 1."),
    "allgather_size": inert("Deprecated spelling of zero_optimization.allgather_bucket_size.", "each unit is gathered whole"),
    "zero_optimization.stage": honoured("Sharded over ranks: 1 optimizer states, 2 also gradients, 3 also parameters; 0 nothing."),
    "zero_optimization.contiguous_gradients": inert("Copy gradients into one buffer.", "gradients of a unit always share one flat buffer"),
    "zero_optimization.reduce_scatter": inert(
        "Reduce gradients to their owners instead of to all.",
        "where gradients are sharded they always are; false only lifts the limits on prescale_gradients and predividing",
    ),
    "zero_optimization.reduce_bucket_size": honoured("Elements of small modules that are packed into one unit of communication."),
    "zero_optimization.use_multi_rank_bucket_allreduce": inert("Merge the reductions of several ranks.", "each unit is one collective"),
    "zero_optimization.allgather_partitions": inert("Gather updated weights instead of broadcasting them.", "weights are always gathered"),
    "zero_optimization.allgather_bucket_size": inert("Elements per gathering of weights.", "each unit is gathered whole"),
    "zero_optimization.overlap_comm": honoured("Communicate beside computation; only false switches it off."),
    "zero_optimization.compute_grad_norm": honoured("Compute the norm of all gradients at each update; false saves a reduction."),
    "zero_optimization.load_from_fp32_weights": inert(
        "Restore master weights from the fp32 copy in a checkpoint.", "weights are saved in fp32 only, so there is no other copy"
    ),
    "zero_optimization.elastic_checkpoint": inert(
        "Write state that another number of ranks can read.", "any number of ranks reads any checkpoint"
    ),
    "zero_optimization.sub_group_size": honoured("Elements per tile of an update that rests on a drive; absent means 2,097,152."),
    "zero_optimization.ignore_unused_parameters": not_yet(
        "Accept trainable parameters without a gradient; they count as zeros.", "the check for unused parameters"
    ),
    "zero_optimization.legacy_stage1": honoured("Deprecated: false is accepted, true is refused."),
    "zero_optimization.round_robin_gradients": inert(
        "Deal parameters to ranks in turn.", "each unit is split evenly over the ranks, and checkpoints follow the model's order"
    ),
    "zero_optimization.parameter_alignment": inert(
        "Start each parameter of a flat buffer at 16 bytes.", "shards are cut by elements, not by parameters"
    ),
    "zero_optimization.zero_hpz_partition_size": honoured(
        "Ranks that hold one copy of the parameters between them; the stages' other states spread wider."
    ),
    "zero_optimization.mics_shard_size": honoured("Ranks that hold one copy of all states between them (MiCS); -1 for all ranks."),
    "zero_optimization.mics_hierarchical_params_gather": inert(
        "Gather inside a node first (MiCS).", "the shard group already bounds the gathering"
    ),
    "zero_optimization.zero_quantized_weights": not_yet("Gather weights as 8-bit numbers.", "quantized communication"),
    "zero_optimization.zero_quantized_nontrainable_weights": not_yet("Keep frozen weights as 8-bit numbers.", "quantized communication"),
    "zero_optimization.zero_quantized_gradients": not_yet("Reduce gradients as 4-bit numbers.", "quantized communication"),
    "zero_optimization.prefetch_bucket_size": honoured("Elements that are gathered ahead of their use."),
    "zero_optimization.param_persistence_threshold": honoured("Parameters with fewer elements stay whole on every rank."),
    "zero_optimization.model_persistence_threshold": honoured("Most elements, over all parameters, that may stay whole."),
    "zero_optimization.max_live_parameters": honoured("Most gathered elements that may wait for their next use."),
    "zero_optimization.max_reuse_distance": honoured("Keep parameters that are used again within so many elements; absent releases them."),
    "zero_optimization.gather_16bit_weights_on_model_save": honoured("Let save_16bit_model gather the weights under stage 3."),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": honoured("Deprecated spelling of gather_16bit_weights_on_model_save."),
    "zero_optimization.module_granularity_threshold": inert(
        "Fetch fine-grained modules as one.", "small modules are packed by reduce_bucket_size"
    ),
    "zero_optimization.use_all_reduce_for_fetch_params": inert("Fetch parameters through an all-reduce.", "units are gathered in place"),
    "zero_optimization.allgather_sequential": honoured("Gather little ahead: the same as a prefetch_bucket_size of 1."),
    "zero_optimization.memory_efficient_linear": inert("A leaner nn.functional.linear.", "gathered weights are not kept for backward"),
    "zero_optimization.pipeline_loading_checkpoint": inert(
        "Ranks of a node read a checkpoint one after another.", "every rank reads only its own part"
    ),
    "zero_optimization.override_module_apply": inert(
        "Module.apply gathers parameters.", "zero.Init always gathers what an initializer touches"
    ),
    "zero_optimization.log_trace_cache_warnings": inert("Warn when the order of use changes.", "divergence governs that"),
    "zero_optimization.enable_sanity_checks": inert("More internal checks.", "the checks are always on"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": not_yet("Keep Muon's momentum off the drive.", gate=_OFFLOAD_OPTIMIZER),
    "zero_optimization.leaf_module.classes": honoured("Classes of modules that are gathered as a whole."),
    "zero_optimization.leaf_module.names": honoured("Names of modules that are gathered as a whole."),
    "zero_optimization.leaf_module.name_suffixes": honoured("Ends of names of modules that are gathered as a whole."),
    "zero_optimization.divergence": honoured("When ranks take different branches: tolerate them, error, or assume_none (no check)."),
    "zero_optimization.grad_hooks": inert("Described in published documentation.", "no release reads it"),
}

_OFFLOAD = {
    "zero_optimization.cpu_offload": honoured("Deprecated spelling of offload_optimizer with device cpu."),
    "zero_optimization.cpu_offload_param": honoured("Deprecated spelling of offload_param with device cpu."),
    "zero_optimization.cpu_offload_use_pin_memory": honoured("Deprecated spelling of pin_memory in the offload blocks."),
    "zero_optimization.offload_param": honoured("Where sharded parameters rest; absent, null or false leaves them on the device."),
    _OFFLOAD_PARAM: honoured("Tier of sharded parameters: none, cpu or nvme.", off=("none",)),
    "zero_optimization.offload_param.nvme_path": honoured("Folder on the drive; only its last part is made when missing."),
    "zero_optimization.offload_param.buffer_count": honoured("Staging buffers for the drive."),
    "zero_optimization.offload_param.buffer_size": honoured("Most elements of a staging buffer; larger shards travel in pieces."),
    "zero_optimization.offload_param.max_in_cpu": honoured("Elements of this rank that stay in host memory before the drive is used."),
    "zero_optimization.offload_param.pin_memory": honoured("Page-locked host memory, where an accelerator makes use of it."),
    "zero_optimization.offload_optimizer": honoured("Where optimizer states rest; absent, null or false leaves them on the device."),
    _OFFLOAD_OPTIMIZER: honoured("Tier of optimizer states: none, cpu or nvme.", off=("none",)),
    "zero_optimization.offload_optimizer.nvme_path": honoured("Folder on the drive; only its last part is made when missing."),
    "zero_optimization.offload_optimizer.buffer_count": honoured("Tiles of optimizer state in memory at once."),
    "zero_optimization.offload_optimizer.pin_memory": honoured("Page-locked host memory, where an accelerator makes use of it."),
    "zero_optimization.offload_optimizer.pipeline_read": inert("Read the next tile during the update.", "reads always overlap the update"),
    "zero_optimization.offload_optimizer.pipeline_write": inert(
        "Write the last tile during the update.", "writes always overlap the update"
    ),
    "zero_optimization.offload_optimizer.fast_init": inert(
        "Create states on the drive faster.", "they are written while the model is taken over"
    ),
    "zero_optimization.offload_optimizer.ratio": honoured("Share of elements that the host updates; the rest stays on the device."),
    "zero_optimization.offload_optimizer.super_offload": not_yet("Offload for closely coupled chips.", gate=_OFFLOAD_OPTIMIZER),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": not_yet("Share of cores for super_offload.", gate=_OFFLOAD_OPTIMIZER),
    "zero_optimization.zenflow": not_yet("Update important gradient columns at once and the rest later on the host."),
    "zero_optimization.zenflow.topk_ratio": not_yet("Share of columns that are updated at once."),
    "zero_optimization.zenflow.select_strategy": not_yet("When columns are chosen again."),
    "zero_optimization.zenflow.select_interval": not_yet("Steps or epochs between two choices."),
    "zero_optimization.zenflow.update_interval": not_yet("Steps between updates of the other columns."),
    "zero_optimization.zenflow.overlap_step": not_yet("The host updates during training."),
    "zero_optimization.zenflow.offload": not_yet("Move the states of the chosen columns to the host too."),
    "zero_optimization.zenflow.auto_ratio": not_yet("Threshold for an automatic update_interval."),
    "zero_optimization.zenflow.full_warm_up_rounds": not_yet("Rounds at the start that update everything."),
    "zero_optimization.zenflow.pt_reserved_cores_perc": not_yet("Share of cores for the main process."),
    "zero_optimization.zenflow.steps_per_epoch": not_yet("Updates per epoch; filled in while running."),
}

_ACTIVATIONS = {
    "activation_checkpointing.partition_activations": inert(
        "Split saved activations over tensor-parallel ranks.", "there are no tensor-parallel ranks to split them over"
    ),
    "activation_checkpointing.cpu_checkpointing": honoured("Saved activations rest in host memory (for models on a device)."),
    "activation_checkpointing.contiguous_memory_optimization": inert(
        "Pack activations into one buffer; needs partition_activations and number_checkpoints.",
        "only activations that are split over tensor-parallel ranks would be packed",
    ),
    "activation_checkpointing.number_checkpoints": inert("Checkpointed calls per forward.", "only a packed buffer would be sized by it"),
    "activation_checkpointing.synchronize_checkpoint_boundary": honoured("Wait for the device at each checkpointed call."),
    "activation_checkpointing.profile": honoured("Log the forward time of each checkpointed call."),
}

_REPORTS = {
    "wall_clock_breakdown": honoured("Time forward, backward and step, and log it with every progress line."),
    "memory_breakdown": honoured("Log memory in use after the start and after every forward, backward and step."),
    "steps_per_print": honoured("Updates between two progress lines; null and infinity mean never."),
    "dump_state": honoured("Log the engine's attributes and the whole configuration once at the start."),
    "log_level": honoured("Level of this package's logger while the engine lives; null leaves it."),
    "disable_python_gc": honoured("No cyclic garbage collection while the engine lives."),
    "vocabulary_size": honoured("Rows of the embedding; a size that is no multiple of 8 is warned about."),
    "seed": inert("Kept for programs that read it back.", "random streams are the script's own: call torch.manual_seed"),
}

TRAINING: Mapping[str, Key] = MappingProxyType(
    {
        **_BATCH,
        **_OPTIMIZER,
        **_SCHEDULER,
        **_PRECISION,
        **_COMMUNICATION,
        **_ZERO,
        **_OFFLOAD,
        **_ACTIVATIONS,
        **_REPORTS,
    }
)
