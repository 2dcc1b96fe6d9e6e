"""One global batch for many numbers of ranks: the elasticity block, and what its errors say."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.run import get_args_parser

import deepspeed.elasticity as elasticity
from deepspeed.comm.channel import Channel
from deepspeed.config import load_config
from deepspeed.config.model.elastic import best_batch, kept_sizes
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.launcher.elastic.beats import Beats
from deepspeed.launcher.elastic.membership import JOIN, Membership, Round
from deepspeed.launcher.elastic.sizes import Elastic, share_ranks
from deepspeed.launcher.node.verdict import LOST_HOST_STATUS, Verdict
from tests.harness.rows import for_each

BLOCK: dict[str, Any] = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [1, 2, 4], "max_gpus": 4}


def test_the_batch_fits_more_numbers_of_ranks_than_any_other() -> None:
    for largest, micros in ((24, [1, 2, 4]), (100, [3, 5]), (61, [2])):
        batch = best_batch(micros, largest, range(1, 9), prefer_larger=True)
        fits = {b: sum(any(b % (m * n) == 0 for m in micros) for n in range(1, 9)) for b in range(1, largest + 1)}
        assert fits[batch] == max(fits.values()) and batch == max(b for b in fits if fits[b] == fits[batch])
        smaller = best_batch(micros, largest, range(1, 9), prefer_larger=False)
        assert smaller == min(b for b in fits if fits[b] == fits[batch])


def test_every_allowed_size_keeps_the_batch() -> None:
    batch, sizes = elasticity.compute_elastic_config({"elasticity": BLOCK}, "")
    assert (batch, sizes) == (24, [1, 2, 3, 4])
    for ranks in sizes:
        config = load_config({"elasticity": BLOCK}, world_size=ranks)
        assert config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * ranks == batch
        assert elasticity.compute_elastic_config({"elasticity": BLOCK}, "", ranks)[2] in (1, 2, 4)


def test_whole_nodes_and_model_parallel_ranks() -> None:
    block = {**BLOCK, "max_gpus": 16, "num_gpus_per_node": 4, "model_parallel_size": 2}
    batch, sizes, micro = elasticity.compute_elastic_config({"elasticity": block}, world_size=8)
    assert all(size % 4 == 0 and batch % (size // 2) == 0 for size in sizes) and batch % (4 * micro) == 0


@for_each(
    ("changes", "sentence"),
    [
        ({"min_gpus": 5}, "min_gpus 5 is above max_gpus 4"),
        ({"min_gpus": 30, "max_gpus": 40}, "no global batch of at most elasticity.max_train_batch_size 24 can be kept"),
        ({"micro_batch_sizes": [0, 2]}, "must list positive numbers, not [0, 2]"),
        ({"micro_batch_sizes": [25]}, "no micro batch of elasticity.micro_batch_sizes is within max_train_batch_size"),
        ({"version": 0.3}, "version 0.3 does not exist"),
        ({"version": 0.1, "model_parallel_size": 2}, "needs version 0.2"),
    ],
)
def test_a_block_that_cannot_work_gets_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(elasticity.ElasticityConfigError, match=re.escape(sentence)):
        elasticity.compute_elastic_config({"elasticity": {**BLOCK, **changes}})
    with pytest.raises(DeepSpeedConfigError, match=re.escape(sentence)):
        load_config({"elasticity": {**BLOCK, **changes}}, world_size=1)


def test_other_faults_get_a_sentence() -> None:
    with pytest.raises(elasticity.ElasticityIncompatibleWorldSize, match=r"5 rank\(s\) cannot keep .* 1, 2, 3, 4 can"):
        elasticity.compute_elastic_config({"elasticity": BLOCK}, world_size=5)
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size is given beside elasticity.enabled"):
        load_config({"elasticity": BLOCK, "train_batch_size": 24}, world_size=1)
    with pytest.raises(elasticity.ElasticityConfigError, match="max_train_batch_size is required"):
        elasticity.compute_elastic_config({"elasticity": {"enabled": True}})
    with pytest.raises(elasticity.ElasticityError, match="has no block elasticity"):
        elasticity.compute_elastic_config({})
    ignoring = {"elasticity": {**BLOCK, "ignore_non_elastic_batch_info": True}, "train_batch_size": 7}
    assert load_config(ignoring, world_size=3).train_batch_size == 24


def test_batch_keys_say_which_numbers_of_ranks_keep_them() -> None:
    sizes = [1, 2, 3, 4, 5, 6]
    assert kept_sizes({"train_batch_size": 12}, sizes) == [1, 2, 3, 4, 6]
    assert kept_sizes({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, sizes) == [1, 2, 3, 6]
    two = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert kept_sizes(two, sizes) == [3]
    assert kept_sizes({"train_micro_batch_size_per_gpu": 2}, sizes) == sizes
    assert kept_sizes({"train_batch_size": 12, "tensor_parallel": {"autotp_size": 2}}, sizes) == [2, 4, 6]


def test_ranks_are_shared_out_over_the_nodes_that_are_there() -> None:
    assert share_ranks([4, 4], 8) == [4, 4] and share_ranks([4, 2], 4) == [2, 2] and share_ranks([1, 4], 3) == [1, 2]
    limits = Elastic(1, 3, (2, 4, 6), 3)
    assert [limits.largest(ranks) for ranks in (1, 2, 3, 5, 9)] == [0, 2, 2, 4, 6]
    assert limits.largest(5, nodes=5) == 0  # each node has a rank


# -- elastic examples -----------------------------------------------------------------------------------------------
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "elastic"
DATA = json.loads((ROOT / "tests" / "data" / "schedulers.json").read_text())
SCRIPT = "examples/elastic/train.py"


def example_config() -> dict[str, Any]:
    """CONFIG of the example, without running it."""
    body = ast.parse((EXAMPLES / "train.py").read_text()).body
    assigned = {getattr(node.targets[0], "id", ""): node.value for node in body if isinstance(node, ast.Assign)}
    return ast.literal_eval(assigned["CONFIG"])


def shell_words(name: str) -> list[str]:
    """The words of a script's one long command, with stand-ins for variables."""
    text = re.sub(r"\\\n", " ", (EXAMPLES / name).read_text())
    line = next(line for line in text.splitlines() if "torchrun " in line and not line.startswith("#"))
    text = re.sub(r'\$\{?(\w+)(:-[^}"]*)?\}?', lambda match: "4" if "NUM" in match[1] else "node1", line)
    return shlex.split(text.rstrip("& "))


