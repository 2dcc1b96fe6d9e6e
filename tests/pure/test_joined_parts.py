"""Tensors that are stacked or joined of tensors in files are read from these, and have their values for who asks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed.client.zero.incoming import JoinedParts, TensorOfFile
from deepspeed.zero.layout import Place
from deepspeed.zero.module.mapped import FilePart

EXPERTS, ROWS, COLUMNS = 3, 4, 5
Made = tuple[list[TensorOfFile], list[TensorOfFile]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Two matrices of each expert, one after the other in a file."""
    values = torch.arange(2 * EXPERTS * ROWS * COLUMNS, dtype=torch.float32).view(2 * EXPERTS, ROWS, COLUMNS)
    path = tmp_path / "weights"
    path.write_bytes(values.numpy().tobytes())
    size = ROWS * COLUMNS * 4
    parts = [FilePart(str(path), (), i * size, torch.float32, (ROWS, COLUMNS)) for i in range(2 * EXPERTS)]
    tensors = [TensorOfFile.of(value.clone(), part) for value, part in zip(values, parts, strict=True)]
    return tensors[:EXPERTS], tensors[EXPERTS:]


def plain(tensors: list[TensorOfFile]) -> list[torch.Tensor]:
    return [tensor.as_subclass(torch.Tensor) for tensor in tensors]


def test_any_part_is_read_from_the_files(made: Made) -> None:
    gates, ups = made
    joined = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
    wanted = torch.cat([torch.stack(plain(gates)), torch.stack(plain(ups))], dim=1)
    part = joined._ds_file  # type: ignore[attr-defined]
    assert isinstance(part, JoinedParts) and part.shape == wanted.shape == (EXPERTS, 2 * ROWS, COLUMNS)
    out = torch.empty(7)
    for lo in range(0, wanted.numel() - 7, 3):
        part.read(out, lo)
        assert torch.equal(out, wanted.flatten()[lo : lo + 7])
    boxes = (((1, 2, 0), (2, 4, COLUMNS)), ((0, 0, 1), (1, 8, 2)))
    place = Place(boxes, (56,), tuple(wanted.shape))
    cut = torch.cat([wanted[1:3, 2:6].flatten(), wanted[:1, :, 1:3].flatten()])
    for lo in range(0, 49, 4):
        part.read(out, lo, place)
        assert torch.equal(out, cut[lo : lo + 7])


ASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sum": lambda t: t + 0,
    "a view": lambda t: t.view(-1).clone(),
    "its data": lambda t: t.data.clone(),
    "numpy": lambda t: torch.from_numpy(t.numpy()).clone(),
    "a list": lambda t: torch.cat([t, torch.zeros(1, ROWS, COLUMNS)])[:-1],
    "a copy": lambda t: torch.empty(t.shape).copy_(t),
    "another type": lambda t: t.to(torch.float64).float(),
    "a slice": lambda t: torch.stack([t[0], t[1], t[2]]),
}


@pytest.mark.parametrize("how", ASKS)
def test_who_asks_for_values_gets_them(made: Made, how: str) -> None:
    wanted = torch.stack(plain(made[0]))
    found = ASKS[how](torch.stack(made[0]))  # type: ignore[arg-type]
    assert torch.equal(found.as_subclass(torch.Tensor).flatten(), wanted.flatten())


def test_what_was_written_to_is_of_no_file(made: Made) -> None:
    gates, _ = made
    stacked = torch.stack(gates)
    stacked.mul_(2)  # type: ignore[attr-defined]
    assert not stacked.unchanged and torch.equal(stacked + 0, torch.stack(plain(gates)) * 2)  # type: ignore[attr-defined]
    gates[1].add_(1)
    assert not isinstance(torch.stack(gates), TensorOfFile)  # type: ignore[arg-type]
    assert not isinstance(torch.stack(made[1], dim=1), TensorOfFile)  # type: ignore[arg-type]
