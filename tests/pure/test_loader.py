"""Loaders: every rank its share, a new shuffle each epoch, and no end for the repeating one."""

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from deepspeed.accelerator.device import move_to_device
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.client.attrs import recursive_getattr, recursive_setattr
from deepspeed.client.data_loader import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.errors import DeepSpeedConfigError

DATA = TensorDataset(torch.arange(10))


def _values(loader: DeepSpeedDataLoader) -> list[int]:
    return [int(value) for (batch,) in loader for value in batch]


def _loader(rank: int = 0, world: int = 2, **kwargs: object) -> DeepSpeedDataLoader:
    return DeepSpeedDataLoader(
        DATA, 2, False, 0, None, data_parallel_world_size=world, data_parallel_rank=rank, **kwargs
    )


def test_ranks_share_the_data_and_epochs_differ() -> None:
    left, right = _loader(0), _loader(1)
    first = _values(left), _values(right)
    assert sorted(first[0] + first[1]) == list(range(10))
    assert (_values(left), _values(right)) != first
    left.set_epoch(0)
    assert _values(left) == first[0]


def test_length_and_drop_last() -> None:
    assert len(_loader()) == 3 and len(_loader(dataloader_drop_last=True)) == 2
    assert len(list(_loader(dataloader_drop_last=True))) == 2


def test_collate_function_and_own_sampler() -> None:
    loader = _loader(collate_fn=lambda samples: [int(x) for (x,) in samples], data_sampler=range(3))
    assert list(loader) == [[0, 1], [2]]


def test_iterable_dataset_splits_itself() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    assert [batch.tolist() for batch in DeepSpeedDataLoader(Stream(), 2)] == [[0, 1], [2, 3]]


def test_timer_starts_with_each_batch_and_next_works() -> None:
    starts: list[int] = []
    loader = DeepSpeedDataLoader(DATA, 5, False, 0, SimpleNamespace(start=lambda: starts.append(1)))
    next(loader)
    next(loader)
    assert len(starts) == 2
    with pytest.raises(StopIteration):
        next(loader)
    next(loader)


def test_repeating_loader_reshuffles() -> None:
    endless = RepeatingLoader(_loader(world=1))
    rounds = [[int(value) for _ in range(5) for value in next(endless)[0]] for _ in range(3)]
    assert all(sorted(values) == list(range(10)) for values in rounds)
    assert rounds[0] != rounds[1] and len(endless) == 5


def test_bad_input() -> None:
    with pytest.raises(DeepSpeedConfigError, match="no batch"):
        next(RepeatingLoader(DataLoader(TensorDataset(torch.zeros(1)), batch_size=2, drop_last=True)))
    with pytest.raises(DeepSpeedConfigError, match="batch_size is 0"):
        DeepSpeedDataLoader(DATA, 0)


def test_move_keeps_containers() -> None:
    Pair = namedtuple("Pair", "x y")
    item = {"a": [torch.ones(1), 3], "b": Pair(torch.ones(2), "text"), "c": OrderedDict(z=torch.ones(3))}
    moved = move_to_device(item, "meta")
    assert moved["a"][0].is_meta and moved["a"][1] == 3
    assert isinstance(moved["b"], Pair) and moved["b"].x.is_meta and moved["b"].y == "text"
    assert isinstance(moved["c"], OrderedDict) and moved["c"]["z"].is_meta
    assert not item["c"]["z"].is_meta
    assert not move_to_device(item, "meta", lambda tensor: tensor.numel() > 1)["a"][0].is_meta


def test_clone_for_saving_drops_the_large_storage() -> None:
    flat = torch.arange(100.0, requires_grad=True)
    copy = clone_tensors_for_torch_save({"w": flat[10:20].view(2, 5), "n": 1})
    assert copy["w"].tolist() == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]] and copy["n"] == 1
    assert copy["w"].untyped_storage().nbytes() == 40 and not copy["w"].requires_grad
    whole = torch.ones(3)
    twin = clone_tensors_for_torch_save([whole])[0]
    twin.zero_()
    assert whole.tolist() == [1.0] * 3


def test_attribute_paths() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert recursive_getattr(model, "0.weight") is model[0].weight
    recursive_setattr(model, "0.bias", None)
    assert model[0].bias is None
    with pytest.raises(AttributeError):
        recursive_getattr(model, "0.missing.deep")
