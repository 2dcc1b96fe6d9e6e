"""The gate of sequences: a model whose sequences ranks share beside one process."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from deepspeed.tools.verify.driver import Driver, aligned, config_of, sizes_and_stages
from deepspeed.tools.verify.grads import KINDS, Cell, Errors, judge, run_cell
from deepspeed.tools.verify.models import Case, MicroBatch
from deepspeed.tools.verify.user_model import case_of

TOY = "deepspeed.tools.verify.layouts.sp:toy"
WIDTHS = (7, 9, 5, 2, 8, 8, 8, 8)


def toy() -> nn.Module:
    """Make a Llama with four heads, two of keys, in each of two blocks."""
    transformers = import_module("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, use_cache=False, **sizes)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def fed(case: Case, kind: str) -> Case:
    """Return the case with rows of an ``odd`` length, or of several documents, ``packed``. Raises ValueError."""

    def batch(place: MicroBatch) -> dict[str, Any]:
        given = case.batch(place)
        if isinstance(given, torch.Tensor):  # invented, and short
            ids = given.repeat(1, 4)
            given = {"input_ids": ids, "labels": ids}
        if not isinstance(given, dict) or not isinstance(given.get("input_ids"), torch.Tensor):
            raise ValueError(f"{case.name}: batch_fn must return a dict with 'input_ids' and 'labels' [rows, tokens]")
        rows, tokens = given["input_ids"].shape
        if kind == "odd":
            return {name: value[:, : tokens - 1 + tokens % 2] for name, value in given.items()}
        if kind == "packed":
            lengths = (tokens // 3, tokens - tokens // 3 - 1, 1)
            given = given | {"position_ids": torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)}
        return given

    return replace(case, batch=batch)


def train_sequences(cell: Cell, kind: str, steps: int) -> Errors:
    """Train on parts of sequences beside one process. Collective."""
    return run_cell(cell, steps, case=fed(case_of(cell.model, cell.config), kind))


def check_sequences(driver: Driver) -> int:
    """Compare sequences that ranks share (``sequence_parallel_size``) with plain PyTorch in one process, in fp32.

        ds_verify sp                                                       ZeRO 0-3 on a small Llama
        ds_verify sp --model my_model:build --config ds_config.json       your model under your configuration

    Each rank compares losses, gradients, their norm and the parameters after every step. Then rows have an odd number
    of tokens, then several documents, and keys go around a ring. The model is one of Transformers, and its batches are
    dicts with ``input_ids`` and ``labels``. Without ``sequence_parallel_size`` every size that divides the ranks is
    tried.
    """
    options, config = driver.options, config_of(driver.options)
    if options.model is None and find_spec("transformers") is None:
        raise ValueError("ds_verify sp: the small model is one of Transformers, which is not installed; give --model")
    block = config.get("sequence") or {}
    sizes, stages = sizes_and_stages(driver, config, config.get("sequence_parallel_size", 0))
    rows = [("whole", block.get("attention", "auto"), stage, sp) for stage in stages for sp in sizes]
    _, attention, stage, sp = rows[-1]
    rows += [(kind, attention, stage, sp) for kind in ("odd", "packed")]
    rows += [("packed", "ring", stage, sp)] * (attention == "auto")
    driver.say(f"{aligned(('rows', 'attention', 'stage', 'sp', *KINDS), WIDTHS)}  result")
    judged = partial(judge, tolerance=options.tolerance, columns=True)
    for kind, attention, stage, sp in rows:
        divided = {**config, "sequence_parallel_size": sp, "sequence": {**block, "attention": attention}}
        cell = Cell(options.model or TOY, stage=stage, config=divided)
        label = aligned((kind, attention, "-" if stage is None else stage, sp), WIDTHS)
        driver.on_ranks(label, options.ranks, judged, train_sequences, cell, kind, options.steps)
    return driver.end(f"{len(rows)} rows on {driver.conditions()}, tolerance {options.tolerance:g}", "all pass")
