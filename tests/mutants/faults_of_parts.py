"""Planted faults of what ranks, stages or nodes share: layers in parts, pipelines, compiled blocks, elastic jobs."""

from tests.mutants.mutant import Mutant

_TENSOR = "tests/dist/test_tensor_parallel.py"
PARTS = (
    Mutant(
        "TP1",
        "deepspeed/zero/layout.py",
        "weight = self.norm_weight / place.copies",
        "weight = self.norm_weight",
        (f"{_TENSOR}::test_two_ways_of_two_ranks_train_as_one_process[llama, tied, with biases and norms of heads-3]",),
        "what several tensor-parallel ranks hold counts once in the norm",
    ),
    Mutant(
        "TP2",
        "deepspeed/tensor/layers.py",
        "out = out if self.input_sums else enter_parts(out, self.group)",
        "out = out if self.input_sums else out",
        (f"{_TENSOR}::test_four_ranks_share_each_layer[llama with one head of keys]",),
        "gradients of keys that every rank computes are summed over the ranks that use them",
    ),
    Mutant(
        "TP3",
        "deepspeed/tensor/layers.py",
        "source() is value and version == value._version",
        "True",
        (f"{_TENSOR}::test_two_ways_of_two_ranks_train_as_one_process[gpt2-1]",),
        "layers share an entered input only if it is the same tensor",
    ),
    Mutant(
        "TP4",
        "deepspeed/zero/regions.py",
        "Span(max(lo, at) - at, min(hi, end) - at, region)",
        "Span(max(lo, at), min(hi, end), region)",
        (f"{_TENSOR}::test_saved_at_one_layout_and_loaded_at_any_other[gpt2]",),
        "elements of a part count from the beginning of their own box",
    ),
    Mutant(
        "TP5",
        "deepspeed/tensor/layers.py",
        "self._seed = (torch.get_rng_state(), device), seed + 1 + self.group.index",
        "self._seed = (torch.get_rng_state(), device), seed + 1",
        (f"{_TENSOR}::test_each_rank_draws_numbers_of_its_own_for_its_part_only",),
        "dropout differs between the parts",
    ),
    Mutant(
        "TP6",
        "deepspeed/zero/build.py",
        "collectives.broadcast(local, mesh.tp)",
        "local = local.clone()",
        (f"{_TENSOR}::test_ranks_that_share_layers_take_the_first_ones_weights",),
        "parts are cut from one model, whatever each rank has built",
    ),
)

_SEQUENCE = "tests/dist/test_sequence.py::test_training_equals_one_process"
SEQUENCES = (
    Mutant(
        "SQ1",
        "deepspeed/sequence/heads.py",
        "range(part[0] // group, part[-1] // group + 1)",
        "range(part[0] // group, part[0] // group + 1)",
        (f"{_SEQUENCE}[sp 4, stage 1, odd length, heads that ranks do not divide]",),
        "a rank gets every head of keys that its heads of queries read",
    ),
    Mutant(
        "SQ2",
        "deepspeed/sequence/layout.py",
        "(after != before + 1)",
        "(after < before)",
        (f"{_SEQUENCE}[sp 2, stage 2, packed]",),
        "a document of one token ends before the next one",
    ),
    Mutant(
        "SQ3",
        "deepspeed/sequence/wire.py",
        "(count / run.counts.sum().clamp(min=1))",
        "(count / run.counts.sum().clamp(min=1) * 0 + 1 / self._group.size)",
        (f"{_SEQUENCE}[sp 2, stage 0]",),
        "the losses of a sequence's parts are weighed by their targets",
    ),
    Mutant(
        "SQ4",
        "deepspeed/sequence/wire.py",
        "loss = torch.where(count > 0, loss, 0.0) *",
        "loss = loss *",
        (f"{_SEQUENCE}[targets on one rank only]",),
        "a part without targets has no loss",
    ),
    Mutant(
        "SQ5",
        "deepspeed/sequence/attention.py",
        "max(0, start - window + 1)",
        "start",
        (f"{_SEQUENCE}[a window]",),
        "the first queries of a block see what is before it",
    ),
    Mutant(
        "SQ6",
        "deepspeed/sequence/batch.py",
        "labels[..., 1:], (0, 1)",
        "labels[..., :-1], (1, 0)",
        (f"{_SEQUENCE}[sp 2, stage 0]",),
        "a token predicts the next one, also across the border of two parts",
    ),
    Mutant(
        "SQ7",
        "deepspeed/sequence/heads.py",
        "[piece.numel() for piece in pieces], received=received)",
        "[piece.numel() for piece in pieces][::-1], received=received[::-1])",
        (f"{_SEQUENCE}[sp 4, stage 1, odd length, heads that ranks do not divide]",),
        "outputs go back to the ranks that have the tokens",
    ),
    Mutant(
        "SQ8",
        "deepspeed/comm/mesh/groups.py",
        'zero = over(topology.axis(rank, "dp_outer", "dp", "sp"))',
        'zero = over(topology.axis(rank, "dp_outer", "dp"))',
        (f"{_SEQUENCE}[sp 2, stage 1, beside data parallelism]",),
        "ZeRO shards over the ranks of a sequence too",
    ),
    Mutant(
        "SQ9",
        "deepspeed/engine/token_weights.py",
        "sum_in_place(parts.ne(IGNORED).sum(), self._sequence)",
        "parts.ne(IGNORED).sum()",
        (f"{_SEQUENCE}[parts that were cut before, weighed by tokens]",),
        "a part of a sequence is weighed by the tokens of the whole",
    ),
)

