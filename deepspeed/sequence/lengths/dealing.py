"""Deal sequences of mixed lengths to groups of ranks of different sequence-parallel degree. Pure: no process group.

Attention costs the square of a length, all else its first power, so ranks with equally many tokens take unequal times.
A long sequence goes to a group of several ranks, short ones stay on one rank and exchange nothing (FlexSP, Wang et al.
2025; ByteScale, Ge et al. 2025; Zeppelin, Chen et al. 2025). Equal arguments give equal plans, on every rank.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepspeed.errors import DeepSpeedConfigError

Times = NDArray[np.float64]
# Targets that are tried, in multiples of the lower bound; then with groups of several ranks for short sequences too, as
# memory may ask for. A plan this near to the bound ends the search.
_TARGETS = (1.0, 1.03, 1.1, 1.25, 1.6, 2.5, 8.0)
_WIDE_TARGETS = (1.0, 1.1)
_WIDEST = 3
_GOOD = 1.02


class DoesNotFit(DeepSpeedConfigError):
    """Sequences, each of which fits, were too many tokens together."""


@dataclass(frozen=True)
class CostModel:
    """Seconds of training on one token, forward and backward.

    ``attention`` is per token and token before it, ``linear`` per token. ``exchange_bytes`` are what the all-to-alls of
    a token carry; the bandwidths, in bytes/s of one rank, hold inside a node of ``node_ranks`` ranks and beyond.
    """

    attention: float
    linear: float
    exchange_bytes: float = 0.0
    node_ranks: int = 8
    node_bandwidth: float = 300e9
    net_bandwidth: float = 40e9

    @classmethod
    def of_transformer(
        cls, *, parameters: float, layers: int, hidden: int, kv_hidden: int, flops: float = 400e12, value_bytes: int = 2
    ) -> "CostModel":
        """Derive the costs of a causal transformer at ``flops`` operations/s; the links keep their defaults."""
        # Queries and outputs are ``hidden`` wide, keys and values ``kv_hidden``; the backward exchanges them once more.
        exchanged = 2 * layers * value_bytes * 2 * (hidden + kv_hidden)
        return cls(6 * hidden * layers / flops, 6 * parameters / flops, exchanged)

    def seconds(self, lengths: Times, degree: int) -> Times:
        """Return the time of each length on a group of ``degree`` ranks, all of which work that long."""
        inside = min(degree, self.node_ranks) - 1
        beyond = degree - 1 - inside
        links = inside / self.node_bandwidth + beyond / self.net_bandwidth
        exchange = self.exchange_bytes / degree * links
        return (self.attention * lengths**2 + (self.linear + exchange) * lengths) / degree


@dataclass(frozen=True)
class Group:
    """Ranks ``first`` to ``first + degree - 1`` share the sequences ``steps[i]`` (indices) in micro-batch ``i``, which
    is empty where there are too few of them.
    """

    first: int
    degree: int
    steps: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Groups by their first rank, which together are all ranks, and the least time that any plan could take."""

    groups: tuple[Group, ...]
    bound: float

    @property
    def seconds(self) -> float:
        """Return the time of the rank that works longest."""
        return max(group.seconds for group in self.groups)

    def group_of(self, rank: int) -> Group:
        """Return the group of ``rank``."""
        return next(g for g in self.groups if g.first <= rank < g.first + g.degree)


@dataclass(frozen=True)
class _Task:
    """What is to be planned. ``table[k][i]``: seconds of sequence ``i`` on ``2**k`` ranks, infinite without memory."""

    lengths: list[int]
    table: Times
    ranks: int
    tokens: int
    steps: int

    def powers(self, target: float) -> NDArray[np.int64]:
        """Return for each sequence the least degree, as a power of 2, that meets ``target`` or else is fastest."""
        meets = self.table <= target
        return np.where(meets.any(axis=0), meets.argmax(axis=0), self.table.argmin(axis=0))

    def work(self, target: float) -> float:
        """Return the least rank-seconds of all sequences when none may take longer than ``target``."""
        powers = self.powers(target)
        times = self.table[powers, np.arange(len(self.lengths))] * 2.0**powers
        return math.fsum(times.tolist())  # exact: ranks on unequal processors take the same decisions

    def bound(self) -> float:
        """Return the least time of any plan: sequences meet it one by one, and all ranks together have it."""
        low = float(self.table.min(axis=0).max())
        if self.work(low) <= self.ranks * low:
            return low
        high = self.work(low) / self.ranks
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.work(middle) <= self.ranks * middle else (middle, high)
        return high


