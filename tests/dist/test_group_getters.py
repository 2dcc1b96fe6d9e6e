"""The getters of ``deepspeed.utils.groups`` cut the ranks as the latest engine does, and each says one thing alike."""

from itertools import product
from typing import Any

import deepspeed
from deepspeed import comm
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from tests.harness import pipes
from tests.harness.decoders import Llama
from tests.harness.pool import RankPool
from tests.harness.training import ADAMW

_AXES = ("pp", "dp", "sp", "tp")
_FAMILIES = {
    "data_parallel": "dp",
    "sequence_parallel": "sp",
    "sequence_data_parallel": "dp sp",
    "tensor_model_parallel": "tp",
    "model_parallel": "tp",
    "pipe_parallel": "pp",
}
# Sizes of the axes, the last of which has neighbours.
_CUTS = {"alone": (1, 4, 1, 1), "tp": (1, 2, 1, 2), "sp": (1, 2, 2, 1), "pp": (2, 2, 1, 1)}
_EXPERTS = {"alone": ([0, 1], [0, 2]), "tp": ([0, 1], [0, 2]), "sp": ([0, 1], [0, 2]), "pp": ([0, 1], [0])}


def _engine(cut: str) -> Any:
    if cut == "pp":
        return pipes.start(
            PipelineModule(pipes.layers(4), num_stages=2, loss_fn=pipes.cross_entropy), pipes.config(1, 2)
        )
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW}
    if cut == "tp":
        settings["tensor_parallel"] = {"autotp_size": 2}
    mesh = (2, 2) if cut == "sp" else None
    return deepspeed.initialize(model=Llama(), config=settings, mesh_param=mesh)[0]


def _answers(cut: str) -> dict[str, tuple[list[int], int, int]]:
    """Of each family the ranks of its group, its size, and this rank's place; both spellings say the same."""
    engine, said = _engine(cut), {}
    for family in _FAMILIES:
        of = {what: getattr(groups, f"get_{family}_{what}")() for what in ("group", "world_size", "rank")}
        hidden = {what: getattr(groups, f"_get_{family}_{what}")() for what in of}
        assert hidden == of
        ranks = comm.get_all_ranks_from_group(of["group"])
        assert (comm.get_world_size(of["group"]), comm.get_rank(of["group"])) == (of["world_size"], of["rank"])
        said[family] = ranks, of["world_size"], of["rank"]
    experts = [groups._get_expert_parallel_group("ep_size_2"), groups._get_expert_data_parallel_group("ep_size_2")]
    said["experts"] = [comm.get_all_ranks_from_group(group) for group in experts], 0, 0
    said["firsts"] = [groups._get_broadcast_src_rank(), groups.get_tensor_model_parallel_src_rank()], 0, 0
    sequence = engine.get_sequence_parallel_group()
    assert (sequence is None) == (_CUTS[cut][2] == 1) and sequence is engine.seq_parallel_group
    assert engine.dp_world_size == _CUTS[cut][1] and engine.mp_world_size == _CUTS[cut][3]
    engine.destroy()
    return said


def test_every_family_under_every_cut(pool4: RankPool) -> None:
    for cut, sizes in _CUTS.items():
        places = list(product(*map(range, sizes)))
        for rank, said in enumerate(pool4.run(_answers, cut)):
            for family, names in _FAMILIES.items():
                apart = [i for i, axis in enumerate(_AXES) if axis not in names.split()]
                ranks = [r for r, place in enumerate(places) if all(place[i] == places[rank][i] for i in apart)]
                assert said[family] == (ranks, len(ranks), ranks.index(rank)), (cut, rank, family)
            if rank == 0:
                assert tuple(said["experts"][0]) == _EXPERTS[cut], cut
            firsts = [said[family][0][0] for family in ("sequence_data_parallel", "tensor_model_parallel")]
            assert said["firsts"][0] == firsts
