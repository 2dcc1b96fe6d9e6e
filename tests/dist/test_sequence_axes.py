"""Parts of sequences beside pipeline stages, tensor-parallel ranks and experts: the numbers of one process, whatever
stage of ZeRO, schedule and tier.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.engine import DeepSpeedEngine
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec, cut_model
from deepspeed.sequence.batch import part_of
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.tools.verify.grads import scaled_error
from deepspeed.utils import groups, safe_get_full_grad
from tests.dist.test_sequence import ADAM, GROUPED, TENSOR, config_of, parity
from tests.dist.test_three_axes_failures import patience
from tests.harness import pipes
from tests.harness.beside import Beside
from tests.harness.faults import modules_replaced
from tests.harness.pool import PatientPool, RankPool
from tests.harness.sequences import ROWS, WORDS, batch_of, decoder, stand_in
from tests.harness.training import outcome, start

pytestmark = pytest.mark.timeout(240)
WIDTH, TOLERANCE = 12, 2e-6


# -- pipeline stages --------------------------------------------------------------------------------------------------
class Vectors(nn.Module):
    """(words, positions) to vectors, and with ``scores`` back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.places = nn.Parameter(torch.randn(WORDS, WIDTH) / 2), nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        words, places = value
        return F.embedding(words, self.weight) + F.embedding(places, self.places)


def scores(module: Any, hidden: Tensor) -> Tensor:
    return hidden @ module.weight.t()


class Attending(nn.Module):
    """A client's own layer: attention over the ranks that share the sequence now."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 6, WIDTH // 6)).unbind(2)
        attend = local
        if groups._get_sequence_parallel_world_size() > 1:
            attend = DistributedAttention(local, groups._get_sequence_parallel_group(), scatter_idx=2, gather_idx=1)
        return hidden + self.out(attend(q, k, v, 0).flatten(2))


def local(q: Tensor, k: Tensor, v: Tensor, _: int = 0) -> Tensor:
    """Causal attention of [rows, tokens, heads, width]."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def layers() -> list[Any]:
    ends = [TiedLayerSpec("ends", Vectors), TiedLayerSpec("ends", Vectors, forward_fn=scores)]
    return [ends[0], *(LayerSpec(Attending) for _ in range(4)), ends[1]]


class Plain(pipes.Plain):
    """The same layers in one process."""

    def __init__(self) -> None:
        super().__init__(layers())

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        inputs, labels = pair_of(batch)
        return {"loss": mean(super().forward(inputs), labels)}


def mean(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100)