def as_torchrun(words: list[str]) -> Any:
    """torchrun's own reading of its command line."""
    given = get_args_parser().parse_args(words)
    assert given.training_script == SCRIPT and (ROOT / SCRIPT).is_file()
    assert given.training_script_args[:1] == ["--folder"] and given.max_restarts > 0
    return given


def read_yaml(text: str) -> Any:
    """The YAML of the example: block maps and lists of plain or double-quoted scalars. No YAML library is needed."""
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    rows = [(len(line) - len(line.lstrip()), line.strip()) for line in lines]

    def scalar(word: str) -> Any:
        return json.loads(word) if word.startswith('"') or re.fullmatch(r"-?\d+|true|false", word) else word

    def block(at: int, indent: int) -> tuple[Any, int]:
        if rows[at][1].startswith("- "):
            items = []
            while at < len(rows) and rows[at][0] == indent and rows[at][1].startswith("- "):
                word = rows[at][1][2:]
                if re.match(r"[\w./-]+:( |$)", word):
                    rows[at] = (indent + 2, word)
                    item, at = block(at, indent + 2)
                else:
                    item, at = scalar(word), at + 1
                items.append(item)
            return items, at
        out: dict[str, Any] = {}
        while at < len(rows) and rows[at][0] == indent and not rows[at][1].startswith("- "):
            name, _, word = rows[at][1].partition(":")
            assert name not in out, f"{name} stands twice"
            if word.strip():
                out[name], at = scalar(word.strip()), at + 1
            else:
                out[name], at = block(at + 1, rows[at + 1][0])
        return out, at

    value, end = block(0, 0)
    assert end == len(rows), rows[end]
    return value


def test_the_configuration_keeps_its_batch_on_all_numbers_of_ranks_that_the_files_allow() -> None:
    for ranks in (1, 2, 3, 4, *(8 * nodes for nodes in range(1, 5))):
        assert load_config(example_config(), world_size=ranks).train_batch_size == 96
    for name in ("torchrun.sh", "slurm.sbatch"):
        words = shell_words(name)
        given = as_torchrun(words[words.index("torchrun") + 1 :])
        assert (given.nnodes, given.nproc_per_node, given.rdzv_backend) == ("1:4", "8", "c10d")
        subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=True)
    spec = read_yaml((EXAMPLES / "kubeflow.yaml").read_text())["spec"]
    assert (spec["elasticPolicy"]["maxReplicas"], spec["nprocPerNode"]) == (4, "8")