@dataclass
class _MicroBatch:
    """Sequences of one micro-batch of a group, and the tokens that it can still take."""

    room: int
    seconds: float = 0.0
    indices: list[int] = field(default_factory=list)


class _Groups:
    """Groups while they are filled. Of each: its degree as a power of 2, its time, and the most tokens that one of its
    micro-batches can still take; there may be as many groups as ranks, and one that is not open takes none.
    """

    def __init__(self, task: _Task) -> None:
        self._task, self.free = task, task.ranks
        self.powers = np.zeros(task.ranks, dtype=np.int64)
        self.seconds = np.zeros(task.ranks)
        self.rooms = np.full(task.ranks, -1)
        self.steps: list[list[_MicroBatch]] = []

    def open(self, power: int) -> int:
        """Let ``2**power`` of the free ranks be one more group; return its place."""
        place, room = len(self.steps), self._task.tokens << power
        self.powers[place], self.rooms[place] = power, room
        self.steps.append([_MicroBatch(room) for _ in range(self._task.steps)])
        self.free -= 1 << power
        return place

    def fullest(self, index: int, power: int, target: float) -> int | None:
        """Return the group that sequence ``index`` fills best within ``target``, of the least degree from ``power``."""
        after = self.seconds + self._task.table[self.powers, index]
        fits = (self.powers >= power) & (self.rooms >= self._task.lengths[index]) & (after <= target)
        if not fits.any():
            return None
        fits &= self.powers == self.powers[fits].min()
        return int(np.where(fits, self.seconds, -1.0).argmax())

    def least_busy(self, index: int) -> int | None:
        """Return the group with room for sequence ``index`` that has the least to do."""
        length, rooms, seconds = self._task.lengths[index], self.rooms[: len(self.steps)], self.seconds
        place = int(seconds[: len(rooms)].argmin())
        if rooms[place] < length:  # seldom: the mask of all groups takes longest
            place = int(np.where(rooms >= length, seconds[: len(rooms)], np.inf).argmin())
        return place if rooms[place] >= length else None

    def take(self, place: int, index: int) -> None:
        """Add a sequence that fits to the micro-batch of the group that takes the least time so far."""
        steps, length = self.steps[place], self._task.lengths[index]
        seconds = float(self._task.table[self.powers[place], index])
        step = min((step for step in steps if step.room >= length), key=lambda step: step.seconds)
        step.indices.append(index)
        step.room -= length
        step.seconds += seconds
        self.seconds[place] += seconds
        self.rooms[place] = max(step.room for step in steps)

    def placed(self) -> tuple[Group, ...]:
        """Return the groups with their ranks: the largest first, so every group begins at a multiple of its degree.

        Long micro-batches come first in each group, so that ranks that wait for each other wait less.
        """
        placed: list[Group] = []
        first = 0
        for place in sorted(range(len(self.steps)), key=lambda place: -self.powers[place]):
            steps = sorted(self.steps[place], key=lambda step: -step.seconds)
            degree = 1 << int(self.powers[place])
            placed.append(Group(first, degree, tuple(tuple(s.indices) for s in steps), float(self.seconds[place])))
            first += degree
        return tuple(placed)


