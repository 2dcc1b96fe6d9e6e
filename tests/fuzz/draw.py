"""Cases: what to train, how, and what happens meanwhile. A case follows from a seed and a number of ranks alone."""

import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

CPU = {"device": "cpu"}
LAYERS = (
    *("plain", "plain", "odd", "scalars", "twice", "shared", "square", "square", "functional", "spare", "frozen"),
    *("half_frozen", "branch", "experts", "recomputed", "reentrant", "normed", "dropped", "direct", "buffered"),
    *("target", "strided", "adapter", "clamped"),
)
OPTIMIZERS = ("AdamW", "AdamW", "adam_l2", "torch_adam", "SGD", "Adagrad", "Lion", "Lamb", "RMSprop")
CLIENT = ("client AdamW", "client SGD", "client Adagrad", "client UserElementwise", "client UserWholeTensor")
# What may happen between two updates, before a micro-batch, and between its backward and the call of step.
BETWEEN = (
    *("save", "load", "reload", "reopen", "rebirth", "edit", "edit", "read", "masters", "set_master", "set_slot"),
    *("set_local", "freeze", "freeze", "eval", "no_grad", "generate", "unsharded", "stream", "lr", "state"),
    *("state_dict", "offload", "zero_grad", "fail_forward", "fail_backward", "empty_cache", "load_module"),
)
BEFORE = (
    *("edit", "read", "masters", "eval", "no_grad", "generate", "unsharded", "stream", "lr", "freeze", "state"),
    *("fail_forward", "fail_backward", "zero_grad", "empty_cache", "set_master"),
)
AFTER = ("hand", "hand", "see_grad", "set_grad", "set_grad_local", "read", "eval", "state", "no_grad", "lr")
OF_PIPES = ("save", "load", "reload", "edit", "read", "masters", "set_master", "set_slot", "set_local", "lr", "state")
HOWS = (*("engine",) * 12, *("plain", "twice", "no_sync", "module", "parts") * 3, "overflow")


@dataclass(frozen=True)
class Event:
    """``pick`` says which parameter, number or place."""

    name: str
    pick: int = 0


@dataclass(frozen=True)
class Micro:
    how: str = "engine"
    before: tuple[Event, ...] = ()
    after: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Window:
    """The micro-batches of one update, and what comes behind it."""

    micros: tuple[Micro, ...] = (Micro(),)
    between: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Case:
    """``outputs``: losses over one graph (of a decoder: 2 ties its embedding). ``cells``: all layers are of one class.
    ``born``: under ``zero.Init``. ``look``: states are compared after so many updates. ``late``: "behind" updates in
    a thread, "delayed" shows it one step late as well.
    """

    seed: int
    ranks: int
    front: str = "values"
    layers: tuple[str, ...] = ("plain",)
    outputs: int = 1
    cells: bool = False
    born: bool = False
    dtype: str = "fp32"
    optimizer: str = "AdamW"
    groups: str = "one"
    schedule: str = ""
    tokens: bool = False
    look: int = 1
    late: str = ""
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    windows: tuple[Window, ...] = (Window(),)

    @property
    def stage(self) -> int:
        return int(self.zero["stage"])

    def events(self) -> list[Event]:
        """All of them, in order."""
        inside = [e for w in self.windows for m in (*w.micros, w) for e in _events(m)]
        return inside

    def lines(self) -> list[str]:
        """For a reader: what differs from the defaults."""
        plain = Case(0, 0)
        names = [name for name in self.__dataclass_fields__ if name != "windows"]
        said = [f"{n}: {getattr(self, n)!r}" for n in names if getattr(self, n) != getattr(plain, n)]
        for number, window in enumerate(self.windows):
            for micro in window.micros:
                said.append(f"  update {number}: {_said(micro.before)}[{micro.how}]{_said(micro.after)}")
            said += [f"  behind it: {_said(window.between)}"] if window.between else []
        return said


