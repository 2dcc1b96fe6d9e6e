"""Each honoured key changes what a small training run does, each inert key changes nothing.

Each key has a probe: a configuration, a changed value for that key, and the kind of run that shows the difference. All
runs of all probes are made once, in one call of the rank pool, and the tests compare their fingerprints. Inert keys
that start from the same run are changed together, and one by one only where that shows a difference.
"""

import copy
import functools
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from deepspeed.config.model.root import DeepSpeedConfig
from deepspeed.config.model.settings import all_keys, declared_fields
from deepspeed.config.model.values import Support
from tests.dist.config_probes import INERT_PROBES, PROBES, Probe, base
from tests.harness.fingerprint import WORKDIR, Fingerprint, run_all
from tests.harness.pool import RankPool

pytestmark = pytest.mark.timeout(300)
KEYS = all_keys(DeepSpeedConfig)
FIELDS = {field.path: field.info for field in declared_fields(DeepSpeedConfig)}
HONOURED = sorted(path for path, key in KEYS.items() if key.support is Support.HONOURED)
INERT = sorted(path for path, key in KEYS.items() if key.support is Support.INERT)
# What these honoured keys do takes two ranks to show; one shows what all others do.
_OF_ZERO = ("allgather_sequential", "divergence", "max_live_parameters", "max_reuse_distance", "mics_shard_size")
_OF_ZERO += ("overlap_comm", "prefetch_bucket_", "separate_reduce_group")
_OF_TWO = (
    *("tensor_parallel.", "expert_parallel.", "pipeline.", "sequence", "seq_parallel_communication_data_type"),
    *("data_parallel_size", "compile.passes", "comms_logger.", "elasticity.", "observe.slow_", "anomalies.per_layer"),
    *("gradient_allreduce_op", "checkpoint.tag_validation", "hybrid_engine.pin_", "hybrid_engine.tp_gather_"),
    *(f"zero_optimization.{name}" for name in _OF_ZERO),
)
# What an honoured key may be refused with.
_KNOWN = ("Config", "Batch", "UsageError", "DivergenceError", "CheckpointError", "TagsDifferError")
_KNOWN += ("PlainStateError", "PipelineError", "ConflictingKeysError")


