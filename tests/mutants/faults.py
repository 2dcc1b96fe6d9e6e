"""The list of planted faults, each with the tests that notice it.

A fault that a refactoring could make, and that was found or imagined once, becomes an entry here together with the test
that kills it; those of models in parts are in ``faults_of_parts``. ``old`` is short, so that it outlives changes around
it, and occurs once in its file; tests/pure/test_mutants.py holds that.
"""

from tests.mutants.faults_of_parts import COMPILED, ELASTIC, EXPERTS, INTERRUPTS, PARTS, PIPELINES, SEQUENCES
from tests.mutants.mutant import Mutant


def chosen(*wanted: str) -> tuple[Mutant, ...]:
    """The mutants of those ids and files, all without any. Raises KeyError with what names none."""
    unknown = [word for word in wanted if not any(word in (mutant.id, mutant.file) for mutant in MUTANTS)]
    if unknown:
        raise KeyError(", ".join(unknown))
    return tuple(mutant for mutant in MUTANTS if not wanted or mutant.id in wanted or mutant.file in wanted)


_LOSS_SCALE = ("tests/pure/test_loss_scale.py",)
_SCHEDULE = ("tests/pure/test_schedule.py",)
_AGREEMENT = ("tests/pure/test_agreement.py",)
_PARTITION = ("tests/pure/test_partition.py",)
_POSITION = ("tests/pure/test_data_position.py",)
_RULES = ("tests/pure/test_config_rules.py",)
_ZERO_INIT = ("tests/dist/test_zero_init.py::test_a_model_built_sharded_equals_one_built_plainly[rich-2]",)
_PARITY = "tests/dist/test_parity_matrix.py::test_parity"
_TWO_LEVELS = "tests/dist/test_parity_matrix.py::test_two_level_sharding"
_COMPLETE = "tests/dist/test_checkpoint_complete.py"
_KEYS = "tests/dist/test_config_keys_matter.py::test_an_honoured_key_has_an_effect"

