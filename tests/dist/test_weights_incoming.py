"""A client that hands all weights to the first rank, as transformers does: every rank reads its own from the file."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.client.zero import incoming
from deepspeed.client.zero.incoming import Incoming
from deepspeed.errors import UsageError
from deepspeed.zero.module.mapped import FilePart
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome

pytestmark = pytest.mark.timeout(60)
NAME = "_load_state_dict_into_zero3_model"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(7, 24), nn.Linear(24, 7), nn.Linear(24, 5)
        self.register_buffer("scale", torch.ones(3))


class Partly(nn.Linear):
    """Has its own way to load: two rows of a weight, and what is added to a bias."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        self.weight.data[:2].copy_(state_dict[f"{prefix}weight"][:2])
        self.bias.data.add_(state_dict[f"{prefix}bias"])


def client_load(model: nn.Module, state: dict[str, Any], *, change: str) -> None:
    """As transformers does it: gathered parameters of one module after the other, to which the first rank copies."""
    for path, module in model.named_modules():
        names = {name: f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        params = [module.get_parameter(name) for name, full in names.items() if full in state]
        if not params:
            continue
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            if dist.get_rank() == 0:
                if change == "edited" and path == "up":
                    state["up.weight"].mul_(2)
                here = {k: v + 1 if change == "converted" and path == "up" else v for k, v in state.items()}
                module._load_from_state_dict(here, f"{path}.", {}, True, [], [], [])
            if change == "raises" and path == "down" and dist.get_rank() == 0:
                raise ValueError("the client's own")


def load(file: str, change: str) -> Any:
    """Sums of the loaded values by name, the bytes this rank read and what was said."""
    fake: Any = ModuleType("transformers.modeling_utils")
    setattr(fake, NAME, client_load)
    lines: list[str] = []
    loads: list[Incoming] = []
    begin = Incoming.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, fake.__name__, fake)
        patch.setattr(incoming, "log_dist", lambda text: lines.append(text))
        patch.setattr(Incoming, "__init__", lambda self, *args: (loads.append(self), begin(self, *args))[1])
        if change == "blind" and dist.get_rank() == 1:
            patch.setattr(incoming, "_sees", lambda *_: False)
        if change == "unreadable" and dist.get_rank() == 1:
            patch.setattr(FilePart, "read", _fails)
        with deepspeed.zero.Init(config_dict_or_path=make_config(3)):
            torch.manual_seed(5)
            model = Net()
        if change == "own":
            model.up.__class__ = Partly
        wrapped = getattr(fake, NAME)
        state = (
            torch.load(file, mmap=change != "memory") if dist.get_rank() == 0 else torch.load(file, map_location="meta")
        )
        said = outcome(lambda: wrapped(model, state, change=change))
        assert wrapped is not client_load and getattr(fake, NAME) is client_load, "for one load alone"
        params = dict(model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(params.values())):
            values = {name: p.detach().clone() for name, p in params.items()}
    return values, loads[0].read_bytes, loads[0].sent_bytes, lines, said


def _fails(*_: Any) -> None:
    raise UsageError("values ends early")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of ``down`` the weight has another shape; of ``other`` there is the bias alone."""
    path = tmp_path_factory.mktemp("incoming") / "weights.pt"
    torch.manual_seed(1)
    shapes = {"up.weight": (24, 7), "up.bias": (24,), "down.weight": (7, 23), "down.bias": (7,), "other.bias": (5,)}
    torch.save({name: torch.randn(shape) for name, shape in shapes.items()}, path)
    return str(path)


def _born() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {name: p.detach() for name, p in Net().named_parameters()}


@pytest.mark.parametrize("change", ["", "converted", "blind", "memory", "edited", "own"])
def test_the_values_are_those_that_the_first_rank_was_given(pool2: RankPool, file: str, change: str) -> None:
    given = torch.load(file)
    expected = {n: given[n] if n in given and n != "down.weight" else values for n, values in _born().items()}
    if change == "converted":
        expected |= {name: given[name] + 1 for name in ("up.weight", "up.bias")}
    if change == "edited":
        expected["up.weight"] = 2 * given["up.weight"]
    if change == "own":
        born = _born()
        expected["up.weight"] = torch.cat([given["up.weight"][:2], born["up.weight"][2:]])
        expected["up.bias"] = born["up.bias"] + given["up.bias"]
    results = pool2.run(load, file, change)
    for values, _, _, _, said in results:
        assert said == ""
        for name, wanted in expected.items():
            assert torch.equal(values[name], wanted), name
    read, sent = ([result[at] for result in results] for at in (1, 2))
    without = {"converted": "up", "own": "up", "edited": "up.weight"}.get(change, "down.weight")
    from_file = [name for name in given if name != "down.weight" and not name.startswith(without)]
    whole = change in ("blind", "memory")
    assert sum(read) == (0 if whole else sum(given[name].nbytes for name in from_file))
    lines = results[0][3]
    reasons = {"blind": "rank 1 sees no such file", "memory": "is not mapped from a file"}
    assert sent[0] == (0 if change == "" else sent[0]) and (sent[0] > 0) == (change != "")
    assert (change not in reasons) == (not any("about to read" in line for line in lines))
    assert change not in reasons or any(reasons[change] in line for line in lines)


def test_a_rank_that_cannot_read_ends_the_load_on_all(pool2: RankPool, file: str) -> None:
    for *_, said in pool2.run(load, file, "unreadable"):
        assert "UsageError" in said and "rank 1 cannot read its part of the weights: values ends early" in said


def test_an_error_of_the_client_reaches_all_and_leaves_the_values(pool2: RankPool, file: str) -> None:
    given = torch.load(file)
    first, second = pool2.run(load, file, "raises")
    assert "ValueError" in first[4] and "UsageError" in second[4] and "the client's own" in second[4]
    for values, *_ in (first, second):
        assert torch.equal(values["down.bias"], _born()["down.bias"]) and torch.equal(
            values["up.bias"], given["up.bias"]
        )