def test_slurm() -> None:
    text = (EXAMPLES / "slurm.sbatch").read_text()
    lines = text.splitlines()
    given = dict((line.removeprefix("#SBATCH ").partition("=")[::2]) for line in lines if line.startswith("#SBATCH "))
    assert lines[0].startswith("#!")
    for option, value in given.items():
        pattern = DATA["sbatch"]["options"][option]
        assert re.fullmatch(pattern, value) if pattern else value == "", option
    # directives behind the first command are comments for Slurm
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    match = re.fullmatch(r"B:(\w+)@(\d+)", given["--signal"])
    assert match and "--requeue" in given and f"kill -{match[1]} " in text and "scontrol requeue" in text
    assert int(match[2]) > example_config()["checkpoint"]["emergency_deadline"] + 30  # what torchrun waits at most
    words = shell_words("slurm.sbatch")
    assert words[0] == "srun"
    own = words[1 : words.index("torchrun")]
    assert {word.partition("=")[0] for word in own} <= set(DATA["sbatch"]["srun"])
    assert match[1] in text.partition("TORCHELASTIC_SIGNALS_TO_HANDLE=")[2].splitlines()[0]


def test_kubeflow() -> None:
    schema = json.loads((ROOT / "tests" / "data" / "pytorchjob.schema.json").read_text())
    job = read_yaml((EXAMPLES / "kubeflow.yaml").read_text())
    jsonschema.validate(job, schema)
    wrong = json.loads(json.dumps(job))
    wrong["spec"]["elasticPolicy"]["minReplica"] = wrong["spec"]["elasticPolicy"].pop("minReplicas")
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(wrong, schema)
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    pod = worker["template"]["spec"]
    # torchrun gives its ranks 30 s after SIGTERM
    deadline = example_config()["checkpoint"]["emergency_deadline"]
    assert deadline < 30 < pod["terminationGracePeriodSeconds"]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["torchrun", SCRIPT]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def _run_ray_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    monkeypatch.setattr(sys, "argv", ["ray_train.py", "--folder", str(tmp_path), "--workers", "3", "--cpu"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("ray_train", EXAMPLES / "ray_train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    return module


def test_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where Ray is not installed, stand-ins with the documented arguments take its place."""
    made: dict[str, dict[str, Any]] = {}

    def stand_in(name: str) -> type:
        def init(self: Any, *positional: Any, **named: Any) -> None:
            known = DATA["ray"]["classes"][name]
            made[name] = {**dict(zip(known, positional, strict=False)), **named}
            assert set(made[name]) <= set(known)

        return type(name, (), {"__init__": init, "fit": lambda self: made.setdefault("fit", {})})

    if importlib.util.find_spec("ray") is None:
        names = {"ray": (), "ray.train": ("FailureConfig", "RunConfig", "ScalingConfig"), "ray.train.torch": ()}
        for name, classes in names.items():
            module = types.ModuleType(name)
            for each in (*classes, *(("TorchTrainer",) if name.endswith("torch") else ())):
                setattr(module, each, stand_in(each))
            monkeypatch.setitem(sys.modules, name, module)
    else:
        monkeypatch.setattr("ray.train.torch.TorchTrainer", stand_in("TorchTrainer"))
    module = _run_ray_example(monkeypatch, tmp_path)
    trainer = made["TorchTrainer"]
    assert "fit" in made and trainer["train_loop_per_worker"] is module.work
    assert trainer["train_loop_config"] == {"folder": str(tmp_path), "updates": 300}


# -- membership -----------------------------------------------------------------------------------------------------
LIMITS = Elastic(min_nodes=2, max_nodes=2, sizes=(1, 2, 3), max_restarts=3)


@pytest.fixture
def member(tmp_path: Path) -> Callable[[int], Membership]:
    """Nodes of one job, each with one rank of the first round; its note is a file ``note.NODE``."""
    store = HashStore()

    def made(node: int, devices: tuple[int, ...] = (0,)) -> Membership:
        note = str(tmp_path / f"note.{node}")
        made = Membership(store, LIMITS, host="ab"[node], address="127.0.0.1", devices=devices, note=note)
        made.round, made._channel = Round(0, node, {"a": (0,), "b": (0,)}, "127.0.0.1", 1), Channel(store, "round")
        made._beats, made._takes_part = Beats(made._channel, node, ("a", "b")), True
        return made

    return made


def test_a_job_ends_well_when_the_ranks_of_all_nodes_have(member: Callable[[int], Membership]) -> None:
    """One node goes on watching until then; ``beats`` takes none that has ended for lost."""
    first, second = member(0), member(1)
    assert not first.end_well() and not first.end_well() and not first.over
    assert second.end_well() and first.end_well()


def test_the_first_reason_ends_a_round_on_all_nodes(member: Callable[[int], Membership]) -> None:
    first, second = member(0), member(1)
    assert first.over == second.over == ""
    assert second.end_round("a rank failed") == first.end_round(JOIN) == "a rank failed" == first.over


def test_a_crash_that_several_nodes_see_counts_once_and_not_after_a_checkpoint(
    member: Callable[[int], Membership], tmp_path: Path
) -> None:
    first, second = member(0), member(1)
    assert [first.count_crash(), second.count_crash()] == [1, 1]
    for node in (first, second):
        node.round = Round(1, *tuple(vars(node.round).values())[1:])
    assert [second.count_crash(), first.count_crash()] == [2, 2]
    (tmp_path / "note.1").write_text("ckpt/step6")
    assert second.saved == "" and second.count_crash() == 0 and first.saved == "ckpt/step6"


def test_the_first_verdict_is_that_of_all_nodes_and_one_that_says_none_is_not_waited_for(
    member: Callable[[int], Membership],
) -> None:
    first, second = member(0), member(1)
    assert second.agreed(60.0, lambda: True).status == LOST_HOST_STATUS == second.agreed(0.0, lambda: False).status
    assert first.agree_on(Verdict(7, "why")) == second.agree_on(Verdict(1)) == Verdict(7, "why")
    assert second.agreed(0.0, lambda: False) == Verdict(7, "why")


def test_a_node_outside_the_job_neither_ends_nor_judges_it(member: Callable[[int], Membership]) -> None:
    first, outside = member(0), member(1)
    outside._takes_part = False
    first._job.add("rounds", 1)
    assert outside.outside and not first.outside
    assert outside.agree_on(Verdict(1, "its own")) == Verdict(1, "its own") and outside.over == ""
    assert first.agree_on(Verdict(0)) == Verdict(0)


def test_reports_of_nodes_that_are_lost_are_not_waited_for(member: Callable[[int], Membership]) -> None:
    first = member(0)
    first.leave_ends([{"rank": 0}])
    first._beats.silent.add(1)
    assert first.ends(60.0) == {"a": (0.0, [{"rank": 0}])}
    assert first.leave(60.0, lambda: False), "and neither is their last word"


def test_all_nodes_divide_the_ranks_alike(member: Callable[..., Membership]) -> None:
    """Three of four devices: the largest number that the limits allow."""
    nodes, store, rounds = [member(0, (4, 5)), member(1, (6, 7))], HashStore(), dict[int, Any]()

    def divide(rank: int) -> None:
        rounds[rank] = nodes[rank]._divide(SimpleNamespace(store=store, rank=rank, world_size=2))  # type: ignore[arg-type]

    other = threading.Thread(target=divide, args=(1,))
    other.start()
    divide(0)
    other.join()
    assert [rounds[node].node for node in range(2)] == [0, 1]
    assert rounds[0].world == rounds[1].world and sum(map(len, rounds[0].world.values())) == 3
    assert rounds[0].port == rounds[1].port > 0 and rounds[0].number == rounds[1].number == 0


def test_too_few_nodes_in_time_are_named(member: Callable[[int], Membership], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_JOIN_TIMEOUT_S", "0.5")

    def nobody() -> None:
        raise RendezvousTimeoutError

    node = member(0)
    node._inner = SimpleNamespace(next_rendezvous=nobody)  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"fewer than 2 node\(s\) \(--min_elastic_nodes\) came together within 0.5 s"):
        node.next_rendezvous()
