"""Bytes by category, and what PyTorch's allocators make of them."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.tools.simulate import models
from deepspeed.tools.simulate.calibrate.clock import alternating, line
from deepspeed.tools.simulate.events import COMPUTE, DEVICE, PAGEABLE, PINNED, Allocate, Free
from deepspeed.tools.simulate.memory import CachingAllocator, Memory, pinned_bytes
from deepspeed.tools.simulate.models import Decoder, shape_of, subject_of

MIB = 1 << 20


def test_peak_and_categories_at_the_peak() -> None:
    memory = Memory()
    for event in (
        Allocate(1, 100, DEVICE, COMPUTE, "states"),
        Allocate(2, 50, DEVICE, COMPUTE, "gathered"),
        Free(2),
        Allocate(3, 40, DEVICE, COMPUTE, "gradients"),
    ):
        memory.feed(event)
    usage = memory.of(DEVICE)
    assert (usage.now, usage.peak) == (140, 150)
    assert usage.at_peak == {"states": 100, "gathered": 50}
    memory.restart()
    assert usage.peak == 140 and usage.at_peak == {"states": 100, "gradients": 40}


def test_places_are_apart_and_empty_buffers_nothing() -> None:
    memory = Memory()
    for event in (Allocate(1, 3, PAGEABLE, -1), Allocate(2, 0, DEVICE, COMPUTE), Free(2), Free(99)):
        memory.feed(event)
    assert memory.of(PAGEABLE).now == 3 and memory.of(DEVICE).now == 0 and memory.allocator.allocated == 0


@pytest.mark.parametrize(("asked", "taken"), [(0, 1), (1, 1), (4096, 4096), (4097, 8192), (3 * MIB, 4 * MIB)])
def test_pinned_memory_is_rounded_to_a_power_of_two(asked: int, taken: int) -> None:
    assert pinned_bytes(asked) == taken
    memory = Memory()
    memory.feed(Allocate(1, asked, PINNED, -1))
    assert memory.of(PINNED).now == (taken if asked else 0)


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # small ones share segments of 2 MiB
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),  # middling ones those of 20 MiB
        (10 * MIB, 10 * MIB, 10 * MIB),  # large ones have their own, in steps of 2 MiB
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_segments_as_the_allocator_of_cuda_takes_them(asked: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, asked, COMPUTE)
    # a remainder of at most 1 MiB stays with a large block
    assert allocator.allocated in (allocated, reserved if reserved - allocated <= MIB else allocated)
    assert allocator.reserved == reserved


def test_a_freed_block_serves_again_on_its_own_stream_only() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 12 * MIB, COMPUTE)
    allocator.free(1)
    allocator.allocate(2, 12 * MIB, COMPUTE)
    assert allocator.reserved == 12 * MIB
    allocator.free(2)
    allocator.allocate(3, 12 * MIB, 1)
    assert allocator.reserved == 24 * MIB


def test_best_fit_splits_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 40 * MIB, COMPUTE)
    allocator.free(1)
    for buffer in (2, 3, 4):
        allocator.allocate(buffer, 10 * MIB, COMPUTE)
    assert allocator.reserved == 40 * MIB
    for buffer in (3, 2, 4):
        allocator.free(buffer)
    allocator.allocate(5, 40 * MIB, COMPUTE)  # all four pieces are one again
    assert (allocator.reserved, allocator.allocated) == (40 * MIB, 40 * MIB)


def test_an_unlucky_hole_costs_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 40 * MIB, COMPUTE)
    allocator.free(1)
    allocator.allocate(2, 2 * MIB, COMPUTE)  # sits in the middle of what was free
    allocator.allocate(3, 40 * MIB, COMPUTE)
    assert allocator.reserved == 80 * MIB


def test_an_emptied_cache_gives_whole_segments_back() -> None:
    allocator = CachingAllocator()
    for buffer in (1, 2):
        allocator.allocate(buffer, 12 * MIB, COMPUTE)
    allocator.free(1)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 12 * MIB


def test_a_full_device_takes_back_what_is_cached_before_it_is_out_of_memory() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.allocate(1, 60 * MIB, 0)
    allocator.free(1)
    allocator.allocate(2, 80 * MIB, 0)  # the block of 60 is no help
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (80 * MIB, 80 * MIB, 1)
    allocator.allocate(3, 60 * MIB, 0)
    assert allocator.peak_reserved == 140 * MIB and allocator.retries == 2  # which is more than there is


def test_any_sequence_ends_with_nothing_allocated_and_everything_in_whole_segments() -> None:
    rng, allocator, live = random.Random(3), CachingAllocator(), list[int]()
    for buffer in range(2000):
        allocator.allocate(buffer, rng.choice([100, 5_000, 700_000, 3 * MIB, 30 * MIB]), rng.randrange(2))
        live.append(buffer)
        while len(live) > 40:
            allocator.free(live.pop(rng.randrange(len(live))))
        assert allocator.allocated <= allocator.reserved
    for buffer in live:
        allocator.free(buffer)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


# -- simulate models ------------------------------------------------------------------------------------------------
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
# family -> (what its configuration says, parameters of the published model)
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3 8B": (LLAMA, 8_030_261_248),
    "Mistral 7B": (LLAMA | {"model_type": "mistral", "vocab_size": 32000}, 7_241_732_096),
    "GPT-2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
               "n_positions": 1024}, 124_439_808),
    "GPT-NeoX 20B": ({"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
                      "num_hidden_layers": 44, "num_attention_heads": 64, "vocab_size": 50432,
                      "max_position_embeddings": 2048}, 20_554_567_680),
    "Gemma 7B": ({"model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
                  "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000,
                  "max_position_embeddings": 8192}, 8_537_680_896),
    "Qwen3 0.6B": ({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                    "max_position_embeddings": 40960, "tie_word_embeddings": True}, 596_049_920),
    "Qwen2.5 7B": ({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
                    "max_position_embeddings": 32768, "tie_word_embeddings": False}, 7_615_616_512),
    "Mixtral 8x7B": (LLAMA | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8,
                              "num_experts_per_tok": 2}, 46_702_792_704),
    "Qwen3 30B-A3B": ({"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
                       "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128,
                       "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
                       "max_position_embeddings": 40960}, 30_532_122_624),
    "Qwen2 57B-A14B": ({"model_type": "qwen2_moe", "hidden_size": 3584, "num_hidden_layers": 28, "num_experts": 64,
                        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151936,
                        "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "intermediate_size": 18944,
                        "shared_expert_intermediate_size": 20480, "max_position_embeddings": 32768}, 57_409_210_368),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_parameters(name: str) -> None:
    config, parameters = PUBLISHED[name]
    with torch.device("meta"):
        model = Decoder(shape_of(config, name))
    counted = sum(p.numel() for p in model.parameters())
    assert counted == pytest.approx(parameters, rel=2e-4)  # biases and norms of queries may differ
    assert counted == parameters or not {"Llama", "Qwen3"} & set(name.split())


@pytest.mark.parametrize("head", [0, 24])
def test_heads_may_be_wider_than_their_share_of_the_model(head: int) -> None:
    config = {"model_type": "gemma", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 16, "intermediate_size": 8} | (
        {"head_dim": head} if head else {}
    )
    model = Decoder(shape_of(config, "mine"))
    assert model.blocks[0].attention.query.weight.shape == (4 * (head or 8), 32)
    assert model.blocks[0].attention.key.weight.shape == (2 * (head or 8), 32)
    model(torch.zeros(2, 6, dtype=torch.int64)).backward()
    assert model.blocks[0].attention.out.weight.grad is not None


WRONG: dict[str, tuple[Any, str]] = {
    "an encoder": (LLAMA | {"model_type": "bert"}, "a plain decoder is simulated, which 'bert' is not; install"),
    "a family nobody knows": (LLAMA | {"model_type": "blorp"}, "which 'blorp' is not.*Known: .*llama"),
    "experts": (LLAMA | {"num_local_experts": 8}, r"which experts \(num_local_experts\) is not"),
    "other experts": (LLAMA | {"model_type": "deepseek_v3", "n_routed_experts": 8}, "which experts .n_routed_experts."),
    "no experts": (LLAMA | {"model_type": "qwen3_moe"}, "num_experts_per_tok must be from 1 to the number of its"),
    "layers without experts": (
        LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
        "which experts .num_experts. is not",
    ),
    "two halves": ({"model_type": "t5", "is_encoder_decoder": True, "d_model": 8}, "an encoder-decoder .'t5'."),
    "two halves that do not say so": ({"model_type": "mbart", "d_model": 8}, "an encoder-decoder .'mbart'."),
    "local attention": (LLAMA | {"model_type": "gpt_neo"}, "which 'gpt_neo' is not; install"),
    "a word": (LLAMA | {"hidden_size": "big"}, "mine.json: hidden_size must be a whole number from 1 on, not 'big'"),
    "a negative": (LLAMA | {"hidden_size": -256}, "hidden_size must be a whole number from 1 on, not -256"),
    "a half": (LLAMA | {"num_key_value_heads": 2.5}, "num_key_value_heads must be a whole number from 1 on, not 2.5"),
    "heads that do not divide": (LLAMA | {"num_attention_heads": 30}, "30 heads .8 of keys. do not divide 4096"),
    "a text that is a list": ({"text_config": [1]}, "describes no decoder: hidden_size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_decoder_is_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)
    config, expected = WRONG[name]
    Path("mine.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=expected):
        subject_of("mine.json", samples=1, sequence=None, recompute=False)


def test_a_table_of_positions_limits_the_sequence_and_rotations_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)
    path = tmp_path / "mine.json"
    for family, fits in (("gpt2", False), ("gpt_neox", True), ("llama", True)):
        path.write_text(json.dumps(LLAMA | {"model_type": family}))
        if fits:
            assert subject_of(str(path), samples=1, sequence=9000, recompute=False).name == str(path)
        else:
            with pytest.raises(UsageError, match="8192 positions, fewer than the sequence of 9000"):
                subject_of(str(path), samples=1, sequence=9000, recompute=False)


# -- calibrate fits -------------------------------------------------------------------------------------------------
SIZES = [64e3, 1e6, 16e6, 256e6]


def test_a_line_finds_latency_and_rate() -> None:
    start, slope = line(SIZES, [5e-6 + size / 20e9 for size in SIZES])
    assert start == pytest.approx(5e-6) and 1 / slope == pytest.approx(20e9)


def test_a_line_counts_relative_errors() -> None:
    """A large size that takes 10 % longer moves the latency no more than 10 %."""
    seconds = [5e-6 + size / 20e9 for size in SIZES]
    start, _ = line(SIZES, [*seconds[:3], 1.1 * seconds[3]])
    assert start == pytest.approx(5e-6, rel=0.1)


@pytest.mark.parametrize("seconds", [[1e-5, 1e-3, 1e-2, 0.3], [3e-3, 2e-3, 2e-3, 1e-3], [1e-4] * 4])
def test_what_a_line_gives_is_always_positive(seconds: list[float]) -> None:
    start, slope = line(SIZES, seconds)
    assert start > 0 and slope > 0


def test_a_line_through_one_size_goes_through_the_origin_or_is_flat() -> None:
    start, slope = line([1e6], [1e-3])
    assert start + slope * 1e6 == pytest.approx(1e-3, rel=1e-3)


def test_cases_take_turns_and_every_other_round_backwards() -> None:
    order: list[str] = []

    def case(name: str, values: list[float]) -> object:
        def run() -> float:
            order.append(name)
            return values.pop(0)

        return run

    found = alternating({"a": case("a", [3.0, 1.0, 2.0]), "b": case("b", [9.0, 9.0, 5.0])}, 3)  # type: ignore[dict-item]
    assert found == {"a": 2.0, "b": 9.0} and "".join(order) == "abbaab"
