"""Memory estimates against the documented formulas, and leaf marks."""

import pytest
import torch
from torch import nn

from deepspeed.client.zero import estimate, leaf

P, L, N_PER, NODES, F = 1_000_000, 10_000, 4, 2, 1.5
G = N_PER * NODES


@pytest.mark.parametrize(
    ("choices", "cpu", "gpu"),
    [
        ((True, True, True), 18 * P / NODES * F, 4 * L),
        ((True, True, False), max(4 * P * N_PER, 18 * P / NODES) * F, 4 * L),
        ((True, False, True), 16 * P / NODES * F, 4 * L + 2 * P / G),
        ((True, False, False), max(4 * P * N_PER, 16 * P / NODES) * F, 4 * L + 2 * P / G),
        ((False, False, True), 4 * L * N_PER * F, 4 * L + 18 * P / G),
        ((False, False, False), 4 * P * N_PER * F, 4 * L + 18 * P / G),
    ],
)
def test_zero3(choices: tuple[bool, bool, bool], cpu: float, gpu: float) -> None:
    assert estimate.estimate_zero3_model_states_mem_needs(P, L, N_PER, NODES, *choices) == (int(cpu), int(gpu), 4 * L)


def test_zero2() -> None:
    needs = estimate.estimate_zero2_model_states_mem_needs
    assert needs(P, N_PER, NODES, True) == (P * max(4 * G, 16) * F, 2 * P)
    assert needs(P, 1, 1, True) == (P * 16 * F, 2 * P)
    assert needs(P, N_PER, NODES, False) == (4 * P * N_PER * F, 2 * P + 18 * P // G)


def test_live_counts_shared_parameters_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.Linear(4, 3))
    model[1].weight = model[0].weight
    assert estimate.model_size(model) == (40 + 15, 40)
    estimate.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    estimate.estimate_zero2_model_states_mem_needs_all_live(model)
    out = capsys.readouterr().out
    assert out.count("offload_optimizer=") == 8 and "1 node, 2 GPUs per node" in out


class Expert(nn.Linear):
    pass


def _model() -> nn.Module:
    return nn.ModuleDict({"experts": nn.ModuleList([Expert(2, 2), Expert(2, 2)]), "head": nn.Linear(2, 2)})


@pytest.mark.parametrize("wanted", [[Expert], ["Expert"], [f"{__name__}.Expert"]])
def test_leaf_by_class_or_name(wanted: list) -> None:
    model = _model()
    found = leaf.set_z3_leaf_modules(model, wanted)
    assert found == list(model["experts"]) == leaf.get_z3_leaf_modules(model)
    assert model["experts"][0]._z3_leaf and not leaf.z3_leaf_module(model["head"])
    assert leaf.unset_z3_leaf_modules(model, wanted) == found and leaf.get_z3_leaf_modules(model) == []


def test_leaf_by_module_name() -> None:
    model = _model()
    assert leaf.set_z3_leaf_modules_by_name(model, ["experts.1", "none"]) == ([model["experts"][1]], ["none"])
    assert leaf.set_z3_leaf_modules_by_suffix(model, ["0", "ead"]) == ([model["experts"][0]], ["ead"])
    leaf.set_z3_leaf_modules_by_name(model, "experts.1", flag=False)
    assert leaf.get_z3_leaf_modules(model) == [model["experts"][0]]
    assert not leaf.z3_leaf_parameter(nn.Parameter(torch.zeros(1)))


def test_leaf_nothing_found() -> None:
    for call, wanted in (
        (leaf.set_z3_leaf_modules, [nn.Conv2d]),
        (leaf.unset_z3_leaf_modules, ["Missing"]),
        (leaf.set_z3_leaf_modules_by_name, ["nowhere"]),
        (leaf.set_z3_leaf_modules_by_suffix, ["nowhere"]),
    ):
        with pytest.raises(ValueError, match="No module of ModuleDict"):
            call(_model(), wanted)
        none = call(_model(), wanted, raise_if_not_found=False)
        assert none in ([], ([], ["nowhere"]))
    assert len(leaf.set_z3_leaf_modules(_model(), "Expert")) == 2
    with pytest.raises(TypeError):
        leaf.set_z3_leaf_modules(_model(), 3)
