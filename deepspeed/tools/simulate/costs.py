"""What work takes on a machine: constants from a JSON file, each with its source, and the formulas they go into."""

import functools
import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from deepspeed.errors import UsageError
from deepspeed.tools.simulate.events import Work

# Every constant of a machine's file. Seconds, bytes, bytes a second, operations a second; shares of the peak.
CONSTANTS = {
    "device_bytes": "memory of one device that a program can use",
    "host_bytes": "memory of one node's host",
    "gpus_per_node": "devices of one node",
    "flops_bf16": "peak of matrix products in bf16 and fp16",
    "flops_fp32": "peak of matrix products in fp32",
    "matmul_share": "share of the peak that large products reach",
    "matmul_half": "depth of a product at which it reaches half of that",
    "processors": "of the device, each of which computes a tile of a product at a time",
    "attention_share": "share of the bf16 peak that fused attention reaches over long sequences",
    "attention_half": "length of a sequence at which it reaches half of that",
    "contention": "of the rate of kernels, what a collective takes that runs beside them",
    "memory_rate": "of the device's memory, as a kernel sees it",
    "kernel_s": "shortest time of a kernel",
    "launch_s": "of the program for one launch",
    "wait_s": "of the program to notice that the device is done",
    "node_rate": "of a collective inside a node: bytes that each device sends",
    "node_hop_s": "of one step of a ring inside a node",
    "network_rate": "of one device's share of the network between nodes",
    "network_crowding": "what each doubling of the nodes, from two on, adds to the network's time, as a share",
    "network_hop_s": "of one step of a ring that crosses nodes",
    "bus_rate": "of a copy between pinned host memory and the device",
    "pageable_rate": "of a copy between ordinary host memory and the device",
    "copy_s": "of any such copy",
    "host_rate": "of host memory, as one rank's share where every device of the node has a rank",
    "adam_rate": "of the host's optimizer, in bytes read and written, as one rank's share in the same sense",
    "adam_rank_rate": "of the host's optimizer, at most, by the cores that one rank is bound to",
    "drive_read_rate": "of one rank's share of the drives, in the same sense",
    "drive_write_rate": "of one rank's share of the drives, in the same sense",
    "agreement_s": "of one exchange of a few bytes between the programs of two ranks of a node",
    "agreement_hop_s": "what it takes longer between nodes",
}