def with_number(output: Tensor, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean of what a mask leaves, and how much that is."""
    words, mask = labels
    losses = F.cross_entropy(output.flatten(0, 1), words.flatten(), reduction="none") * mask.flatten()
    return losses.sum() / mask.sum().clamp(min=1), mask.sum()


def pair_of(batch: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(inputs, labels): each token predicts the next one."""
    ids = batch["input_ids"]
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return (ids, torch.arange(ids.shape[1]).expand(ids.shape)), labels


def part_for(batch: dict[str, Tensor], group: Any, *, masked: bool = False) -> tuple[Any, Any]:
    """What the iterator of a rank yields: its part of the tokens."""
    (ids, places), labels = pair_of(batch)
    whole = {"ids": ids, "places": places, "labels": labels}
    part = part_of(whole, ids, group.index, group.size)
    words = part["labels"]
    return (part["ids"], part["places"]), (words.clamp(min=0), words.ne(-100).float()) if masked else words


def start_own(pp: int, config: dict[str, Any], loss_fn: Any) -> Any:
    module = PipelineModule(layers(), num_stages=pp, loss_fn=loss_fn)
    plain = Plain()
    for name, param in module.named_parameters():
        param.data.copy_(dict(plain.named_parameters())[name])
    return start(module, config), plain


def staged(pp: int, sp: int, stage: int, schedule: str, model: str, options: dict[str, Any]) -> dict[str, float]:
    """Train two steps beside one process that sees the batches of all ranks; return the largest errors."""
    options, micros = dict(options), 4
    kind, changes = options.pop("kind", "plain"), options.pop("changes", {})
    chunks = {"interleaved": 2, "zbv": 2}.get(schedule, 1)
    changes = {**changes, "gradient_accumulation_steps": micros}
    changes["pipeline"] = {"schedule": schedule, "chunks_per_stage": chunks}
    torch.manual_seed(7)
    with modules_replaced({"transformers": stand_in}):
        if model == "cut":
            how = {"chunks_per_stage": chunks, "chunk_style": "v" if schedule == "zbv" else "loop"}
            ours, plain = decoder(depth=4, **options), decoder(depth=4, **options)
            ours.recomputes = schedule == "1f1b"
            engine = start(cut_model(ours, pp, **how), config_of(sp, stage, **changes))
        else:
            engine, plain = start_own(pp, config_of(sp, stage, **changes), with_number if model == "pairs" else mean)
        feeds, feed, group = engine.mesh.data.size, engine.mesh.data.index, engine.mesh.sp
        optimizer, worst = torch.optim.AdamW(plain.parameters(), **ADAM), Beside(engine, plain)
        grads = dict[str, Tensor]()

        def step(self: Any) -> Any:
            grads.update({name: safe_get_full_grad(param) for name, param in self.module.named_parameters()})
            return update(self)

        update = DeepSpeedEngine.step
        for number in range(2):
            batches = [[batch_of(kind, micros * number + m, f) for m in range(micros)] for f in range(feeds)]
            optimizer.zero_grad()
            total = torch.zeros(())
            with patch.object(groups, "_get_sequence_parallel_world_size", lambda: 1):
                for batch in (batch for column in batches for batch in column):
                    loss = plain(**batch)["loss"] / (micros * feeds)
                    loss.backward()
                    total += loss.detach()
            mine = batches[feed]
            if model != "cut":
                mine = [part_for(batch, group, masked=model == "pairs") for batch in mine]
            with patch.object(DeepSpeedEngine, "step", step):
                worst.loss(engine.train_batch(iter(mine)), total)
            for name, grad in grads.items():
                worst.note("gradient", scaled_error(grad, worst.trained[name].grad))
            norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
            optimizer.step()
            worst.note("norm", abs(engine.get_global_grad_norm() / norm - 1))
        worst.parameters()
        with torch.no_grad(), patch.object(groups, "_get_sequence_parallel_world_size", lambda: 1):
            plain.eval()
            total = sum(plain(**batch)["loss"] for column in batches for batch in column) / (micros * feeds)
        worst.note("evaluation", abs(float(engine.eval_batch(iter(mine)) - total)))
        engine.destroy()
    return worst


STAGED: dict[str, tuple[Any, ...]] = {
    "layers of a client": (2, 2, 1, "1f1b", "own", {}),
    "layers of a client, stage 3": (2, 2, 3, "zero_bubble", "own", {"kind": "no targets"}),
    "layers of a client, a loss with its number of tokens": (1, 4, 0, "1f1b", "pairs", {}),
    "a model that is cut, packed": (2, 2, 1, "1f1b", "cut", {"kind": "packed", "tied": True}),
    "a model that is cut, stage 3": (2, 2, 3, "interleaved", "cut", {"kind": "padded left", **GROUPED}),
    "layers shared, a tied head, no parts": (2, 1, 1, "1f1b", "cut", {"tied": True, "changes": TENSOR}),
    "layers shared, a head of its own, no parts": (2, 1, 3, "1f1b", "cut", {"changes": TENSOR}),
    "a model that is cut, a ring": (2, 2, 0, "zbv", "cut", {"heads": 1, "keys": 1, "window": 5}),
}


# By the other layers of a client; by test_three_axes.py, and the same with a tied head.
SHOWN_BY_OTHERS = {"layers of a client", "layers shared, a head of its own, no parts"}


@pytest.mark.in_make_test(*(STAGED.keys() - SHOWN_BY_OTHERS))
@pytest.mark.parametrize("cell", STAGED)
def test_stages_of_parts_train_as_one_process(pool4: RankPool, cell: str) -> None:
    for errors in pool4.run(staged, *STAGED[cell]):
        assert max(errors.values()) <= TOLERANCE, errors


EIGHT_STAGED: dict[str, tuple[Any, ...]] = {
    "stage 0": (2, 2, 0, "1f1b", "own", {}),
    "stage 1": (2, 2, 1, "1f1b", "own", {"kind": "no targets"}),
    "stage 2": (2, 2, 2, "gpipe", "pairs", {}),
    "stage 3": (2, 2, 3, "interleaved", "own", {}),
    "cut, stage 0": (2, 2, 0, "1f1b", "cut", {"kind": "odd"}),
    "cut, stage 1": (2, 2, 1, "zero_bubble", "cut", {"kind": "packed", "tied": True}),
    "cut, stage 2": (2, 2, 2, "1f1b", "cut", {"kind": "padded", **GROUPED}),
    "cut, stage 3": (2, 2, 3, "1f1b", "cut", {"kind": "odd", "tied": True}),
    "cut, four stages": (4, 2, 1, "1f1b", "cut", {"kind": "packed"}),
    "cut, heads and a ring": (2, 4, 3, "1f1b", "cut", {"heads": 2, "keys": 1, "window": 5}),
    "cut, layers shared too": (2, 2, 1, "1f1b", "cut", {"kind": "packed", "changes": TENSOR}),
    "cut, layers shared too, stage 3": (2, 2, 3, "1f1b", "cut", {"kind": "odd", "changes": TENSOR}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", EIGHT_STAGED)
def test_stages_of_parts_on_eight_ranks_train_as_one_process(pool8: RankPool, cell: str) -> None:
    for errors in pool8.run(staged, *EIGHT_STAGED[cell], time_limit=200):
        assert max(errors.values()) <= TOLERANCE, errors


def _attempt(fault: str) -> tuple[list[str], bool]:
    """What ``initialize`` or the first batch says, and whether the engine trains afterwards."""
    rank, own = dist.get_rank(), fault in ("whole", "pair", "layer")
    with modules_replaced({"transformers": stand_in}):
        changes: dict[str, Any] = {"gradient_accumulation_steps": 1, "pipeline": {"schedule": "1f1b"}}
        module: Any
        if fault == "layer":
            module = PipelineModule([nn.Linear(3, 3), nn.Linear(3, 3), decoder(), nn.Linear(3, 3)], num_stages=2)
        elif own:
            module = PipelineModule(layers(), num_stages=2, loss_fn=mean if fault == "whole" else pair_loss)
        elif fault == "heads":
            changes["sequence"] = {"attention": "ulysses"}
            module = cut_model(decoder(heads=1, keys=1), 2)
        else:
            module = cut_model(decoder(), 2, loss_fn=mean if fault == "loss_fn" else None)
        try:
            engine = start(module, config_of(2, 1, **changes))
        except ValueError as error:
            return [str(error)], True
        batch = batch_of("plain", 0, 0)
        good: Any = part_for(batch, engine.mesh.sp, masked=fault == "pair") if own else dict(batch)
        bad: Any = dict(batch)
        if fault == "whole":
            bad = pair_of(batch)
        if fault == "pair":
            bad, good = good, (good[0], good[1][0])
        if fault == "inputs" and rank % 2:
            bad["input_ids"] = batch["input_ids"].flip(1)
        if fault == "shapes" and rank % 2:
            bad = {name: value[:, :-1] for name, value in batch.items()}
        if fault == "labels":
            del bad["labels"]
        said = []
        try:
            engine.train_batch(iter([bad]))
        except RuntimeError as error:
            said.append(str(error))
        trains = bool(torch.isfinite(engine.train_batch(iter([good]))))
        engine.destroy()
    return said, trains


def pair_loss(output: Tensor, labels: Any) -> Tensor:
    """A mean of a tuple of labels that does not say of how many tokens it is."""
    return with_number(output, labels)[0] if isinstance(labels, tuple) else mean(output, labels)


FAULTS = {
    "whole": "share sequences and have read the same: each has to read its part of the tokens",
    "pair": "the labels of a part of a sequence are a tuple, not a tensor in which -100 marks what has no loss",
    "layer": "the loss of whole sequences is that of Decoder itself",
    "loss_fn": "Cut the model by deepspeed.pipe.cut_model without loss_fn, or set the key to 1",
    "heads": "has 1 attention heads, and each rank needs one. Set sequence_parallel_size to 1 or less",
    "inputs": "have read other inputs for micro-batch 0",
    "shapes": "have read inputs of other shapes for micro-batch 0",
    "labels": "the batch has no tensor 'labels'",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_of_stages_gets_a_sentence_on_every_rank(pool4: RankPool, fault: str) -> None:
    for said, trains in pool4.run(_attempt, fault):
        assert trains and len(said) == 1 and FAULTS[fault] in said[0], said


def _alone(*, staged: bool) -> str:
    """What a rank hears where the last one fails between two exchanges: of a client's own layers in stages, or of a
    model of Transformers.
    """
    rank, batch = dist.get_rank(), batch_of("plain", 0, 0)
    with patience(0.5), modules_replaced({"transformers": stand_in}):
        module = PipelineModule(layers(), num_stages=2, loss_fn=mean) if staged else decoder()
        engine = start(module, config_of(2, 1 if staged else 3))
        if rank == dist.get_world_size() - 1:
            engine.module.get_submodule("3" if staged else "layers.1").register_forward_pre_hook(lambda *_: 1 / 0)

        def train() -> None:
            if staged:
                engine.train_batch(iter([part_for(batch, engine.mesh.sp)]))
            else:
                engine.backward(engine(**batch)["loss"])
                engine.step()

        text = outcome(train)
        engine.destroy()
    return text


@pytest.mark.parametrize("staged", [True, False])
def test_a_rank_that_fails_between_exchanges_ends_the_waits_of_all(*, staged: bool) -> None:
    with PatientPool(4) as pool:
        said = pool.run(_alone, staged=staged, time_limit=100)
    place = f"rank 3 ({'pipeline stage 1, ' if staged else ''}sequence-parallel rank 1)"
    assert all("division by zero" in text for text in said), said
    assert all(place in text for text in (said if staged else said[:-1])), said
    assert staged or all("RankFailedError" in text for text in said[:-1]), said


def _asked() -> tuple[Any, ...]:
    module = PipelineModule(layers(), num_stages=2, loss_fn=mean)
    engine = start(module, config_of(2, 1))
    grid, size, group = engine.grid, engine.train_batch_size(), engine.mesh.sp.pg
    same = dist.get_process_group_ranks(group) == dist.get_process_group_ranks(groups._get_sequence_parallel_group())
    engine.destroy()
    return size, grid.get_data_parallel_world_size(), grid.get_data_parallel_rank(), grid.stage_to_global(1), same


def test_a_grid_counts_the_ranks_of_a_sequence_as_one_of_data(pool4: RankPool) -> None:
    for rank, answer in enumerate(pool4.run(_asked)):
        assert answer == (ROWS, 1, 0, 2 + rank % 2, True)


def _moved(folder: str) -> tuple[float, float]:
    """The next loss of a run in stages, and that of the same run, loaded where four ranks share each sequence."""
    with modules_replaced({"transformers": stand_in}):
        batches = [batch_of("packed", 0, micro) for micro in range(2)]
        changes = {"gradient_accumulation_steps": 2, "pipeline": {"schedule": "1f1b"}}
        engine = start(cut_model(decoder(tied=True), 2), config_of(2, 1, **changes))
        engine.train_batch(iter(batches))
        engine.save_checkpoint(folder)
        expected = float(engine.train_batch(iter(batches)))
        engine.destroy()
        engine = start(decoder(tied=True), config_of(4, 3))
        engine.load_checkpoint(folder)
        found = sum(float(engine(**batch)["loss"].detach()) for batch in batches) / 2
        engine.destroy()
    return expected, found


def test_a_run_in_stages_goes_on_without_them(pool4: RankPool, tmp_path: Path) -> None:
    for expected, found in pool4.run(_moved, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-6)


# -- tensor-parallel ranks, experts, tiers ----------------------------------------------------------------------------
def _experts(ep: int, **block: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": ep, **block}}


def on_drive(stage: int, folder: str) -> dict[str, float]:
    place = {"device": "nvme", "nvme_path": folder}
    zero = {"offload_optimizer": place} | ({"offload_param": place} if stage == 3 else {})
    return parity(2, stage, "odd", GROUPED, {"zero": zero})


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_parts_train_as_one_process_with_states_on_a_drive(pool4: RankPool, tmp_path: Path, stage: int) -> None:
    for errors in pool4.run(on_drive, stage, str(tmp_path)):
        assert max(errors.values()) <= TOLERANCE, errors


MIXED: dict[str, tuple[Any, ...]] = {
    "experts over the ranks of a sequence": (2, 1, "odd", {"experts": 4}, _experts(2)),
    "experts over all ranks, packed": (2, 3, "packed", {"experts": 4}, _experts(4)),
}


@pytest.mark.parametrize("cell", MIXED)
def test_parts_beside_experts_train_as_one_process(pool4: RankPool, cell: str) -> None:
    for errors in pool4.run(parity, *MIXED[cell]):
        assert max(errors.values()) <= TOLERANCE, errors


EIGHT: dict[str, tuple[Any, ...]] = {
    "four ranks a sequence": (4, 3, "odd", {"heads": 6, "keys": 2}),
    "a ring of more ranks than heads": (8, 3, "packed", {"heads": 2, "keys": 1}),
    "a ring of eight": (8, 1, "odd", {"heads": 1, "keys": 1, "window": 5}),
    "heads and a ring": (8, 2, "padded", {"heads": 4, "keys": 2}),
    "layers shared, stage 0": (2, 0, "plain", {}, TENSOR),
    "layers shared, stage 1": (2, 1, "packed", {}, TENSOR),
    "layers shared, stage 3": (2, 3, "odd", GROUPED | {"keys": 2}, TENSOR),
    "experts, stage 0": (2, 0, "odd", {"experts": 4}, _experts(2)),
    "experts, stage 1": (2, 1, "packed", {"experts": 8}, _experts(4)),
    "experts, stage 3": (2, 3, "padded left", {"experts": 4}, _experts(2)),
    "experts on all ranks, four of a sequence": (4, 3, "odd", {"experts": 8}, _experts(8)),
    "experts, layers shared": (2, 3, "odd", {"experts": 4}, TENSOR | _experts(2)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", EIGHT)
def test_parts_on_eight_ranks_train_as_one_process(pool8: RankPool, cell: str) -> None:
    for errors in pool8.run(parity, *EIGHT[cell], time_limit=200):
        assert max(errors.values()) <= TOLERANCE, errors