_EXPERTS = "tests/dist/test_experts.py"
_RUNTIME = "tests/dist/test_experts_runtime.py"
_CELL = f"{_EXPERTS}::test_training_equals_one_process"
EXPERTS = (
    Mutant(
        "EX1",
        "deepspeed/moe/exchange.py",
        "local = torch.where(home[tokens] == owner, index[tokens] - owner * experts, -1)",
        "local = torch.where(home[tokens] <= owner, (index[tokens] - owner * experts).abs() % experts, -1)",
        (f"{_EXPERTS}::test_a_token_travels_once_to_each_rank_of_its_experts",),
        "a rank computes only the choices that are its own experts",
    ),
    Mutant(
        "EX2",
        "deepspeed/tensor/differentiable.py",
        'back = {"sent": sent, "received": received}, {"sent": received, "received": sent}',
        'back = {"sent": sent, "received": received}, {"sent": sent, "received": received}',
        (f"{_CELL}[stage 0, two ranks an expert, top-2]",),
        "gradients of tokens go back the way that the tokens came",
    ),
    Mutant(
        "EX3",
        "deepspeed/moe/layer.py",
        "zip(experts, parts, strict=True)]",
        "zip(experts, parts, strict=True) if len(part)]",
        (f"{_CELL}[layer, ranks without tokens]",),
        "weights of experts without tokens have a gradient, so that ranks reduce in one order",
    ),
    Mutant(
        "EX4",
        "deepspeed/moe/exchange.py",
        "hidden, weights = (cut_parts(whole, shared, 0, edges=edges) for whole in (hidden, weights))",
        "hidden, weights = hidden[part], weights[part]",
        (f"{_CELL}[folded over tensor-parallel ranks]",),
        "ranks that share tokens put the gradients of their parts together",
    ),
    Mutant(
        "EX5",
        "deepspeed/checkpoint/save/content.py",
        "adds = rank > 0 and any(u.mesh.zero.index == 0 for u in states.units)",
        "adds = rank > 0 and states.mesh.zero.index == 0",
        (f"{_EXPERTS}::test_whole_weights_have_the_experts_of_all_ranks",),
        "a checkpoint names the experts of all ranks",
    ),
    Mutant(
        "EX6",
        "deepspeed/moe/spread.py",
        "half * shape[dim] // packed + part * width",
        "(half + part * packed) * width",
        (f"{_CELL}[two ranks share an expert, stage 0]",),
        "ranks that share an expert have the same rows of gate and up projection",
    ),
    Mutant(
        "EX7",
        "deepspeed/tensor/differentiable.py",
        "ctx.flight.start(grad, back=True)",
        "ctx.flight.start(grad)",
        (f"{_CELL}[stage 0, two ranks an expert, top-2]",),
        "gradients of rows that were started early go back the way that the rows came",
    ),
    Mutant(
        "EX8",
        "deepspeed/moe/exchange.py",
        "fault.to(pairs.dtype).expand_as(pairs)",
        "torch.zeros_like(pairs)",
        (f"{_RUNTIME}::test_scores_that_are_not_finite_are_said_on_every_rank_with_the_layer[stacked-1]",),
        "ranks tell each other with the counts whether scores are finite",
    ),
    Mutant(
        "EX9",
        "deepspeed/moe/loads.py",
        "self._last = sum_in_place(table, self._ranks)",
        "self._last = table",
        (f"{_RUNTIME}::test_the_bias_follows_the_loads_of_all_ranks_and_micro_batches_also_in_another_layout",),
        "loads are those of all ranks, and the bias is the same on them",
    ),
    Mutant(
        "EX10",
        "deepspeed/moe/loads.py",
        "factor = self.coefficient * (1 - result.skip)",
        "factor = self.coefficient",
        (f"{_RUNTIME}::test_a_skipped_step_leaves_the_bias_and_ranks_agree_on_it[True]",),
        "the bias stays as it is where the device leaves out the update",
    ),
    Mutant(
        "EX11",
        "deepspeed/moe/loads.py",
        "if not module.training or inside_backward():",
        "if not module.training:",
        (f"{_RUNTIME}::test_a_recomputation_counts_once_and_nothing_is_counted_unasked",),
        "tokens of a recomputation count once",
    ),
    Mutant(
        "EX12",
        "deepspeed/comm/mesh/topology.py",
        '("pp", "dp_outer", "ep", "edp")',
        '("pp", "dp_outer", "edp", "ep")',
        (f"{_RUNTIME}::test_neighbours_may_hold_the_same_experts_and_machines_have_groups",),
        "with data before experts the ranks that divide experts are apart",
    ),
    Mutant(
        "EX13",
        "deepspeed/zero/sync/failures.py",
        "sorted(gone - alive.keys())",
        "sorted(gone)",
        (f"{_RUNTIME}::test_a_rank_that_dies_inside_an_exchange_ends_all_with_its_name[1]",),
        "a rank that has broken off its connections has not ended",
    ),
)