_PURE = (
    Mutant(
        "L1",
        "deepspeed/engine/loss_scale.py",
        "self.cur_hysteresis = self.delayed_shift\n            self.cur_scale *=",
        "self.cur_scale *=",
        _LOSS_SCALE,
        "a doubling of the loss scale gives the let-pass credit back",
    ),
    Mutant(
        "L2",
        "deepspeed/engine/loss_scale.py",
        "stable % self.scale_window == 0",
        "(stable + 1) % self.scale_window == 0",
        _LOSS_SCALE,
        "the scale doubles after a whole window of good steps",
    ),
    Mutant(
        "K8",
        "deepspeed/engine/loss_scale.py",
        'int(state.get("cur_hysteresis", self.delayed_shift))',
        "self.delayed_shift",
        _LOSS_SCALE,
        "used-up hysteresis is restored from a checkpoint",
    ),
    Mutant(
        "C1",
        "deepspeed/zero/schedule.py",
        "now.trace.index(unit, now.position)",
        "now.trace.index(unit)",
        _SCHEDULE,
        "after a surprise the forecast goes on from here, not from the start of the pass",
    ),
    Mutant("C2", "deepspeed/zero/schedule.py", "if now.seen:", "if True:", _SCHEDULE, "an empty pass keeps the trace"),
    Mutant(
        "A1",
        "deepspeed/zero/sync/agreement.py",
        "REDUCE = 0\n    GATHER = 1",
        "GATHER = 0\n    REDUCE = 1",
        _AGREEMENT,
        "where ranks differ reductions come before gathers",
    ),
    Mutant(
        "A2",
        "deepspeed/zero/sync/agreement.py",
        "words = merge(numbers, words, self._group)",
        "_ = merge(numbers, words, self._group)",
        _AGREEMENT,
        "a flush reduces what is pending on any rank",
    ),
    Mutant(
        "P1",
        "deepspeed/zero/partition.py",
        "[index_of[param] for param in module.parameters(recurse=False) if param in index_of]",
        "[index_of[p] for p in module.parameters(recurse=False) if all(p is not q for m in touches for q in "
        "m.parameters(recurse=False))]",
        _PARTITION,
        "a tied parameter is listed for every module that holds it",
    ),
    Mutant(
        "P2",
        "deepspeed/zero/partition.py",
        "kind = (param in trained,",
        "kind = (True,",
        _PARTITION,
        "frozen parameters never share a unit with trained ones",
    ),
    Mutant(
        "D1",
        "deepspeed/client/data_position.py",
        "self.source.start = position.samples",
        "self.source.start = -(-position.samples // self.step) * self.step",
        _POSITION,
        "after a resize no sample is left out",
    ),
    Mutant(
        "D2",
        "deepspeed/client/data_position.py",
        "return self._last if running and self._sampler else",
        "return self._last if False else",
        _POSITION,
        "a sampler's state is that of the last batch handed out, not of the last one fetched",
    ),
    Mutant(
        "H2",
        "deepspeed/launcher/node/verdict.py",
        "else 128 - exitcode",
        "else -exitcode",
        ("tests/pure/test_verdict.py",),
        "a rank ended by signal S gives 128 + S",
    ),
    Mutant(
        "F1",
        "deepspeed/config/explain/rules.py",
        "yield cfg.gradient_clipping > 0, path, text",
        "yield False, path, text",
        _RULES,
        "compute_grad_norm false needs gradient_clipping 0",
    ),
    Mutant(
        "F2",
        "deepspeed/config/explain/rules.py",
        '"prefetch_bucket_size", ',
        "",
        _RULES,
        "keys that act where parameters are sharded are named as without effect elsewhere",
    ),
    Mutant(
        "K4",
        "deepspeed/checkpoint/format/files.py",
        "if (actual := crc32c(values)) != crc:",
        "if start == 0 and (actual := crc32c(values)) != crc:",
        ("tests/pure/test_chunk_files.py",),
        "every piece that is read is verified",
    ),
    Mutant(
        "T1",
        "deepspeed/tier/drive.py",
        "finally:\n                self.staging.give(buffer, after=transfer)",
        "finally:\n                self.staging.give(buffer)",
        ("tests/ops/test_staging_and_stored.py",),
        "a staging buffer is free again when its write has ended",
    ),
    Mutant(
        "HP1",
        "deepspeed/tensor/generation.py",
        "return all(torch.equal(now, before) for",
        "return all(True for",
        ("tests/dist/test_hybrid_parts.py::test_weights_move_when_they_have_changed_however_that_was[1]",),
        "layers in parts have the weights of the last step",
    ),
    Mutant(
        "HP2",
        "deepspeed/tensor/generation.py",
        "in reversed(before):",
        "in before[:0]:",
        ("tests/dist/test_hybrid_parts.py::test_parts_take_their_share_of_memory_and_give_it_back[False]",),
        "the model has its own layers again behind a generation",
    ),
    Mutant(
        "RA1",
        "deepspeed/reallocate/moves.py",
        "if target in ranks:",
        "if target in ranks[:1]:",
        ("tests/pure/test_reallocation_plan.py",),
        "nothing travels to a rank that has it",
    ),
    Mutant(
        "RA2",
        "deepspeed/reallocate/moves.py",
        "if places.get(rank) == places.get(target)] or ranks",
        "] or ranks",
        ("tests/pure/test_reallocation_plan.py::test_random_layouts_of_random_tensors",),
        "what a rank of the same node has comes from there",
    ),
    Mutant(
        "RA3",
        "deepspeed/reallocate/moves.py",
        "(sent[rank], rank < target, rank)",
        "(rank < target, rank)",
        ("tests/pure/test_reallocation_plan.py::test_ranks_that_have_the_same_send_the_same",),
        "replicas share what is to be sent",
    ),
    Mutant(
        "RA4",
        "deepspeed/reallocate/sides.py",
        "torch.where(wide.to(part.dtype).to(wide.dtype) == values, wide, values)",
        "values",
        ("tests/dist/test_reallocate.py::test_masters_follow_and_keep_what_rounds_to_the_same",),
        "weights that come back as they went change no master",
    ),
    Mutant(
        "RA6",
        "deepspeed/reallocate/resting.py",
        "if isinstance(part, Place) and tuple(tensor.shape) == part.size:",
        "if False and isinstance(part, Place):",
        ("tests/dist/test_reallocate.py::test_layers_in_parts_without_an_engine_are_no_replicas",),
        "a layer's parts on several ranks are not copies of one tensor",
    ),
    Mutant(
        "RA7",
        "deepspeed/zero/hooks.py",
        "self._graphs.discard(graph)",
        "self._graphs.clear()",
        ("tests/dist/test_reallocate_refusals.py::test_weights_do_not_move_between_a_forward_and_its_backward[zero0]",),
        "each forward waits for a backward of its own",
    ),
    Mutant(
        "PK1",
        "deepspeed/zero/module/attributes.py",
        "if name != _REDUCE",
        "if name",
        ("tests/dist/test_pickled_modules.py::test_a_pickled_module_is_the_plain_one[2]",),
        "a pickled module is built without an engine",
    ),
    Mutant(
        "LP1",
        "deepspeed/tools/simulate/plan/adapters.py",
        "wanted.fullmatch(path)",
        "wanted.match(path)",
        ("tests/pure/test_lora_targets.py",),
        "a pattern of --lora_targets has to match whole paths",
    ),
)

