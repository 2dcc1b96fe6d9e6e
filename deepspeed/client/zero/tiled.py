"""A linear layer in tiles, each a module of its own: sharded, they are gathered and released one after another."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from deepspeed.client.zero.gathered import GatheredParameters
from deepspeed.errors import UsageError
from deepspeed.pipe.partition import partition_uniform


class TiledLinear(nn.Module):
    """Linear layer as ``in_splits`` x ``out_splits`` layers of ``linear_cls`` over slices of the features.

    x: (..., in_features), or with ``input_is_already_split`` its slices along the last dim -> (..., out_features), or
    without ``combine_out_splits`` a list of slices. ``init_linear``: a layer whose values are taken over. Further
    keywords go to ``linear_cls``. UsageError (a RuntimeError) for splits outside 1 .. features.
    """

    repeats_blocks = True  # for ZeRO, also inside a block: each tile is a unit

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for side, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise UsageError(f"{type(self).__name__}: {side}_splits is {splits}, but has to be 1 to {features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self._columns = list(pairwise(partition_uniform(in_features, in_splits)))
        self._rows = list(pairwise(partition_uniform(out_features, out_splits)))
        self.linears = nn.ModuleList(  # row by row; the bias is the last tile's of each
            linear_cls(stop - start, bottom - top, bias=bias and stop == in_features, **kwargs)
            for top, bottom in self._rows
            for start, stop in self._columns
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, x: Any) -> Any:
        """Compute the layer; shapes as in the class."""
        outputs = [self._sum(row) for row in self._by_rows(x)]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def _by_rows(self, x: Any) -> Iterator[list[Any]]:
        """Yield the outputs of the tiles of each row."""
        sizes = [stop - start for start, stop in self._columns]
        slices = list(x if self.input_is_already_split else x.split(sizes, dim=-1))
        if len(slices) != self.in_splits:
            raise UsageError(f"{type(self).__name__} with {self.in_splits} in_splits got {len(slices)} slices")
        tiles = iter(self.linears)
        for _ in range(self.out_splits):
            yield [next(tiles)(part) for part in slices]

    @staticmethod
    def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum(parts[1:], start=parts[0])

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the values of ``other``, a layer of the same features. Collective where either is sharded."""
        weight: Any = other.weight
        if tuple(weight.shape) != (self.out_features, self.in_features):
            wanted = f"({self.out_features}, {self.in_features})"
            raise UsageError(f"copy_params_from: the weight has shape {tuple(weight.shape)}, and {wanted} is needed")
        with GatheredParameters([*other.parameters(), *self.parameters()], modifier_rank=0):
            places = [(rows, columns) for rows in self._rows for columns in self._columns]
            tiles: Any = self.linears
            for tile, ((top, bottom), (start, stop)) in zip(tiles, places, strict=True):
                tile.weight.copy_(weight[top:bottom, start:stop])
                if tile.bias is not None:
                    tile.bias.copy_(other.bias[top:bottom])  # type: ignore[index]


class TiledLinearReturnBias(TiledLinear):
    """Tiled linear layer over layers that return (output without bias, bias); returns such a pair, too."""

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Return (output, bias); the bias is None where the layers have none, and slices where the output is."""
        rows = list(self._by_rows(x))
        outputs: Any = [self._sum([output for output, _ in row]) for row in rows]
        biases: Any = [row[-1][1] for row in rows] if self.use_bias else None
        if not self.combine_out_splits:
            return outputs, biases
        return torch.cat(outputs, dim=-1), None if biases is None else torch.cat(biases)
