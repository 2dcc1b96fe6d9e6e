"""The files of examples/elastic are what torchrun, Slurm, Kubernetes and Ray take: by their own parser where it is
installed (torch; Ray and Kubeflow's client if they are), and by tests/data, written from their public documentation.
"""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from torch.distributed.run import get_args_parser

from deepspeed.config import load_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "elastic"
DATA = json.loads((ROOT / "tests" / "data" / "schedulers.json").read_text())
SCRIPT = "examples/elastic/train.py"


def example_config() -> dict[str, Any]:
    """CONFIG of the example, without running it."""
    body = ast.parse((EXAMPLES / "train.py").read_text()).body
    return next(
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CONFIG"
    )


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
        assert (given.nnodes, given.nproc_per_node) == ("1:4", "8")
    spec = read_yaml((EXAMPLES / "kubeflow.yaml").read_text())["spec"]
    assert (spec["elasticPolicy"]["maxReplicas"], spec["nprocPerNode"]) == (4, "8")


def test_torchrun() -> None:
    words = shell_words("torchrun.sh")
    given = as_torchrun(words[words.index("torchrun") + 1 :])
    assert (given.nnodes, given.rdzv_backend) == ("1:4", "c10d")
    subprocess.run(["bash", "-n", str(EXAMPLES / "torchrun.sh")], check=True)


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
    assert as_torchrun(words[words.index("torchrun") + 1 :]).nnodes == "1:4"
    assert match[1] in text.partition("TORCHELASTIC_SIGNALS_TO_HANDLE=")[2].splitlines()[0]
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sbatch")], check=True)


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


def test_the_client_of_kubeflow_knows_every_field() -> None:
    """It drops those that it does not know."""
    kubeflow = pytest.importorskip("kubeflow.training")

    def through(job: Any) -> Any:
        with kubeflow.ApiClient() as client:
            made = client.deserialize(types.SimpleNamespace(data=json.dumps(job)), "KubeflowOrgV1PyTorchJob")
            return client.sanitize_for_serialization(made)

    text = (EXAMPLES / "kubeflow.yaml").read_text()
    job = read_yaml(text)
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    resources = container["resources"]  # quantities, which the client writes as text
    container["resources"] = {kind: {name: str(n) for name, n in each.items()} for kind, each in resources.items()}
    assert through(job) == job
    for name in ("maxReplicas:", "terminationGracePeriodSeconds:"):
        wrong = read_yaml(text.replace(name, "x" + name))
        assert through(wrong) != wrong
    with pytest.raises(ValueError, match="mount_path"):
        through(read_yaml(text.replace("mountPath:", "xmountPath:")))


def _run_ray_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    monkeypatch.setattr(sys, "argv", ["ray_train.py", "--folder", str(tmp_path), "--workers", "3", "--cpu"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("ray_train", EXAMPLES / "ray_train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    return module


def test_the_classes_of_ray_take_the_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = pytest.importorskip("ray.train.torch").TorchTrainer
    made: list[Any] = []
    monkeypatch.setattr(trainer, "fit", lambda self: made.append(self))
    _run_ray_example(monkeypatch, tmp_path)
    (each,) = made
    assert (each.scaling_config.num_workers, each.scaling_config.use_gpu) == (3, False)
    assert each.run_config.failure_config.max_failures == 10 and each.run_config.storage_path == str(tmp_path)


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