def plan_batch(
    lengths: Sequence[int],
    ranks: int,
    tokens_per_rank: int,
    *,
    cost: CostModel,
    max_degree: int | None = None,
    steps: int = 1,
) -> Plan:
    """Deal sequences so that the longest rank's time is short; every rank has ``steps`` micro-batches.

    A micro-batch has at most ``tokens_per_rank`` tokens on a rank. Degrees are powers of 2 up to ``max_degree``
    (default: all ranks). Raises DoesNotFit where no plan was found, DeepSpeedConfigError for a sequence that no group
    could take.
    """
    limit = ranks if max_degree is None else min(max_degree, ranks)
    _check(lengths, ranks, tokens_per_rank, limit, steps)
    sizes = np.asarray(lengths, dtype=np.float64)
    table = np.stack([cost.seconds(sizes, 1 << power) for power in range(limit.bit_length())])
    table[sizes > np.left_shift(tokens_per_rank, np.arange(len(table)))[:, None]] = np.inf
    task = _Task([int(n) for n in lengths], table, ranks, tokens_per_rank, steps)
    bound = task.bound()
    best: _Groups | None = None
    seconds = np.inf
    wide = [(factor, power) for power in range(1, len(table)) for factor in _WIDE_TARGETS]
    for factor, power in [*((factor, 0) for factor in _TARGETS), *wide]:
        if seconds <= _GOOD * bound or (power > _WIDEST and best):
            break
        if seconds <= factor * bound:
            continue
        if groups := _plan_for(task, bound * factor, power, seconds):
            best, seconds = groups, float(groups.seconds.max())
    if best is None:
        raise DoesNotFit(
            f"{len(lengths)} sequences of {sum(task.lengths)} tokens could not be dealt to {ranks} ranks x {steps} "
            f"micro-batches of at most {tokens_per_rank} tokens: give fewer tokens a batch, or raise tokens_per_rank"
        )
    return Plan(best.placed(), bound)


def _check(lengths: Sequence[int], ranks: int, tokens: int, limit: int, steps: int) -> None:
    if min(ranks, tokens, limit, steps) < 1 or not len(lengths) or min(lengths) < 1:
        raise DeepSpeedConfigError(
            f"a plan needs ranks ({ranks}), tokens_per_rank ({tokens}), max_degree ({limit}), steps ({steps}), "
            f"sequences ({len(lengths)}) and their lengths (shortest: {min(lengths, default=0)}) of at least 1"
        )
    degree = 1 << (limit.bit_length() - 1)
    if max(lengths) > degree * tokens:
        raise DeepSpeedConfigError(
            f"a sequence of {max(lengths)} tokens does not fit {degree} ranks (the largest power of 2 within "
            f"max_degree and the ranks) of {tokens} tokens: cut it, or raise tokens_per_rank or max_degree"
        )


def _plan_for(task: _Task, target: float, least: int, limit: float) -> _Groups | None:
    """Return groups for which long sequences have the degree that ``target`` asks for; None where they do not fit, or
    one takes ``limit`` seconds.

    Short ones go to groups of at least ``2**least`` ranks, as far as the ranks divide by it.
    """
    powers = np.maximum(task.powers(target), least)
    times = task.table[powers, np.arange(len(powers))]
    order = np.lexsort((-times, -powers)).tolist()
    long_count = int((powers > least).sum())
    groups = _Groups(task)
    for index in order[:long_count]:  # one group after another is filled up to the target, while ranks are left
        power = int(powers[index])
        place = groups.fullest(index, power, target)
        if place is None:
            place = groups.open(power) if groups.free >= 1 << power else groups.least_busy(index)
        if place is None:
            return None
        groups.take(place, index)
    if groups.seconds.max() >= limit:
        return None
    for power in range(least, -1, -1):
        while groups.free >= 1 << power:
            groups.open(power)
    for index in order[long_count:]:  # longest first
        place = groups.least_busy(index)
        if place is None:
            return None
        groups.take(place, index)
        if groups.seconds[place] >= limit:
            return None
    return groups


def draw_lengths(histogram: str, count: int, *, seed: int = 0, longest: int | None = None) -> list[int]:
    """Return ``count`` lengths drawn from a histogram of ``lengths.json``; longer ones are cut to ``longest``."""
    shares = np.array(json.loads((Path(__file__).parent / "lengths.json").read_text())[histogram]["shares"])
    places = np.random.default_rng(seed).random(count)
    lengths = np.exp(np.interp(places, shares[:, 1], np.log(shares[:, 0]))).astype(int)
    kept: list[int] = np.minimum(lengths, longest or lengths.max()).tolist()
    return kept
