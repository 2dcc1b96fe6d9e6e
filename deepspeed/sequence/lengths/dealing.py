"""Deal sequences of mixed lengths to groups of ranks of different sequence-parallel degree. Pure: no process group.

Attention costs the square of a length, all else its first power, so ranks with equally many tokens take unequal times.
A long sequence goes to a group of several ranks, short ones stay on one rank and exchange nothing (FlexSP, Wang et al.
2025; ByteScale, Ge et al. 2025; Zeppelin, Chen et al. 2025). Equal arguments give equal plans, on every rank.
"""

import bisect
import heapq
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Ranks ``first`` to ``first + degree - 1`` share the sequences ``steps[i]`` (indices) in micro-batch ``i``.

    No micro-batch is empty: where sequences are too few, one is in several, which then share its labels.
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


class _Open:
    """A group while it is filled: ``parts`` are its micro-batches, ``rooms`` the tokens that each can still take."""

    def __init__(self, power: int, tokens: int, steps: int) -> None:
        self.power, self.room, self.seconds = power, tokens << power, 0.0
        self.parts: list[list[int]] = [[] for _ in range(steps)]
        self.rooms, self.times = [self.room] * steps, [0.0] * steps

    def take(self, index: int, length: int, seconds: float) -> None:
        """Add a sequence of at most ``room`` tokens to the micro-batch that takes the least time so far."""
        step = 0
        if len(self.parts) > 1:
            fits = [step for step, room in enumerate(self.rooms) if room >= length]
            step = min(fits, key=self.times.__getitem__)
        self.put(step, index, length, seconds)

    def put(self, step: int, index: int, length: int, seconds: float) -> None:
        """Add a sequence to the micro-batch ``step``."""
        self.parts[step].append(index)
        self.rooms[step] -= length
        self.times[step] += seconds
        self.seconds += seconds
        self.room = max(self.rooms)


@dataclass(frozen=True)
class _Task:
    """What is to be planned. ``table[k][i]``: seconds of sequence ``i`` on ``2**k`` ranks, infinite without memory."""

    lengths: list[int]
    table: Times
    rows: list[list[float]]  # the same
    ascending: list[int]  # places by length
    ranks: int
    tokens: int
    steps: int

    def open(self, power: int) -> _Open:
        """Return an empty group."""
        return _Open(power, self.tokens, self.steps)

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
    ascending = np.argsort(sizes, kind="stable").tolist()
    task = _Task([int(n) for n in lengths], table, table.tolist(), ascending, ranks, tokens_per_rank, steps)
    bound = task.bound()
    best: list[_Open] = []
    seconds = np.inf
    wide = [(factor, power) for power in range(1, len(table)) for factor in _WIDE_TARGETS]
    for factor, power in [*((factor, 0) for factor in _TARGETS), *wide]:
        if seconds <= _GOOD * bound or (power > _WIDEST and best):
            break
        if seconds <= factor * bound:
            continue
        if groups := _plan_for(task, bound * factor, power, seconds):
            best, seconds = groups, max(group.seconds for group in groups)
    if not best:
        raise DoesNotFit(
            f"{len(lengths)} sequences of {sum(task.lengths)} tokens could not be dealt to {ranks} ranks x {steps} "
            f"micro-batches of at most {tokens_per_rank} tokens: give fewer tokens a batch, or raise tokens_per_rank"
        )
    return Plan(_placed(best), bound)


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


def _plan_for(task: _Task, target: float, least: int, limit: float) -> list[_Open]:
    """Return groups for which long sequences have the degree that ``target`` asks for; none where they do not fit, or
    one takes ``limit`` seconds.

    Short ones go to groups of at least ``2**least`` ranks, as far as the ranks divide by it.
    """
    powers = np.maximum(task.powers(target), least)
    times = task.table[powers, np.arange(len(powers))]
    order = np.lexsort((-times, -powers))
    long_count = int((powers > least).sum())
    groups = _deal_long(task, order[:long_count].tolist(), powers.tolist(), target)
    if groups is None or max((group.seconds for group in groups), default=0.0) >= limit:
        return []
    short = order[long_count:].tolist()
    _fill_idle(task, short, groups)
    free = task.ranks - sum(1 << group.power for group in groups)
    for power in range(least, -1, -1):
        groups += [task.open(power) for _ in range(free >> power)]
        free %= 1 << power
    dealt = _deal_short(task, short, groups, limit) and _share(task, groups)
    return groups if dealt and max(group.seconds for group in groups) < limit else []


