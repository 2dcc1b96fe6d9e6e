"""What work takes on a machine: constants from a JSON file, each with its source, and the formulas they go into."""

import functools
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from deepspeed.errors import UsageError
from deepspeed.simulate.events import Work

# Every constant of a machine's file. Seconds, bytes, bytes a second, operations a second; shares of the peak.
CONSTANTS = {
    "device_bytes": "memory of one device that a program can use",
    "host_bytes": "memory of one node's host",
    "gpus_per_node": "devices of one node",
    "flops_bf16": "peak of matrix products in bf16 and fp16",
    "flops_fp32": "peak of matrix products in fp32",
    "matmul_share": "share of the peak that large products reach",
    "matmul_half": "smallest side of a product at which it reaches half of that",
    "attention_share": "share of the bf16 peak that fused attention reaches",
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
    "drive_read_rate": "of one rank's share of the drives, in the same sense",
    "drive_write_rate": "of one rank's share of the drives, in the same sense",
    "agreement_s": "of one exchange of a few bytes between the programs of two ranks of a node",
    "agreement_hop_s": "what it takes longer between nodes",
}

# What the ranks of a node share, each in equal parts.
SHARED = ("host_rate", "adam_rate", "drive_read_rate", "drive_write_rate")
# From the first of two ranks to the second.
MESSAGES = ("send", "recv")
_FLAT = {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Machine:
    """One kind of device with its links and its host; ``values`` has all of CONSTANTS. ``on_host``: the device is the
    host, so that work is done when the program has started it.
    """

    name: str
    values: dict[str, float]
    on_host: bool = False

    def __getitem__(self, constant: str) -> float:
        return self.values[constant]

    def used_by(self, world: int) -> "Machine":
        """This machine as a job of ``world`` ranks finds it: fewer ranks than a node has devices get larger shares of
        its cores, its memory and its drives. Where nodes have more and fewer ranks, the fullest holds up the others.
        """
        times = self["gpus_per_node"] / min(world, self["gpus_per_node"])
        return replace(self, values=self.values | {name: times * self[name] for name in SHARED})

    def seconds(self, work: Work, name: str = "") -> float:
        """Time of one launch on its stream."""
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
        share = self["attention_share"] if work.kind == "attention" else self.product_share(work.shape)
        return max(self["kernel_s"], work.flops / (rate * share), work.nbytes / self["memory_rate"])

    def product_share(self, shape: tuple[int, ...]) -> float:
        """Of the peak, for a product with these sides: it saturates with the smallest one."""
        side = min(shape, default=0)
        return self["matmul_share"] * (side / (side + self["matmul_half"]) if side else 1.0)

    def collective(self, name: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """A ring over ``ranks`` that moves ``nbytes`` in all, or for an all-reduce a tree where that is faster.

        Ring: a piece takes all links but one, each with its latency, and (n - 1)/n of the bytes take the narrowest;
        twice for an all-reduce. Tree: 2 log2(n) steps.
        A message ("send", "recv") takes one link, and all bytes go over it.
        Between nodes the bytes take ``1 + network_crowding log2(nodes / 2)`` times as long as between two: paths of a
        large network meet in its switches.
        """
        size = len(ranks)
        if size < 2:
            return self["kernel_s"]
        members = _members(ranks, int(self["gpus_per_node"]))
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

    def gather(self, ranks: int) -> float:
        """Small objects of all ``ranks`` to all, over gloo: a ring for their sizes, and one for what they are."""
        hop = self["agreement_hop_s"] if ranks > self["gpus_per_node"] else 0.0
        return 2 * (ranks - 1) * (self["agreement_s"] + hop)

    def agreement(self, ranks: int) -> float:
        """One message by which the programs of ``ranks`` ranks agree, ``collectives.merge``: see ``_dissemination``."""
        return _dissemination(ranks, int(self["gpus_per_node"]), self["agreement_s"], self["agreement_hop_s"])


@functools.lru_cache(maxsize=64)
def _dissemination(ranks: int, per_node: int, each_s: float, between_nodes_s: float) -> float:
    """When the last of ``ranks`` programs has heard of all others (Hensgen, Finkel and Manber 1988, "Two algorithms for
    barrier synchronization"). In round k each goes on when it has what the one 2^k before it sent, so
    t(r) <- max(t(r), t(r - 2^k) + between_nodes_s if that is another node's) + each_s, ceil(log2 n) times.
    """
    done = [0.0] * ranks
    for distance in (1 << k for k in range((ranks - 1).bit_length())):
        heard = [
            done[rank - distance] + between_nodes_s * ((rank - distance) % ranks // per_node != rank // per_node)
            for rank in range(ranks)
        ]
        done = [max(mine, theirs) + each_s for mine, theirs in zip(done, heard, strict=True)]
    return max(done)


@functools.lru_cache(maxsize=64)
def _members(ranks: tuple[int, ...], per_node: int) -> Counter[int]:
    """How many of these ranks each node has."""
    return Counter(rank // per_node for rank in ranks)


def machines() -> list[str]:
    """The machines that come with the package."""
    return sorted(path.name[:-5] for path in _folder().iterdir() if path.name.endswith(".json"))


def _folder() -> Any:
    return resources.files("deepspeed.simulate") / "machines"


def load_machine(name: str) -> Machine:
    """The machine of that name, or of that JSON file: {"name": ..., "constants": {constant: [value, source]}}.

    A file may say {"like": "h100"} and give only what differs, and {"device": "cpu"} where the host computes.
    Raises UsageError for anything else.
    """
    try:
        text = (_folder() / f"{name}.json").read_text() if name in machines() else Path(name).read_text()
        document = json.loads(text)
        given = {key: float(value) for key, (value, _) in document["constants"].items()}
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
    return Machine(str(document.get("name", name)), values, on_host)


def _like(name: str, whose: str) -> Machine:
    try:
        return load_machine(name)
    except RecursionError:
        raise UsageError(f"{whose} is like {name}, which is like itself in the end") from None