def features(case: Case) -> set[Hashable]:
    """Collect what a case shows: every setting and event by its name, and every pair of the settings that decide where
    states are and when they are updated.
    """
    places = {key: case.zero.get(key, {}).get("device", "") for key in ("offload_optimizer", "offload_param")}
    pairs = {"stage": case.stage, "late": case.late, **places}
    names = ("front", "dtype", "optimizer", "groups", "schedule", "tokens", "outputs", "cells", "born")
    found: set[Hashable] = {*pairs.items(), *combinations(pairs.items(), 2)}
    found |= {(name, getattr(case, name)) for name in names}
    found |= {("layer", layer) for layer in case.layers}
    found |= {("key", key) for key in (*case.zero, *case.top, *case.top.get("rule", ()))}
    for window in case.windows:
        found |= {("between", event.name) for event in window.between}
        for micro in window.micros:
            found |= {("how", micro.how), *(("before", event.name) for event in micro.before)}
            found |= {("after", event.name) for event in micro.after}
    return found


def _events(part: Micro | Window) -> tuple[Event, ...]:
    return part.between if isinstance(part, Window) else part.before + part.after


def _said(events: tuple[Event, ...]) -> str:
    return "".join(f" {e.name}({e.pick}) " for e in events)


def draw(seed: int, ranks: int) -> Case:
    """The case of a seed."""
    rng = random.Random(f"{seed} {ranks}")
    kinds = ["values"] * 12 + ["tokens"] * 4 + (["llama", "pipe"] * 2 if ranks in (2, 4) else []) + ["zenflow"]
    front = rng.choice(kinds)
    if front == "zenflow":
        return _zenflow(seed, ranks, rng)
    case = Case(seed, ranks, front=front, zero={"stage": rng.choice((0, 1, 2, 3, 3, 3))})
    case = replace(
        case,
        layers=tuple(rng.choices(LAYERS, k=rng.randint(1, 5))),
        outputs=rng.choice((1, 1, 1, 2)),
        cells=rng.random() < 0.4,
        dtype=rng.choice(("fp32", "fp32", "fp32", "bf16", "fp16")),
        optimizer=rng.choice(OPTIMIZERS + CLIENT),
        groups=rng.choice(("one", "one", "two", "partial")),
        schedule=rng.choice(("", "", "WarmupLR", "client")),
        tokens=rng.random() < 0.1,
        look=rng.choice((1, 1, 1, 2, 3)),
        born=rng.random() < 0.2,
    )
    case = _config(case, rng)
    return _legal(replace(case, windows=_windows(case, rng)))