_OPTIMIZERS = (
    Mutant(
        "O1",
        "deepspeed/optim/rules.py",
        'names = ("lr", "betas", "eps", "weight_decay", "bias_correction")',
        'names = ("lr", "betas", "eps", "weight_decay")',
        ("tests/pure/test_optim_update_rules.py", f"{_KEYS}[optimizer.params.bias_correction]"),
        "bias_correction false is kept in host memory",
    ),
    Mutant(
        "O2",
        "deepspeed/optim/rules.py",
        '{"decoupled": group["decoupled_weight_decay"]}',
        '{"decoupled": True}',
        ("tests/pure/test_optim_update_rules.py",),
        "Adam's weight decay is an L2 term in host memory too",
    ),
    Mutant(
        "V1",
        "deepspeed/zero/optim_view.py",
        "for first, last in itertools.pairwise((lo, *edges, hi)):",
        "for first, last in itertools.pairwise((lo, *edges, hi - 1)):",
        (f"{_PARITY}[plain-0]",),
        "the optimizer sees every element",
    ),
    Mutant(
        "U3",
        "deepspeed/zero/update/publish.py",
        "[*sorted(written), (stop, stop)]",
        "sorted(written)",
        ("tests/dist/test_one_pass_update.py::test_every_stage[0-bf16]",),
        "what the update has not written itself is published to the end",
    ),
)

_STEPS = (
    Mutant(
        "R5",
        "deepspeed/engine/engine.py",
        "self.runtime.gradients.scale = 1.0\n        self",
        "self",
        ("tests/dist/test_loops.py::test_loop[every_other_plainly-3]",),
        "a plain backward's 1 / accumulation does not stay for the next backward",
    ),
    Mutant(
        "G1",
        "deepspeed/zero/gradients.py",
        "target.add_(grad, alpha=factor)",
        "target.add_(grad, alpha=unit.facts.before)",
        (f"{_PARITY}[manual_accumulation-0]",),
        "a parameter's second contribution has the window's factor too",
    ),
    Mutant(
        "G2",
        "deepspeed/zero/window.py",
        "self.partial[start:stop].zero_()",
        "pass",
        (f"{_PARITY}[plain-0]",),
        "padding holds zeros",
    ),
    Mutant(
        "G3",
        "deepspeed/zero/window.py",
        "            self.fired.clear()\n        self.move(GradState.LOCAL)",
        "        self.move(GradState.LOCAL)",
        ("tests/dist/test_verify_training.py::test_splits_of_the_gate_equal_the_whole_batch",),
        "after a reduction nothing has contributed yet",
        also=(
            (
                "self.fired.clear()\n        self.arrived.clear()\n        return partial",
                "self.arrived.clear()\n        return partial",
            ),
        ),
    ),
    Mutant(
        "G4",
        "deepspeed/zero/gradients.py",
        "accumulate=accumulate and last",
        "accumulate=accumulate",
        (f"{_TWO_LEVELS}[accumulation-shard_groups]",),
        "only the last axis of a reduction adds to the rest gradient",
    ),
    Mutant(
        "G5",
        "deepspeed/zero/gradients.py",
        "local_of(view).copy_(torch.zeros_like(local_of(view)) if written is None else written)",
        "pass",
        ("tests/pure/test_pipeline_hooks.py",),
        "what a hook puts in the place of a gradient in a pipeline's batch is the gradient",
    ),
    Mutant(
        "G6",
        "deepspeed/zero/gradients.py",
        "unit.window.restore(unit.window.partial.clone(), unit.window.fired)",
        "pass",
        ("tests/pure/test_pipeline_hooks.py",),
        "a gradient that a hook keeps is not the memory of later batches",
    ),
    Mutant(
        "G7",
        "deepspeed/zero/gradients.py",
        "while len(self._flying) >= self._in_flight:",
        "while len(self._flying) > self._in_flight:",
        ("tests/dist/test_gathers_and_memory.py::test_at_most_two_partial_sums_are_in_flight_and_one_without_overlap",),
        "at most two partial sums are in flight",
    ),
    Mutant(
        "S1",
        "deepspeed/zero/unit.py",
        "copies *= axis.size if",
        "copies *= 1 if",
        (f"{_PARITY}[plain-0]",),
        "replicated gradients count once in the norm",
    ),
    Mutant(
        "S2",
        "deepspeed/zero/unit.py",
        " * self.facts.after**2 / copies",
        " / copies",
        ("tests/dist/test_parity_matrix.py::test_who_divides_does_not_matter",),
        "norm and clipping are those of the mean, wherever it is divided",
    ),
    Mutant(
        "S4",
        "deepspeed/zero/step.py",
        "    runtime.gradients.clear(collected=True)\n    return",
        "    if not result.left_out:\n        runtime.gradients.clear(collected=True)\n    return",
        ("tests/dist/test_nonfinite_gradients.py",),
        "a skipped step drops its gradients",
    ),
    Mutant(
        "E1",
        "deepspeed/engine/engine.py",
        "self.micro_steps = self._window_begin",
        "pass",
        ("tests/dist/test_invariant_i8_errors.py::test_invariant_i8_inside_an_accumulation_window",),
        "a failed backward begins the accumulation window anew",
    ),
    Mutant(
        "E2",
        "deepspeed/engine/engine.py",
        "finally:\n            self._syncing_off",
        "except BaseException:\n            raise\n        else:\n            self._syncing_off",
        ("tests/dist/test_loops.py::test_misuse_is_refused_and_the_engine_goes_on[0]",),
        "no_sync ends when its body raises",
    ),
    Mutant(
        "S9",
        "deepspeed/engine/engine.py",
        "self.runtime.gradients.scale = self._factor(divides=divides) / done",
        "self.runtime.gradients.scale = self._factor(divides=True) / self._scaler.loss_scale",
        ("tests/dist/test_several_engines.py::test_backward_of_one_engine_gives_others_their_gradients[one window]",),
        "one backward gives each engine gradients of its own window",
    ),
)

