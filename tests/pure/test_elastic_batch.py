"""One global batch for many numbers of ranks: the elasticity block, and what its errors say."""

import re
from typing import Any

import pytest

import deepspeed.elasticity as elasticity
from deepspeed.config import load_config
from deepspeed.config.model.elastic import best_batch, kept_sizes
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.launcher.elastic.sizes import Elastic, share_ranks

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


@pytest.mark.parametrize(
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