_CUT = "tests/dist/test_three_axes_failures.py"
PIPELINES = (
    Mutant(
        "PL1",
        "deepspeed/pipe/torch_pipelining.py",
        "for n, gs in arrived.items() if len(arrived) > 1]",
        "for n, gs in arrived.items() if len(arrived) > 9]",
        ("tests/pure/test_pipe_orders.py",),
        "a weight that is used at two depths gets its gradient once in a backward in two halves",
    ),
    Mutant(
        "PL2",
        "deepspeed/pipe/module.py",
        "replace(facts, mesh=wide, tie=name)",
        "replace(facts, mesh=mesh)",
        ("tests/dist/test_pipeline_parity.py::test_two_stages[1f1b-1-3-3]",),
        "gradients of a tied layer are summed over the stages that hold it",
    ),
    Mutant(
        "PL3",
        "deepspeed/checkpoint/save/collect.py",
        "unit.facts.axes, strict=False",
        "unit.mesh.groups, strict=True",
        ("tests/dist/test_pipeline_checkpoints.py::test_any_number_of_stages_to_any_other[2 stages 1f1b-no pipeline]",),
        "what several stages hold is written whole by the first of them",
    ),
    Mutant(
        "PL4",
        "deepspeed/zero/sync/failures.py",
        "            for group in sharers:\n                collectives.break_off(group)\n",
        "",
        (f"{_CUT}::test_a_rank_that_fails_alone_does_not_leave_those_waiting_that_share_its_layers[forward]",),
        "a rank that fails alone frees those that wait for it inside a layer",
    ),
    Mutant(
        "PL5",
        "deepspeed/pipe/engine.py",
        "inputs if tp_size > 1 else 0]",
        "0]",
        (f"{_CUT}::test_data_that_differ_between_ranks_of_one_pipeline[later inputs]",),
        "ranks that share layers read the same inputs in every batch",
    ),
)