def _deal_long(task: _Task, order: list[int], powers: list[int], target: float) -> list[_Open] | None:
    """Fill groups one after another up to ``target``; with no rank left for another, the least busy one takes more.

    ``filled[power]`` are pairs of time and place, sorted: the fullest group that still fits is found by bisection.
    """
    groups: list[_Open] = []
    filled: list[list[tuple[float, int]]] = [[] for _ in task.rows]
    free = task.ranks
    for index in order:
        length, power = task.lengths[index], powers[index]
        place = _fullest(task, index, filled[power:], groups, target)
        if place is None and free >= 1 << power:
            place = len(groups)
            groups.append(task.open(power))
            free -= 1 << power
        elif place is None:
            fits = (p for p, group in enumerate(groups) if group.room >= length)
            place = min(fits, key=lambda p: groups[p].seconds, default=None)
            if place is None:
                return None
        group = groups[place]
        entries = filled[group.power]
        if group.seconds:
            del entries[bisect.bisect_left(entries, (group.seconds, place))]
        group.take(index, length, task.rows[group.power][index])
        bisect.insort(entries, (group.seconds, place))
    return groups


def _fullest(
    task: _Task, index: int, filled: list[list[tuple[float, int]]], groups: list[_Open], target: float
) -> int | None:
    """Return the place of the group that sequence ``index`` fills best within ``target``, of the least degree."""
    power, length = len(task.rows) - len(filled), task.lengths[index]
    for entries, row in zip(filled, task.rows[power:], strict=True):
        end = bisect.bisect_right(entries, (target - row[index], len(groups)))
        for at in range(end - 1, -1, -1):
            place = entries[at][1]
            if groups[place].room >= length:
                return place
    return None


def _fill_idle(task: _Task, order: list[int], groups: list[_Open]) -> None:
    """Give the shortest sequences, taken from the end of ``order``, to micro-batches without any."""
    for group in groups:
        while order and not all(group.parts) and group.room >= task.lengths[order[-1]]:
            index = order.pop()
            group.take(index, task.lengths[index], task.rows[group.power][index])


def _deal_short(task: _Task, order: list[int], groups: list[_Open], limit: float) -> bool:
    """Give each sequence, longest first, to the least busy group with room; say whether none takes ``limit`` then."""
    least = task.lengths[task.ascending[0]]
    heap = [(group.seconds, place) for place, group in enumerate(groups)]
    heapq.heapify(heap)
    for index in order:
        length, full = task.lengths[index], []
        while heap and groups[heap[0][1]].room < length:
            entry = heapq.heappop(heap)
            if groups[entry[1]].room >= least:
                full.append(entry)
        if not heap:
            return False
        place = heap[0][1]
        group = groups[place]
        group.take(index, length, task.rows[group.power][index])
        if group.seconds >= limit:
            return False
        heapq.heapreplace(heap, (group.seconds, place))
        for entry in full:
            heapq.heappush(heap, entry)
    return True


def _share(task: _Task, groups: list[_Open]) -> bool:
    """Give micro-batches without sequence one that another has too, the shortest first; say whether all have one."""
    turn = itertools.cycle(task.ascending)
    for group in groups:
        for step in (step for step, part in enumerate(group.parts) if not part):
            index = next(turn)
            if task.lengths[index] > group.rooms[step]:  # the others are longer still, until the shortest
                turn = itertools.cycle(task.ascending)
                index = next(turn)
            if task.lengths[index] > group.rooms[step]:
                return False
            group.put(step, index, task.lengths[index], task.rows[group.power][index])
    return True


def _placed(groups: list[_Open]) -> tuple[Group, ...]:
    """Return the groups with their ranks: the largest first, so every group begins at a multiple of its degree.

    Long micro-batches come first in each group, so that ranks that wait for each other wait less.
    """
    placed: list[Group] = []
    first = 0
    for group in sorted(groups, key=lambda g: -g.power):
        steps = sorted(range(len(group.parts)), key=lambda step: -group.times[step])
        parts = tuple(tuple(group.parts[step]) for step in steps)
        placed.append(Group(first, 1 << group.power, parts, group.seconds))
        first += 1 << group.power
    return tuple(placed)


def draw_lengths(histogram: str, count: int, *, seed: int = 0, longest: int | None = None) -> list[int]:
    """Return ``count`` lengths drawn from a histogram of ``lengths.json``; longer ones are cut to ``longest``."""
    shares = np.array(json.loads((Path(__file__).parent / "lengths.json").read_text())[histogram]["shares"])
    places = np.random.default_rng(seed).random(count)
    lengths = np.exp(np.interp(places, shares[:, 1], np.log(shares[:, 0]))).astype(int)
    kept: list[int] = np.minimum(lengths, longest or lengths.max()).tolist()
    return kept