_WEIGHTS = (
    Mutant(
        "R1",
        "deepspeed/zero/runtime.py",
        "return live <= self.plan.live_numel",
        "return True",
        ("tests/dist/test_gathers_and_memory.py::test_what_stays_for_its_reuse_keeps_to_max_live_parameters",),
        "max_live_parameters bounds what stays gathered",
    ),
    Mutant(
        "R2",
        "deepspeed/zero/unit.py",
        "if self.idle and self.state is UnitState.READY",
        "if self.pins == 0 and self.state is UnitState.READY",
        (
            "tests/dist/test_invariant_i2_users.py::test_invariant_i2_a_pin_closed_inside_a_forward_leaves_its_users_alone",
        ),
        "the last pin's end does not take a unit from a module that runs",
    ),
    Mutant(
        "U1",
        "deepspeed/zero/unit.py",
        "self.version += 1",
        "pass",
        ("tests/dist/test_invariant_i2_users.py::test_invariant_i2_gathered_parameters_around_a_whole_iteration",),
        "no fetch from before a step serves its weights afterwards",
    ),
    Mutant(
        "U2",
        "deepspeed/zero/partition.py",
        "in zip(spread, mesh.groups, strict=True)",
        "in reversed(list(zip(spread, mesh.groups, strict=True)))",
        (f"{_TWO_LEVELS}[accumulation-secondary_shards]",),
        "ranges are cut by the inner axis first",
    ),
    Mutant(
        "I1",
        "deepspeed/client/zero/init.py",
        "collectives.broadcast(unit.buffer.full,",
        "(lambda *_: None)(unit.buffer.full,",
        _ZERO_INIT,
        "a parameter touched again while the model is built has the first rank's values",
    ),
    Mutant(
        "I2",
        "deepspeed/client/zero/init.py",
        "collectives.broadcast(values,",
        "(lambda *_: None)(values,",
        _ZERO_INIT,
        "a model built sharded has the first rank's values",
    ),
    Mutant(
        "X1",
        "deepspeed/client/zero/safe_state.py",
        "if part.numel() and unit.dtype == part.dtype and not unit.master_is_param:",
        "if False:",
        ("tests/dist/test_offload_state_access.py::test_a_local_value_belongs_to_the_caller_again",),
        "in fp32 the model sees a locally written master at once, from a drive too",
    ),
    Mutant(
        "X3",
        "deepspeed/client/zero/safe_state.py",
        "value.reshape(-1)).wait()",
        "value.reshape(-1))",
        ("tests/dist/test_offload_state_access.py::test_a_local_value_belongs_to_the_caller_again",),
        "a value given to safe_set_local_fp32_param may be changed when the call has returned",
    ),
    Mutant(
        "X2",
        "deepspeed/client/zero/safe_state.py",
        "if unit.buffer.full.untyped_storage().nbytes():",
        "if False:",
        ("tests/dist/test_access.py::test_a_master_written_while_gathered_is_seen_and_stays",),
        "a master written while its parameter is gathered reaches the gathered copy",
    ),
)