COMPILED = (
    Mutant(
        "CB1",
        "deepspeed/zero/hooks.py",
        "            if root not in running:\n                enter(",
        "            if True:\n                enter(",
        ("tests/dist/test_compile.py::test_a_block_is_asked_for_once_in_each_direction",),
        "the hooks of a module inside a block have nothing to do while the block's forward runs",
        also=(
            (
                "            if root not in running:\n                leave(",
                "            if True:\n                leave(",
            ),
        ),
    ),
    Mutant(
        "CB2",
        "deepspeed/zero/hooks.py",
        "not (self._compiled and module in self._inside)",
        "True",
        ("tests/dist/test_compile.py::test_compiled_as_plain_in_whole_graphs[frozen-3-2]",),
        "nothing inside a compiled block has hooks",
    ),
    Mutant(
        "CB3",
        "deepspeed/zero/hooks.py",
        "cut = module not in self._roots and",
        "cut = False and",
        ("tests/dist/test_compile.py::test_compiled_as_plain_in_whole_graphs[frozen-3-2]",),
        "only what has no hooks inside is compiled",
    ),
)

ELASTIC = (
    Mutant(
        "EL1",
        "deepspeed/launcher/elastic/agent.py",
        "if not any(end.exitcode == PreemptedExit.exit_status for end in ends):",
        "if not all(end.exitcode == PreemptedExit.exit_status for end in ends):",
        ("tests/dist/test_elastic_ranks.py::test_a_job_has_saved_as_soon_as_one_rank_has",),
        "a job has saved as soon as one rank has",
    ),
    Mutant(
        "EL2",
        "deepspeed/launcher/elastic/agent.py",
        "done = self._ranks.all_ended  # first: the last one may fail in between\n"
        "        failed = self._ranks.failures(ended_only=True)",
        "failed = self._ranks.failures(ended_only=True)\n        done = self._ranks.all_ended",
        ("tests/dist/test_elastic_ranks.py::test_a_last_rank_that_fails_is_no_good_end",),
        "whether all have ended is read before how",
    ),
    Mutant(
        "EL3",
        "deepspeed/launcher/elastic/beats.py",
        'if not self._channel.has(f"ended/{node}"):',
        "if True:",
        ("tests/pure/test_channel.py::test_a_silent_node_ends_the_round_unless_it_has_ended",),
        "a node that has taken leave may be silent",
    ),
)

INTERRUPTS = (
    Mutant(
        "IN1",
        "deepspeed/comm/interrupts.py",
        "if impatient or plain or not _inside(frame):",
        "if True:",
        ("tests/pure/test_interrupts.py::test_ctrl_c_at_any_moment_leaves_no_half_of_an_update",),
        "what a handler raises comes between the engine's operations",
    ),
    Mutant(
        "IN2",
        "deepspeed/comm/interrupts.py",
        "signal.pthread_kill(main, self.number)",
        "_thread.interrupt_main(self.number)",
        ("tests/pure/test_interrupts.py::test_ctrl_c_inside_the_engine_ends_a_sleep_of_the_programs",),
        "a postponed signal ends a sleep of the program's",
    ),
    Mutant(
        "IN3",
        "deepspeed/comm/interrupts.py",
        "return _updating(frames[place:])",
        "return False",
        ("tests/pure/test_interrupts.py::test_ctrl_c_in_what_an_update_calls_of_the_programs_comes_behind_the_update",),
        "the client's code in the middle of an update is part of the update",
    ),
    Mutant(
        "IO1",
        "deepspeed/tier/aio.py",
        "functools.partial(self._begin, tensor, write, plain)",
        "functools.partial(self._begin, None, write, plain)",
        ("tests/ops/test_aio_failures.py::test_dropped_engine_that_is_collected_by_its_own_thread_finishes",),
        "Python's threads hold the tensors that they write",
    ),
)
