"""The data position: after loading, on any number of ranks, the rest of the epoch holds every remaining sample once."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.client.data_loader import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.client.data_position import ResumableSampler
from deepspeed.errors import CheckpointError
from tests.harness.rows import for_each


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Every world-th number; draws from all generators, as an augmentation would."""

    def __init__(self, length: int = 20, rank: int = 0, world: int = 1) -> None:
        self.numbers = range(rank, length, world)

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers:
            torch.rand(1), random.random(), np.random.random()
            yield number


class Counted:
    """Knows how many it has given out; a new pass starts anew unless a number was just loaded."""

    given = loaded = 0

    def in_order(self, numbers: Sequence[int]) -> Iterator[int]:
        self.given, self.loaded = self.loaded, 0
        while self.given < len(numbers):
            self.given += 1
            yield numbers[self.given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["given"]


class StatefulStream(Counted, Stream):
    def __iter__(self) -> Iterator[int]:
        return self.in_order(self.numbers)


class StatefulSampler(Counted, Sampler[int]):
    """Backwards through the data; tells only what it has given out itself, as samplers with a count do."""

    def __init__(self, length: int) -> None:
        self.numbers = range(length)[::-1]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        return self.in_order(self.numbers)


def ranks_of(world: int, length: int = 20, batch: int = 2, **options: Any) -> list[DeepSpeedDataLoader]:
    """One loader for each rank."""
    data = options.pop("dataset", None) or Numbers(length)
    return [
        DeepSpeedDataLoader(data, batch, data_parallel_world_size=world, data_parallel_rank=r, **options)
        for r in range(world)
    ]


def values(batches: Any) -> list[int]:
    """The samples of some batches."""
    return [int(value) for batch in batches for value in batch]


def advance(loaders: list[DeepSpeedDataLoader], batches: int) -> list[int]:
    """What all ranks see in their next ``batches`` batches, by ``next`` on the loader."""
    return [value for loader in loaders for _ in range(batches) for value in values([next(loader)])]


def moved(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a file gives it back."""
    return json.loads(json.dumps(state))


@given(
    length=st.integers(1, 60),
    ranks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    fraction=st.floats(0, 1), epoch=st.integers(0, 3),
)  # fmt: skip
def test_the_rest_of_an_epoch_holds_every_remaining_sample_once_on_any_ranks(
    length: int, ranks: tuple[int, int], sizes: tuple[int, int], fraction: float, epoch: int
) -> None:
    before, after = ranks_of(ranks[0], length, sizes[0]), ranks_of(ranks[1], length, sizes[1])
    for loader in before:
        loader.set_epoch(epoch)
    steps = int(fraction * len(before[0]))
    seen = advance(before, steps)
    states = [moved(loader.state_dict()) for loader in before]
    assert all(state == states[0] for state in states) and states[0]["samples"] == min(len(seen), length)
    for loader in after:
        loader.load_state_dict(states[0])
    rest = [values(loader) for loader in after]
    assert len({len(share) for share in rest}) == 1
    flat = [sample for share in rest for sample in share]
    counts, padding = Counter(seen + flat), len(seen) + len(flat) - length
    assert set(counts) == set(range(length))
    # only the padding that torch's sampler has as well is seen again: less than one sample for each rank
    assert padding == sum(counts.values()) - len(counts) and 0 <= padding < max(ranks)
    if len(seen) < length:
        assert not set(seen) & set(flat[: 0 if padding else None])
        assert padding == -(length - len(seen)) % ranks[1]
    assert after[0].state_dict()["epoch"] == epoch + 1 and after[0].state_dict()["samples"] == 0
    fresh = ranks_of(ranks[1], length, sizes[1])
    for loader in fresh:
        loader.set_epoch(epoch + 1)
    assert [values(loader) for loader in after] == [values(loader) for loader in fresh]


@given(
    length=st.integers(1, 40), world=st.integers(1, 6), epoch=st.integers(0, 2), shuffle=st.booleans(),
    drop_last=st.booleans(),
)  # fmt: skip
def test_a_whole_epoch_is_that_of_torchs_sampler(
    length: int, world: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    for rank in range(world):
        options: dict[str, Any] = {"num_replicas": world, "rank": rank, "shuffle": shuffle, "drop_last": drop_last}
        options["seed"] = 3
        ours, theirs = ResumableSampler(Numbers(length), **options), DistributedSampler(Numbers(length), **options)
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs) and len(ours) == len(theirs)
    assert isinstance(ours, DistributedSampler)


@given(
    length=st.integers(1, 40), world=st.integers(1, 4), batch=st.integers(1, 4), fraction=st.floats(0, 1),
    drop_last=st.booleans(),
)  # fmt: skip
def test_the_same_ranks_go_on_sample_for_sample(
    length: int, world: int, batch: int, fraction: float, drop_last: bool
) -> None:
    options = {"dataloader_drop_last": drop_last}
    straight, other = ranks_of(world, length, batch, **options), ranks_of(world, length, batch, **options)
    advance(straight, int(fraction * len(straight[0])))
    for loader, twin in zip(straight, other, strict=True):
        twin.load_state_dict(loader.state_dict())
        rest = [batch.tolist() for batch in loader._stream] if loader._stream else [batch.tolist() for batch in loader]
        assert [batch.tolist() for batch in twin] == rest
        assert values(twin) == values(loader)


def test_several_changes_of_size_in_one_epoch() -> None:
    seen: list[int] = []
    state = None
    for world, batch, steps in ((4, 2, 2), (3, 1, 3), (1, 5, 1), (2, 3, 4)):
        loaders = ranks_of(world, 54, batch)
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
        seen += advance(loaders, steps)
        state = moved(loaders[-1].state_dict())
        assert state["epoch"] == 0 and state["samples"] == len(seen) == len(set(seen))
    assert sorted(seen) == list(range(54))


def test_dropped_samples_are_the_only_ones_missing() -> None:
    before, after = ranks_of(2, 23, 2, dataloader_drop_last=True), ranks_of(3, 23, 2, dataloader_drop_last=True)
    seen = advance(before, 2)
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    seen += values(batch for loader in after for batch in loader)
    assert len(seen) == len(set(seen)) == 8 + 12


@pytest.mark.in_make_test("0-0", "1-0", "3-0", "5-0")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [0, 1, 3, 5])
def test_only_batches_handed_out_count(workers: int, batches: int) -> None:
    loader, twin = (DeepSpeedDataLoader(Numbers(10), 2, num_local_io_workers=workers) for _ in range(2))
    running = iter(loader)
    seen = values(islice(running, batches))
    twin.load_state_dict(moved(loader.state_dict()))
    assert sorted(seen + values(twin)) == list(range(10))
    assert values(running) is not None and values(twin) == values(loader)


def test_places_at_the_ends() -> None:
    loader = ranks_of(1, 6)[0]

    def rest() -> tuple[int, list[int]]:
        twin = ranks_of(1, 6)[0]
        twin.load_state_dict(moved(loader.state_dict()))
        return twin.state_dict()["epoch"], values(twin)

    epochs = [values(ranks_of(1, 6)[0])]
    assert rest() == (0, epochs[0])
    running = iter(loader)
    assert rest() == (0, epochs[0])  # a pass begins at its first batch
    values(islice(running, 3))
    assert rest() == (0, [])  # the last batch is out, the loop has not ended
    assert next(running, None) is None
    assert rest()[0] == 1 and sorted(rest()[1]) == list(range(6)) and rest()[1] != epochs[0]
    for _ in range(3):
        values(loader)
    assert rest()[0] == 4
    loader.load_state_dict(loader.state_dict())
    assert loader.state_dict()["epoch"] == 4 and len(loader) == 3


def test_set_epoch_after_loading() -> None:
    def loaded() -> DeepSpeedDataLoader:
        twin = ranks_of(1, 8)[0]
        twin.load_state_dict(state)
        return twin

    loader = ranks_of(1, 8)[0]
    values(loader)
    next(loader)
    state = loader.state_dict()
    same, other = loaded(), loaded()
    same.set_epoch(1)
    other.set_epoch(0)
    assert len(values(same)) == 6 and values(other) == values(ranks_of(1, 8)[0])


def test_loading_reaches_passes_that_already_run() -> None:
    source = ranks_of(1)[0]
    first = values([next(source), next(source)])
    state = source.state_dict()
    expected = values(source._stream)
    loader = ranks_of(1)[0]
    running, endless, idle = iter(loader), RepeatingLoader(ranks_of(1)[0]), RepeatingLoader(ranks_of(1)[0])
    values(islice(running, 5))
    loader.load_state_dict(state)
    assert values(running) == expected
    values(islice(endless, 13))
    endless.loader.load_state_dict(state)
    assert values(islice(endless, 8)) == expected
    idle.loader.load_state_dict(state)
    assert values(islice(idle, 8)) == expected
    loader.load_state_dict(state)
    assert values([next(loader)]) == expected[:2]
    assert sorted(first + expected) == list(range(20))


@pytest.mark.parametrize("taken", [0, 3, 10, 11, 24])
def test_repeating_loader_goes_on(taken: int) -> None:
    straight, twin = RepeatingLoader(ranks_of(1)[0]), RepeatingLoader(ranks_of(1)[0])
    values(islice(straight, taken))
    twin.load_state_dict(moved(straight.state_dict()))
    assert values(islice(twin, 25)) == values(islice(straight, 25))
    bare = ranks_of(1)[0]
    bare.load_state_dict(straight.state_dict())
    assert straight.state_dict() == bare.state_dict()


@pytest.mark.parametrize("taken", [0, 2, 5, 7])
def test_repeating_loader_over_a_plain_loader_reads_past(taken: int) -> None:
    def endless() -> RepeatingLoader:
        sampler = DistributedSampler(Numbers(10), num_replicas=1, rank=0)
        return RepeatingLoader(DataLoader(Numbers(10), 2, sampler=sampler))

    straight, twin = endless(), endless()
    values(islice(straight, taken))
    state = moved(straight.state_dict())
    twin.load_state_dict(state)
    assert twin.state_dict() == state
    assert values(islice(twin, 12)) == values(islice(straight, 12))
    with pytest.raises(CheckpointError, match="2 ranks and here are 1"):
        endless().load_state_dict({**state, "world_size": 2, "batches": 1})


def test_repeating_loader_over_a_stateful_loader_asks_it() -> None:
    straight, twin = RepeatingLoader(StatefulSampler(4)), RepeatingLoader(StatefulSampler(4))
    assert [*islice(straight, 7)] == [3, 2, 1, 0, 3, 2, 1]
    twin.load_state_dict(moved(straight.state_dict()))
    assert [*islice(twin, 3)] == [0, 3, 2]


def test_random_orders_are_refused_in_the_middle_only() -> None:
    plain = RepeatingLoader(DataLoader(Numbers(6), 2, shuffle=True))
    RepeatingLoader(plain.loader).load_state_dict(plain.state_dict())
    next(plain)
    with pytest.raises(CheckpointError, match="RandomSampler draws a new order"):
        plain.load_state_dict(plain.state_dict())
    loader = DeepSpeedDataLoader(Numbers(6), 2, data_sampler=RandomSampler(Numbers(6)))
    loader.load_state_dict(loader.state_dict())
    next(loader)
    with pytest.raises(CheckpointError, match="use the loader's own sampler"):
        loader.load_state_dict(loader.state_dict())


@pytest.mark.in_make_test(*(f"{kind}-{row}" for kind in (True, False) for row in ("0-0", "1-0", "3-0", "3-2", "4-0")))
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [0, 1, 3, 4])
@pytest.mark.parametrize("stateful", [True, False])
def test_samplers_of_the_user(workers: int, batches: int, stateful: bool) -> None:
    def own() -> DeepSpeedDataLoader:
        sampler = StatefulSampler(10) if stateful else range(9, -1, -1)
        return DeepSpeedDataLoader(Numbers(10), 3, data_sampler=sampler, num_local_io_workers=workers)

    loader, twin = own(), own()
    running = iter(loader)
    seen = values(islice(running, batches))
    state = moved(loader.state_dict())
    twin.load_state_dict(state)
    assert twin.state_dict() == state
    assert seen + values(twin) == list(range(9, -1, -1))
    assert values(twin) == list(range(9, -1, -1))
    assert len(values(running)) == 10 - len(seen)
    assert loader.state_dict()["epoch"] == 1
    twin.load_state_dict(moved(loader.state_dict()))
    assert values(twin) == list(range(9, -1, -1))


def test_a_distributed_sampler_of_the_user_goes_on_in_its_epoch() -> None:
    def own() -> DeepSpeedDataLoader:
        sampler = DistributedSampler(Numbers(10), num_replicas=1, rank=0, seed=9)
        return DeepSpeedDataLoader(Numbers(10), 2, data_sampler=sampler)

    loader, twin = own(), own()
    values(loader)
    seen = values([next(loader)])
    twin.load_state_dict(loader.state_dict())
    assert twin.sampler.seed == 9 and values(twin) == values(loader._stream)
    assert len(seen) == 2


@pytest.mark.in_make_test(
    *(f"{row}-{kind}" for kind in ("Stream", "StatefulStream") for row in ("0-0", "1-0", "4-0", "4-1", "8-0"))
)
@pytest.mark.parametrize("kind", [Stream, StatefulStream])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batches", [0, 1, 4, 8])
def test_streams_go_on(kind: type[Stream], workers: int, batches: int) -> None:
    loader, twin = (DeepSpeedDataLoader(kind(), 3, num_local_io_workers=workers) for _ in range(2))
    seen = values(islice(iter(loader), batches))
    state = moved(loader.state_dict())
    assert (state["inner"] is not None) == (kind is StatefulStream and workers == 0)
    twin.load_state_dict(state)
    assert twin.state_dict() == state
    assert seen[: 3 * batches] + values(twin) == list(range(20)) if batches < 8 else len(seen) == 20
    assert values(twin) == list(range(20))


def test_reading_past_batches_leaves_the_random_numbers_alone() -> None:
    def draws() -> tuple[Any, ...]:
        return torch.rand(1), random.random(), np.random.random()

    def seeded() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)

    loader, twin = DeepSpeedDataLoader(Stream(), 3), DeepSpeedDataLoader(Stream(), 3)
    seen = values([next(loader) for _ in range(4)])
    twin.load_state_dict(loader.state_dict())
    seeded()
    seen += values([next(loader)])
    expected = draws()
    seeded()
    assert values([next(twin)]) == seen[-3:] and draws() == expected


def test_a_stream_is_told_its_epoch() -> None:
    class Told(Stream):
        def set_epoch(self, epoch: int) -> None:
            self.numbers = range(epoch * 10, epoch * 10 + 2)

    loader = DeepSpeedDataLoader(Told(), 2)
    assert values(loader) + values(loader) == [0, 1, 10, 11]


def started(**options: Any) -> dict[str, Any]:
    """A state in the middle of an epoch, on two ranks."""
    loader = ranks_of(2, **options)[0]
    next(loader)
    return loader.state_dict()


def refuses(target: Any, state: dict[str, Any], words: str) -> None:
    before = target.state_dict()
    with pytest.raises(CheckpointError, match=words):
        target.load_state_dict(state)
    assert target.state_dict() == before


@for_each(
    ("saved", "world", "options", "words"),
    [
        ({"length": 20}, 2, {"length": 21}, r"samples 20 \(here 21\)"),
        ({"data_sampler": range(20)}, 2, {}, "kind 'sampler' .here 'shared'"),
        ({"data_sampler": range(20)}, 3, {"data_sampler": range(20)}, "2 data-parallel ranks; here are 3"),
        ({"data_sampler": StatefulSampler(20)}, 3, {"data_sampler": StatefulSampler(20)}, "resizable = True"),
        ({"data_sampler": range(20)}, 2, {"data_sampler": StatefulSampler(20)}, "holds no state"),
        ({"dataset": Stream()}, 3, {"dataset": Stream()}, "2 data-parallel ranks; here are 3"),
        ({"dataset": Stream()}, 2, {"dataset": Stream(), "batch": 3}, "same batch size"),
        ({"dataset": Stream()}, 2, {"dataset": Stream(), "num_local_io_workers": 1}, "workers 0 .here 1"),
    ],
)
def test_what_cannot_be_exact_is_refused_and_changes_nothing(
    saved: dict[str, Any], world: int, options: dict[str, Any], words: str
) -> None:
    refuses(ranks_of(world, **options)[0], started(**saved), words)


def test_a_state_of_another_kind_or_order_is_refused_and_changes_nothing() -> None:
    refuses(ranks_of(2)[0], {"place": 3}, "lacks batch_size, epoch")
    refuses(RepeatingLoader([1]), started(), "wrap the loader that saved it")
    loader = ranks_of(2)[0]
    loader.sampler.seed = 7
    refuses(loader, started(), r"seed 0 \(here 7\)")


def test_any_loader_may_begin_an_epoch() -> None:
    source = ranks_of(2)[0]
    values(source)
    other = ranks_of(3, 33, 4)[0]
    other.load_state_dict(source.state_dict())
    assert other.state_dict()["epoch"] == 1 and len(values(other)) == 11


def test_a_sampler_or_dataset_may_declare_itself_resizable() -> None:
    class Global(StatefulSampler):
        resizable = True

    target = ranks_of(3, data_sampler=Global(20))[0]
    target.load_state_dict(started(data_sampler=Global(20)))
    assert values(target) == list(range(17, -1, -1))


@pytest.mark.parametrize("workers", [0, 1])
def test_beginning_a_pass_leaves_the_global_random_numbers_alone(workers: int) -> None:
    loader, twin = (DeepSpeedDataLoader(Numbers(10), 2, num_local_io_workers=workers) for _ in range(2))
    before = torch.get_rng_state()
    values(loader)
    next(loader)
    twin.load_state_dict(loader.state_dict())
    values(twin)
    assert torch.equal(torch.get_rng_state(), before)


class Noise(Dataset[int]):
    """Random numbers drawn where the samples are fetched."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 40, ()))


def test_worker_seeds_follow_the_users_seed_epoch_rank_and_survive_in_the_state() -> None:
    def noise(seed: int, rank: int = 0) -> DeepSpeedDataLoader:
        torch.manual_seed(seed)
        return DeepSpeedDataLoader(
            Noise(), 4, num_local_io_workers=1, data_parallel_world_size=2, data_parallel_rank=rank
        )

    first, again = noise(1), noise(1)
    epochs = values(first), values(first)
    assert values(again) == epochs[0]
    assert len({*epochs[0], *epochs[1], *values(noise(2)), *values(noise(1, 1))}) == 16
    resumed = noise(2)
    resumed.load_state_dict(again.state_dict())
    assert values(resumed) == epochs[1]


def test_a_default_device_other_than_the_host_does_no_harm() -> None:
    loader = DeepSpeedDataLoader(Numbers(6), 2, collate_fn=list, num_local_io_workers=1)
    with torch.device("meta"):
        assert sorted(values(loader)) == list(range(6))
