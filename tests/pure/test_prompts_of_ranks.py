"""Calls of ``generate`` travel to other ranks whole, and their lengths are known before."""

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.tensor.prompts import GenerateCall, check_alike, lengths, settings_of

END, FILL = 7, 9


class GenerationMixin:
    """Has the arguments of the class of this name in Transformers."""

    def generate(self, inputs: Any = None, generation_config: Any = None, streamer: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError


class Model(GenerationMixin, nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.generation_config = Settings(**{"eos_token_id": END, "pad_token_id": FILL, **settings})


class Settings:
    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        vars(self).update(changes)

    def to_dict(self) -> dict[str, Any]:
        return {"max_length": 20, **self.changes}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.changes


def call(*rows: list[int], **kwargs: Any) -> GenerateCall:
    return GenerateCall((torch.tensor(rows),), {"max_new_tokens": 3, **kwargs})


def test_arguments_travel_with_their_values_alone() -> None:
    storage = torch.arange(10_000)
    packed = GenerateCall((storage[:2],), {"deep": [{"mask": storage[5:6]}], "words": "a"}).packed()
    assert len(packed) < 5_000
    args, kwargs = GenerateCall.unpacked(packed, torch.device("cpu"))
    assert args[0].tolist() == [0, 1] and kwargs["deep"][0]["mask"].tolist() == [5] and kwargs["words"] == "a"
    with pytest.raises(UsageError, match="cannot be sent to them"):
        GenerateCall((), {"streamer": lambda: 0}).packed()


def test_models_that_generate_otherwise_are_an_error_of_both() -> None:
    texts = [settings_of(model, model.generate) for model in (Model(), Model(), Model(top_k=5), Model().eval())]
    check_alike(texts[:2], (4, 5))
    for other in texts[2:]:
        with pytest.raises(
            UsageError, match=r"ranks 4 and 6 share .* other generation_configs, or one is in train mode"
        ):
            check_alike([*texts[:2], other], (4, 5, 6))


def test_lengths_of_a_call() -> None:
    model = Model()
    assert lengths(model, model.generate, call([1, 2])) == (2, 5)
    assert lengths(model, model.generate, call([1, 2], max_new_tokens=None, max_length=4)) == (2, 4)