_CHECKPOINTS = (
    Mutant(
        "K1",
        "deepspeed/checkpoint/load/restore.py",
        "yield lo - view.start, hi - view.start, key, span.lo, span.region",
        "packed = sum(s.numel for s in segments_of(view) if s.offset < segment.offset)\n            "
        "yield packed, packed + hi - lo, key, lo - segment.offset, None",
        ("tests/dist/test_checkpoint_layouts.py::test_any_layout_to_any_layout[2 ranks stage 3 nvme]",),
        "optimizer slots are filled at their own places, padding between them",
    ),
    Mutant(
        "K2",
        "deepspeed/checkpoint/load/compare.py",
        "if key is None:\n                match.missing.append(name)",
        "if key is None:\n                pass",
        ("tests/dist/test_checkpoint_damage.py::test_a_checkpoint_without_some_of_the_weights_is_refused_with_names",),
        "a checkpoint without one of the weights is refused",
    ),
    Mutant(
        "K3",
        "deepspeed/checkpoint/save/writer.py",
        "final = folders.publish(",
        "if order.latest:\n                folders.write_latest(order.save_dir, order.tag)\n            "
        "final = folders.publish(",
        ("tests/dist/test_checkpoint_crash.py::test_killed_at_a_turning_point_of_a_save",),
        "latest names whole checkpoints only",
    ),
    Mutant(
        "K5",
        "deepspeed/checkpoint/save/content.py",
        "np.random.set_state(",
        "tuple(",
        ("tests/dist/test_checkpoint_resume.py::test_every_stage_and_precision[stage 0 bf16]",),
        "numpy's generator goes on where it was",
    ),
    Mutant(
        "K6",
        "deepspeed/engine/checkpoint.py",
        'self._scaler.load_state_dict(facts["loss_scaler"])',
        "pass",
        (f"{_COMPLETE}::test_loading_into_an_engine_that_has_stepped",),
        "the loss scale is restored",
    ),
    Mutant(
        "K7",
        "deepspeed/engine/checkpoint.py",
        "schedule.load_state_dict(state)",
        "pass",
        (f"{_COMPLETE}::test_switches_leave_out_what_they_name",),
        "the learning-rate schedule is restored",
    ),
    Mutant(
        "K10",
        "deepspeed/checkpoint/load/restore.py",
        "if k not in _OWN_OPTIONS or k not in group})",
        'if k != "params"})',
        (f"{_COMPLETE}::test_classes_of_one_method_take_each_others_state",),
        "how an optimizer computes does not come from a checkpoint",
    ),
    Mutant(
        "K9",
        "deepspeed/engine/checkpoint.py",
        "RandomStates.agree(self.mesh.tp)",
        "pass",
        ("tests/dist/test_tensor_parallel.py::test_dropout_is_the_same_on_what_is_whole_after_a_load_of_other_ranks",),
        "ranks that share layers draw the same random numbers after a load of another layout",
    ),
    Mutant(
        "H1",
        "deepspeed/launcher/node/supervisor.py",
        "self._verdict = interrupted(number)",
        "self._verdict = Verdict(1)",
        ("tests/dist/test_launcher.py::test_interrupt_while_looking_for_the_first_node",),
        "a launcher that a signal S ends before it has found the others gives 128 + S",
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *(*_PURE, *_OPTIMIZERS, *_STEPS, *_WEIGHTS, *_CHECKPOINTS),
    *(*PARTS, *EXPERTS, *SEQUENCES, *PIPELINES, *COMPILED, *ELASTIC, *INTERRUPTS),
)