def _zenflow(seed: int, ranks: int, rng: random.Random) -> Case:
    """``layers`` is the name of a case, ``top`` the rule that is stated in plain torch."""
    window = rng.randint(1, 3)
    rule = {"ratio": rng.choice((0.05, 0.2, 0.5)), "window": window, "select": window * rng.randint(1, 6 // window)}
    rule |= {"overlap": rng.random() < 0.5, "warm_up": rng.randint(0, 2)}
    names = ("wide", "wide_accumulation", "odd_shapes", "tied", "functional_tied", "unused", "single")
    top = {"rule": rule, "gradient_clipping": rng.choice((0.0, 0.05))}
    return Case(seed, ranks, "zenflow", (rng.choice(names),), zero={"stage": rng.randint(1, 3)}, top=top)


def _config(case: Case, rng: random.Random) -> Case:
    zero, top = dict(case.zero), {"gradient_clipping": rng.choice((0.0, 0.0, 0.05, 1.0))}
    sizes = {
        "reduce_bucket_size": (1, 200, 5000),
        "overlap_comm": (True, False),
        "separate_reduce_group": (True,),
        "param_persistence_threshold": (0, 20, 100_000),
        "prefetch_bucket_size": (0, 100, 5000),
        "max_live_parameters": (0, 500),
        "max_reuse_distance": (0, 10_000),
        "allgather_bucket_size": (2, 5000),
    }
    zero |= {name: rng.choice(values) for name, values in sizes.items() if rng.random() < 0.4}
    if case.stage == 3 and case.ranks == 4 and rng.random() < 0.4:
        zero[rng.choice(("mics_shard_size", "zero_hpz_partition_size"))] = 2
    late, roll = "", rng.random()
    if case.stage and roll < 0.4:
        place = rng.choice(("cpu", "cpu", "nvme"))
        zero["offload_optimizer"] = {"device": place, **rng.choice(({}, {}, {"ratio": 0.5}))}
        if place == "nvme":
            zero["sub_group_size"] = rng.choice((100, 5000))
        late = rng.choice(("", "behind", "early", "delayed")) if place == "cpu" else rng.choice(("", "behind"))
    if case.stage == 3 and rng.random() < 0.3:
        zero["offload_param"] = {"device": rng.choice(("cpu", "nvme")), "max_in_cpu": rng.choice((0, 300))}
        if zero["offload_param"]["device"] == "cpu":
            zero["offload_param"].pop("max_in_cpu")
    if late in ("early", "delayed"):
        zero["offload_optimizer"] = {**CPU, {"early": "super_offload", "delayed": "delayed_update"}[late]: True}
    if rng.random() < 0.15:
        top |= rng.choice(({"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}))
    return replace(case, zero=zero, top=top, late=late)


def _windows(case: Case, rng: random.Random) -> tuple[Window, ...]:
    def events(names: tuple[str, ...], chance: float) -> tuple[Event, ...]:
        found = []
        while rng.random() < chance:
            found.append(Event(rng.choice(names), rng.randrange(1000)))
        return tuple(found)

    length, windows = rng.choice((1, 1, 2, 3, 4)), []
    for _ in range(rng.randint(3, 6)):
        length = rng.choice((1, 2, 3)) if rng.random() < 0.1 else length
        micros = tuple(Micro(rng.choice(HOWS), events(BEFORE, 0.12), events(AFTER, 0.12)) for _ in range(length))
        windows.append(Window(micros, events(BETWEEN, 0.45)))
    return tuple(windows)


def changed_events(case: Case, change: Any) -> Case:
    """With ``change(where, event)`` in place of each event, None for none."""

    def of(where: str, events: tuple[Event, ...]) -> tuple[Event, ...]:
        return tuple(new for event in events if (new := change(where, event)) is not None)

    windows = []
    for window in case.windows:
        micros = [replace(m, before=of("before", m.before), after=of("after", m.after)) for m in window.micros]
        windows.append(Window(tuple(micros), of("between", window.between)))
    return replace(case, windows=tuple(windows))


def changed_hows(case: Case, change: Any) -> Case:
    """With ``change(how, number, length)`` in place of how each micro-batch is run."""
    windows = [
        replace(w, micros=tuple(replace(m, how=change(m.how, i, len(w.micros))) for i, m in enumerate(w.micros)))
        for w in case.windows
    ]
    return replace(case, windows=tuple(windows))


def _legal(case: Case) -> Case:
    """Without what the documents rule out."""
    zero, top = dict(case.zero), dict(case.top)
    if case.front in ("llama", "pipe"):
        case = replace(case, tokens=False, dtype="fp32", born=False, look=1)
        zero = {k: v for k, v in zero.items() if not k.startswith(("mics", "zero_hpz"))}
        top = {k: v for k, v in top.items() if k == "gradient_clipping"}
        if case.optimizer == "client UserWholeTensor":  # refused, as ranks have parts of tensors
            case = replace(case, optimizer="client UserElementwise")
    if case.late == "delayed":  # the documents refuse edits there; a plain schedule of what is shown when
        case = replace(case, optimizer="AdamW", dtype="fp32", front="values" if case.front == "pipe" else case.front)
        case = changed_events(case, lambda _, e: e if e.name in ("lr", "eval", "no_grad", "see_grad") else None)
        case = replace(case, layers=tuple("square" if name == "clamped" else name for name in case.layers))
    if "clamped" in case.layers:  # plain torch, too, stops halfway there; what is written there is refused
        case = changed_events(case, lambda _, e: None if e.name in ("fail_forward", "unsharded") else e)
        case = changed_hows(case, lambda how, *_: "engine" if how == "parts" else how)  # it reads a child's weight
    if case.late == "early" or (case.late and case.optimizer.startswith("client")):
        case = replace(case, optimizer="AdamW")
    case = at_stage(replace(case, zero=zero, top=top), case.stage)
    if case.front == "pipe":
        case = replace(case, optimizer="AdamW", groups="one", late="", schedule="")
        case = changed_hows(case, lambda how, *_: "engine")
        case = changed_events(case, lambda where, e: e if where == "between" and e.name in OF_PIPES else None)
        schedule, chunks = random.Random(case.seed).choice(
            (("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2))
        )
        return replace(case, top={**top, "pipeline": {"schedule": schedule, "chunks_per_stage": chunks}})
    if case.front == "llama":
        case = replace(case, groups="one", optimizer="AdamW" if case.optimizer == "Lamb" else case.optimizer)
        case = replace(case, layers=(), cells=False)
    case = changed_hows(case, lambda how, number, length: _how(case, how, last=number == length - 1))
    return changed_events(case, lambda where, e: _event(case, where, e))


def at_stage(case: Case, stage: int) -> Case:
    """The same on a stage, without what that does not go with."""
    top = {k: v for k, v in case.top.items() if stage < 2 or "pre" not in k}
    of_three = ("offload_param", "mics_shard_size", "zero_hpz_partition_size")
    zero = {k: v for k, v in case.zero.items() if stage == 3 or k not in of_three} | {"stage": stage}
    if stage == 0:
        zero.pop("offload_optimizer", None)
    elif stage < 3 and "offload_optimizer" in zero:
        zero["offload_optimizer"] = {k: v for k, v in zero["offload_optimizer"].items() if k != "ratio"}
    return replace(case, zero=zero, top=top, late=case.late if stage else "", born=case.born and stage == 3)


def _how(case: Case, how: str, *, last: bool) -> str:
    if how == "no_sync" and last:  # step() is not allowed inside, and needs what is reduced
        return "engine"
    if how == "plain" and (case.dtype == "fp16" or case.outputs == 2):
        return "engine"
    if how in ("parts", "module") and case.front == "llama":
        return "engine"
    if how in ("twice", "overflow") and case.tokens:
        return "engine"
    if how == "parts" and "functional" in case.layers and case.stage == 3:  # uses a weight outside its module
        return "engine"
    return how


def _event(case: Case, where: str, event: Event) -> Event | None:
    plainly = any(m.how == "plain" for w in case.windows for m in w.micros)
    if event.name == "hand" and (
        case.tokens or plainly or case.front == "llama"
    ):  # which divides what is written by the accumulation steps
        return None
    if event.name == "hand" and case.dtype != "fp32":  # to which autograd adds in 16 bits, unless it is the last one
        return event if len(case.windows[0].micros) == 1 else None
    if event.name in ("see_grad", "set_grad", "set_grad_local") and case.tokens:
        return None
    return event


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less."""
    yield from (replace(case, windows=case.windows[:n]) for n in range(1, len(case.windows)))
    for n in range(len(case.windows) if len(case.windows) > 1 else 0):
        yield replace(case, windows=case.windows[:n] + case.windows[n + 1 :])
    length = min(len(w.micros) for w in case.windows)
    for n in range(length if length > 1 else 0):
        yield replace(case, windows=tuple(replace(w, micros=w.micros[:n] + w.micros[n + 1 :]) for w in case.windows))
    every = case.events()
    for gone in range(len(every)):
        numbers = iter(range(len(every)))
        yield changed_events(case, lambda _, e, g=gone, at=numbers: None if next(at) == g else e)
    hows = sum(len(w.micros) for w in case.windows)
    for gone in range(hows):
        numbers = iter(range(hows))
        plainer = changed_hows(case, lambda how, *_, g=gone, at=numbers: "engine" if next(at) == g else how)
        if plainer != case:
            yield plainer
    for n in range(len(case.layers) if len(case.layers) > 1 else 0):
        yield replace(case, layers=case.layers[:n] + case.layers[n + 1 :])
    plain = Case(0, 0)
    for name in ("outputs", "cells", "born", "dtype", "groups", "schedule", "tokens", "look", "optimizer"):
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    for key in case.zero.keys() - {"stage"}:
        late = "" if key == "offload_optimizer" else case.late
        yield replace(case, late=late, zero={k: v for k, v in case.zero.items() if k != key})
    for key in case.top:
        yield replace(case, top={k: v for k, v in case.top.items() if k != key})