def _other_value(info: FieldInfo) -> Any:
    """A value that ``info`` accepts and that is not its default: the first such of a few candidates of every type."""
    model = create_model("Other", value=(info.annotation, info))
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    options = [option for part in _parts(info.annotation) if get_origin(part) is Literal for option in get_args(part)]
    numbers = []
    if isinstance(default, int | float) and not isinstance(default, bool):
        numbers = [default * 2, default // 2, default + 1]
    flag = not default if isinstance(default, bool) else True
    others = (f"{WORKDIR}/probe", "torch.bfloat16", "bf16", ["probe"], {"probe": 1}, {})
    for value in (flag, *numbers, 3, 0.5, *options, *others):
        try:
            if getattr(model(value=value), "value") != default:  # noqa: B009
                return value
        except ValidationError:
            continue
    raise LookupError(f"no other value is known for {info}: add a probe to INERT_PROBES")


def _parts(annotation: Any) -> list[Any]:
    """``annotation`` and everything inside it."""
    inside = () if get_origin(annotation) is Literal else get_args(annotation)
    return [annotation, *(part for argument in inside for part in _parts(argument))]


@dataclass(frozen=True)
class Run:
    """One training run, as text so that equal ones are made once."""

    config: str
    scenario: str
    world: int


def _set(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of ``config`` with ``value`` at the dotted ``path``."""
    out = copy.deepcopy(config)
    *blocks, name = path.split(".")
    block = out
    for part in blocks:
        block = block[int(part)] if isinstance(block, list) else block.setdefault(part, {})
    block[name] = value
    return out


def _pair(path: str, probe: Probe) -> tuple[Run, Run]:
    key = probe.path or path
    world = 1 if probe.world == 2 and path in HONOURED and not path.startswith(_OF_TWO) else probe.world
    runs = [
        Run(json.dumps(c, sort_keys=True), probe.scenario, world)
        for c in (probe.config, _set(probe.config, key, probe.value))
    ]
    return runs[0], runs[1]


@functools.cache
def _inert_probe(path: str) -> Probe:
    """Its own probe, or one with another value of the type of its field, in a run that shards everything."""
    if path in INERT_PROBES:
        return INERT_PROBES[path]
    assert path in FIELDS, f"{path} is no declared field: add a probe to INERT_PROBES"
    return Probe(base(3, steps_per_print=2), _other_value(FIELDS[path]))


def _together(paths: list[str]) -> dict[str, tuple[Run, Run]]:
    """For each of these inert keys the run that it starts from, and that run with all keys changed that share it."""
    starts = {path: _pair(path, _inert_probe(path))[0] for path in sorted(paths)}
    groups: dict[Run, dict[str, Any]] = {}
    for path, start in starts.items():
        probe = _inert_probe(path)
        groups[start] = _set(groups.get(start, probe.config), probe.path or path, probe.value)
    changed = {start: Run(json.dumps(c, sort_keys=True), start.scenario, start.world) for start, c in groups.items()}
    return {path: (start, changed[start]) for path, start in starts.items()}


def _is_row(item: pytest.Item, module: object) -> bool:
    return getattr(item, "module", None) is module and "path" in getattr(getattr(item, "callspec", None), "params", {})


@pytest.fixture(scope="module")
def prints(request: pytest.FixtureRequest) -> dict[Run, list[Fingerprint]]:
    """The fingerprints, by rank, of all runs that the selected tests compare."""
    selected = {item.callspec.params["path"] for item in request.session.items if _is_row(item, request.module)}
    pairs = {path: _pair(path, PROBES[path]) for path in HONOURED if path in PROBES and path in selected}
    together = _together([path for path in INERT if path in selected])
    made = _made(request, [run for pair in (pairs | together).values() for run in pair])
    alone = [path for path, pair in together.items() if _differences(*(_without_log(made[run]) for run in pair))]
    made |= _made(request, [_pair(path, _inert_probe(path))[1] for path in alone])
    shared = {path: made[together[path][1]] for path in together if path not in alone}
    return made | {_pair(path, _inert_probe(path))[1]: prints for path, prints in shared.items()}


def _made(request: pytest.FixtureRequest, runs: list[Run]) -> dict[Run, list[Fingerprint]]:
    """The fingerprints by rank of ``runs``, each made once."""
    out: dict[Run, list[Fingerprint]] = {}
    for world in sorted({run.world for run in runs}):
        pool: RankPool = request.getfixturevalue(f"pool{world}")
        mine = [run for run in dict.fromkeys(runs) if run.world == world]
        by_rank = pool.run(run_all, [(json.loads(run.config), run.scenario) for run in mine], time_limit=240)
        out |= {run: [rank[i] for rank in by_rank] for i, run in enumerate(mine)}
    return out


def _without_log(prints: list[Fingerprint]) -> list[Fingerprint]:
    return [{name: value for name, value in p.items() if name != "log"} for p in prints]


def _seen(path: str, prints: list[Fingerprint]) -> list[Fingerprint]:
    """What may show that ``path`` is honoured: everything, but of an optimizer's setting the update only.

    The optimizer's groups and what reports of them (learning rate, momentum, log lines) hold any setting that was
    merely stored.
    """
    if not path.startswith("optimizer.params."):
        return prints
    return [{name: value for name, value in p.items() if name in ("weights", "error")} for p in prints]


def _differences(a: list[Fingerprint], b: list[Fingerprint]) -> dict[str, Any]:
    names = {name for p in (*a, *b) for name in p}
    return {
        name: (pa.get(name), pb.get(name))
        for pa, pb in zip(a, b, strict=True)
        for name in names
        if pa.get(name) != pb.get(name)
    }


def _in_make_test(path: str) -> Any:
    """The key as a parameter; settings of schedules and of optimizers are left to test-all, but one of them:
    test_lr_schedules.py and test_optim_update_rules.py have what each does.
    """
    of_rules = path.startswith(("scheduler.params.", "optimizer.params."))
    kept = not of_rules or path == "optimizer.params.bias_correction"
    return pytest.param(path, marks=() if kept else pytest.mark.exhaustive)


@pytest.mark.parametrize("path", [_in_make_test(path) for path in HONOURED])
def test_an_honoured_key_has_an_effect(prints: dict[Run, list[Fingerprint]], path: str) -> None:
    assert path in PROBES, (
        f"{path} is called honoured, but nothing shows that it is: add a probe to tests/dist/config_probes.py"
    )
    before, after = (prints[run] for run in _pair(path, PROBES[path]))
    assert "error" not in before[0], f"the run that {path} is compared with does not work: {before[0].get('error')}"
    assert _seen(path, before) != _seen(path, after), (
        f"{path} = {PROBES[path].value!r} has no observable effect: it is not honoured"
    )
    refused = [p.get("error", "") for p in after]
    assert all(not text or any(word in text.split(":")[0] for word in _KNOWN) for text in refused), refused


@pytest.mark.parametrize("path", INERT)
def test_an_inert_key_changes_nothing_and_is_mentioned(prints: dict[Run, list[Fingerprint]], path: str) -> None:
    before, after = (prints[run] for run in _pair(path, _inert_probe(path)))
    assert "error" not in before[0], f"the run that {path} is compared with does not work: {before[0].get('error')}"
    found = _differences(_without_log(before), _without_log(after))
    assert not found, f"{path} is called inert, but it changes {sorted(found)}: {json.dumps(found, default=str)[:1500]}"
    written = _inert_probe(path).path or path
    assert any(written in line for line in after[0]["log"]), f"the log does not say that {written} is without effect"


def test_equal_configurations_have_equal_fingerprints(pool2: RankPool) -> None:
    """Otherwise every comparison above would see a difference."""
    config = next(iter(PROBES.values())).config
    first, second = pool2.run(run_all, [(config, "train"), (config, "train")])[0]
    assert first == second


def test_no_probe_is_left_over() -> None:
    """A probe belongs to a key of that class."""
    assert not set(PROBES) - set(HONOURED)
    assert not set(INERT_PROBES) - set(INERT)
