"""I1, one owner: parameter objects and the views behind them live for the whole run; refills keep version counters."""

import pytest
import torch

import deepspeed
from deepspeed.tools.verify.models import case_named
from tests.harness.lockstep import Lockstep
from tests.harness.pool import RankPool
from tests.harness.training import STAGES, here, make_config, start, train_step

pytestmark = pytest.mark.timeout(60)


def _owners(engine) -> dict[str, tuple[int, int]]:
    owners = engine.module.named_parameters()
    return {name: (id(p), p._ds_unit.buffer.full.untyped_storage()._cdata) for name, p in owners}


def identities_over_a_run(stage: int) -> None:
    case = case_named("tied")
    model = case.build()
    objects = {name: id(p) for name, p in model.named_parameters()}
    engine = start(model, make_config(stage))
    before = _owners(engine)
    for step in range(3):
        train_step(engine, case, step)
        with torch.no_grad():
            engine(case.batch(here(step))[0])
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            model.embed.weight.mul_(0.5)
    after = _owners(engine)
    assert objects == {name: pair[0] for name, pair in after.items()}, "a parameter object was replaced"
    assert before == after, "a flat buffer's storage was replaced while views of it may be alive"
    assert model.head.weight is model.embed.weight
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_invariant_i1_parameters_and_storages_stay_the_same_objects(pool2: RankPool, stage: int) -> None:
    pool2.run(identities_over_a_run, stage)


def versions_over_refills() -> tuple[list[int], list[int]]:
    pair = Lockstep(case_named("plain"), make_config(3, zero={"param_persistence_threshold": 0}))
    params = list(pair.engine.module.parameters())
    x = pair.case.batch(here(0))[0]
    before = [p._version for p in params]
    gathers = pair.engine.runtime.counts.gathers
    with torch.no_grad():
        pair.engine(x)
        pair.engine(x)
    assert pair.engine.runtime.counts.gathers > gathers
    with deepspeed.zero.GatheredParameters(params):
        pass
    after = [p._version for p in params]
    pair.finish()
    return before, after


def test_invariant_i1_refills_keep_version_counters(pool2: RankPool) -> None:
    for before, after in pool2.run(versions_over_refills):
        assert before == after


def a_view_saved_before_a_release() -> tuple[float, bool]:
    """The transposed weight that autograd saves in the forward is valid again in the backward; an edit in between is
    noticed.
    """
    pair = Lockstep(case_named("used_twice"), make_config(3, zero={"param_persistence_threshold": 0}))
    for step in range(2):
        pair.step(step)
    loss = pair.case.seeded_loss(pair.engine, here(5))[0]
    with deepspeed.zero.GatheredParameters(list(pair.engine.module.parameters()), modifier_rank=0), torch.no_grad():
        for param in pair.engine.module.parameters():
            param.add_(1.0)
    try:
        pair.engine.backward(loss)
        noticed = False
    except RuntimeError as error:
        noticed = "modified by an inplace operation" in str(error)
    return pair.finish()[0], noticed


def test_invariant_i1_saved_views_are_valid_again_and_guarded(pool2: RankPool) -> None:
    for error, noticed in pool2.run(a_view_saved_before_a_release):
        assert error <= 1e-6
        assert noticed, "an edit between forward and backward went unseen: refills hide version counters"