# What the ranks of a node share, each in equal parts.
SHARED = ("host_rate", "adam_rate", "drive_read_rate", "drive_write_rate")
# Tiles of a product: height, width, and what of the largest one's rate they reach.
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
# From the first of two ranks to the second.
MESSAGES = ("send", "recv")
ALL_TO_ALL = "all_to_all"
_FLAT = {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Machine:
    """Device kind with its links and its host; ``values`` has all of CONSTANTS. ``on_host``: the device is the host, so
    that work is done when the program has started it. ``assumed``: constants that nobody has measured; ``used``:
    constants that a time has been taken from.
    """

    name: str
    values: dict[str, float]
    on_host: bool = False
    assumed: frozenset[str] = frozenset()
    used: set[str] = field(default_factory=set, compare=False)

    def __getitem__(self, constant: str) -> float:
        self.used.add(constant)
        return self.values[constant]

    def used_by(self, world: int) -> "Machine":
        """Return this machine as a job of ``world`` ranks finds it: fewer ranks than a node's devices get larger shares
        of its cores, memory and drives. Where nodes have more and fewer ranks, the fullest holds up the others.
        """
        times = self["gpus_per_node"] / min(world, self["gpus_per_node"])
        shares = {name: times * self.values[name] for name in SHARED}
        shares["adam_rate"] = min(shares["adam_rate"], max(self.values["adam_rank_rate"], self.values["adam_rate"]))
        return replace(self, values=self.values | shares)

    def seconds(self, work: Work, name: str = "") -> float:
        """Return the seconds of one launch on its stream."""
        match work.kind:
            case "collective":
                return self.collective(name, work.nbytes, work.ranks)
            case "up" | "down":
                return self["copy_s"] + work.nbytes / self["bus_rate" if work.pinned else "pageable_rate"]
            case "host":
                return work.nbytes / self["host_rate"]
            case "adam":
                return work.nbytes / self["adam_rate"]
            case "read" | "write":
                return work.nbytes / self[f"drive_{work.kind}_rate"]
        rate = self["flops_fp32"] if work.dtype in ("fp32", "fp64") else self["flops_bf16"]
        if work.kind == "attention":
            share = self["attention_share"] * work.shape[1] / (work.shape[1] + self["attention_half"])
        else:
            share = self.product_share(work)
        return max(self["kernel_s"], work.flops / (rate * share), work.nbytes / self["memory_rate"])

    def product_share(self, work: Work) -> float:
        """Return the share of the peak. The result is cut into tiles, of which each processor computes one at a time:
        in the last wave some have none, and tiles reach over the edge. A library takes the best tile size; smaller
        tiles load more per operation. A tile begins with what takes as long as ``matmul_half`` of its depth.
        """
        rows, depth, columns = work.shape or (0, 0, 0)
        if not rows * depth * columns:
            return self["matmul_share"]
        numel, processors = work.flops / (2 * depth), self["processors"]

        def filled(high: int, wide: int) -> float:
            tiles = numel / (rows * columns) * math.ceil(rows / high) * math.ceil(columns / wide)
            return numel / (high * wide * processors * math.ceil(tiles / processors))

        best = max(rate * max(filled(high, wide), filled(wide, high)) for high, wide, rate in _TILES)
        return self["matmul_share"] * best * depth / (depth + self["matmul_half"])

    def collective(self, name: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """Return seconds of a ring over ``ranks`` that moves ``nbytes`` in all; an all-reduce takes a tree if faster.

        Ring: a piece takes all links but one, each with its latency, and (n - 1)/n of the bytes take the narrowest;
        twice for an all-reduce. Tree: 2 log2(n) steps.
        A message ("send", "recv") takes one link, and all bytes go over it; of an all-to-all ``nbytes`` are those that
        this rank sends, or receives if these are more.
        Between nodes the bytes take ``1 + network_crowding log2(nodes / 2)`` times as long as between two: paths of a
        large network meet in its switches.
        """
        size = len(ranks)
        if size < 2:
            return self["kernel_s"]
        members = _members(ranks, int(self["gpus_per_node"]))
        if name == ALL_TO_ALL:
            return self._all_to_all(nbytes, size, members)
        hop, rate = self["node_hop_s"], self["node_rate"]
        latency = (size - 1) * hop
        if name in MESSAGES:
            far = len(members) > 1
            hop, rate = (self["network_hop_s"], min(rate, self["network_rate"])) if far else (hop, rate)
            return self["kernel_s"] + hop + nbytes / rate
        if len(members) > 1:
            # all bytes pass through every node: the one with the fewest ranks, and their ways out, is the narrowest
            crowd = 1 + self["network_crowding"] * math.log2(len(members) / 2)
            hop, rate = self["network_hop_s"], min(rate, self["network_rate"] * min(members.values()) / crowd)
            latency = (size - len(members)) * self["node_hop_s"] + (len(members) - 1) * hop
        ring = _FLAT.get(name, 1) * (latency + nbytes * (size - 1) / size / rate)
        tree = 2 * math.ceil(math.log2(size)) * hop + 2 * nbytes / rate
        return self["kernel_s"] + (min(ring, tree) if name == "all_reduce" else ring)

    def _all_to_all(self, nbytes: int, size: int, members: Counter[int]) -> float:
        """Return seconds until each of ``size`` ranks has sent its equal parts of ``nbytes`` to all others: what leaves
        the node takes each device's own way to the network, beside what stays. Latencies are a ring's.
        """
        most, nodes = max(members.values()), len(members)
        inside = nbytes * (most - 1) / size / self["node_rate"]
        latency = (size - nodes) * self["node_hop_s"]
        outside = 0.0
        if nodes > 1:
            crowd = 1 + self["network_crowding"] * math.log2(nodes / 2)
            outside = nbytes * (size - min(members.values())) / size / (self["network_rate"] / crowd)
            latency += (nodes - 1) * self["network_hop_s"]
        return self["kernel_s"] + latency + max(inside, outside)

    def gather(self, ranks: int) -> float:
        """Return seconds to gather small objects of all ``ranks`` over gloo: a ring for sizes, and one for contents."""
        hop = self["agreement_hop_s"] if ranks > self["gpus_per_node"] else 0.0
        return 2 * (ranks - 1) * (self["agreement_s"] + hop)

    def agreement(self, ranks: int) -> float:
        """Return seconds of a message by which ``ranks`` programs agree, ``collectives.merge``: the last has heard of
        all after ceil(log2 n) rounds (Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization").
        In round k each goes on when it has what the one 2^k before it sent, which is another node's once on the way
        through a node and in every round that is longer than a node.
        """
        rounds, inside = (ranks - 1).bit_length(), (int(self["gpus_per_node"]) - 1).bit_length()
        crossings = rounds - inside + 1 if ranks > self["gpus_per_node"] else 0
        return rounds * self["agreement_s"] + crossings * self["agreement_hop_s"]


@functools.lru_cache(maxsize=64)
def _members(ranks: tuple[int, ...], per_node: int) -> Counter[int]:
    """Return how many of these ranks each node has."""
    return Counter(rank // per_node for rank in ranks)


def machines() -> list[str]:
    """Return the names of the machines that come with the package."""
    return sorted(path.name[:-5] for path in _folder().iterdir() if path.name.endswith(".json"))


def _folder() -> Any:
    return resources.files("deepspeed.tools.simulate") / "machines"


def load_machine(name: str) -> Machine:
    """Load the machine of that name, or JSON file: {"name": ..., "constants": {constant: [value, source]}}.

    A file may say {"like": "h100"} and give only what differs, and {"device": "cpu"} where the host computes. Raises
    UsageError for anything else.
    """
    try:
        text = (_folder() / f"{name}.json").read_text() if name in machines() else Path(name).read_text()
        document = json.loads(text)
        given = {key: float(value) for key, (value, _) in document["constants"].items()}
        assumed = {key for key, (_, source) in document["constants"].items() if source.startswith("assumed")}
    except OSError as error:
        raise UsageError(f"no machine {name!r}: there are {', '.join(machines())}, or a file ({error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{name} is no machine: wanted {{'name': ..., 'constants': {{constant: [value, source]}}}} ({error!r})"
        ) from error
    like = _like(str(document["like"]), name) if "like" in document else Machine("", {})
    values = like.values | given
    if problems := [
        *(f"{key!r} is no constant" for key in given if key not in CONSTANTS),
        *(f"{key!r} is missing ({text})" for key, text in CONSTANTS.items() if key not in values),
        *(
            f"{key!r} must be a positive number, not {value}"
            for key, value in given.items()
            if not 0 < value < math.inf
        ),
    ]:
        raise UsageError(f"{name}: {'; '.join(problems)}")
    if values["gpus_per_node"] % 1:
        raise UsageError(f"{name}: 'gpus_per_node' must be a whole number, not {values['gpus_per_node']}")
    on_host = document["device"] == "cpu" if "device" in document else like.on_host
    name, assumed = str(document.get("name", name)), assumed | (like.assumed - set(given))
    return Machine(name, values, on_host, frozenset(assumed))


def _like(name: str, derived: str) -> Machine:
    try:
        return load_machine(name)
    except RecursionError:
        raise UsageError(f"{derived} is like {name}, which is like itself in the end") from None
