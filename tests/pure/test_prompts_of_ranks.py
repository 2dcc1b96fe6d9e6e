"""Prompts of several ranks become one batch only where each comes out as it would alone, and each gets its own rows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.tensor.prompts import GenerateCall, OneBatch, check_alike, lengths, one_batch, settings_of

END, FILL = 7, 9


class GenerationMixin:
    """Has the arguments of the class of this name in Transformers."""

    def generate(self, inputs: Any = None, generation_config: Any = None, streamer: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError


class Model(GenerationMixin, nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=settings.pop("is_encoder_decoder", False))
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


def made(model: Model, *calls: GenerateCall) -> OneBatch | None:
    return one_batch(model, model.generate, calls)


def test_shorter_prompts_are_filled_up_on_the_left_and_masked() -> None:
    batch = made(Model(), call([1, 2, 3], [FILL, 5, 6]), call([4]))
    assert batch is not None and batch.call.args == ()
    assert batch.call.kwargs["input_ids"].tolist() == [[1, 2, 3], [FILL, 5, 6], [FILL, FILL, 4]]
    assert batch.call.kwargs["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert batch.call.kwargs["max_new_tokens"] == 3
    given = torch.tensor([[1, 1, 1]])
    batch = made(Model(), call([FILL, 5, 6], attention_mask=given), call([4]))
    assert batch is not None and batch.call.kwargs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_where_rows_are_filled_up_by_the_token_that_ends_them_none_is_masked_for_it() -> None:
    batch = made(Model(pad_token_id=None), call([END, 5]), call([1, 2]))
    assert batch is not None and batch.fill == END and batch.call.kwargs["attention_mask"].all()


APART: dict[str, tuple[Model, GenerateCall, GenerateCall]] = {
    "other numbers of tokens": (Model(), call([1]), call([1], max_new_tokens=4)),
    "other dtypes": (
        Model(),
        call([1]),
        GenerateCall((torch.tensor([[1]], dtype=torch.int32),), {"max_new_tokens": 3}),
    ),
    "beams": (Model(), call([1], num_beams=2), call([1], num_beams=2)),
    "beams of the model's": (Model(num_beams=2), call([1]), call([1])),
    "a streamer": (Model(), call([1], streamer=print), call([1], streamer=print)),
    "embeddings": (Model(), *[GenerateCall((), {"inputs_embeds": torch.ones(1, 2, 4)})] * 2),
    "no batch": (Model(), GenerateCall((torch.tensor([1]),), {}), GenerateCall((torch.tensor([1]),), {})),
    "nothing to fill up with": (Model(pad_token_id=None, eos_token_id=None), call([1, 2]), call([1])),
    "a length of the whole": (Model(), call([1, 2], max_new_tokens=None), call([1], max_new_tokens=None)),
    "an encoder": (Model(is_encoder_decoder=True), call([1]), call([1])),
    "an object": (Model(), call([1], eos_token_id=torch.tensor(1)), call([1], eos_token_id=torch.tensor(1))),
    "a mask of another shape": (Model(), call([1], attention_mask=torch.ones(1, 2)), call([1])),
}


@pytest.mark.parametrize("name", APART)
def test_whatever_may_come_out_otherwise_is_left_apart(name: str) -> None:
    model, *calls = APART[name]
    assert made(model, *calls) is None


def test_a_generate_that_nobody_knows_is_left_apart() -> None:
    class Other(Model):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

    assert made(Other(), call([1]), call([1])) is None
    assert made(Model(output_scores=False), call([1]), call([1])) is not None


def part(ends: tuple[int, ...], fill: int | None, output: list[list[int]], index: int) -> list[list[int]]:
    """What a rank gets of the output for prompts of one and two tokens, one row and two."""
    batch = OneBatch(GenerateCall((), {}), (1, 2), (1, 2), 2, ends, fill)
    return batch.part(torch.tensor(output), index).tolist()


def test_each_rank_gets_its_rows_up_to_where_the_last_of_them_has_ended() -> None:
    output = [[FILL, 1, 5, END, FILL], [2, 2, END, FILL, FILL], [3, 3, END, FILL, FILL]]
    assert part((END,), FILL, output, 0) == [[1, 5, END]]
    assert part((END,), FILL, output, 1) == [[2, 2, END], [3, 3, END]]
    assert part((END, 5), FILL, output, 0) == [[1, 5, END, FILL]]  # 5 has ended nothing, as more came
    assert part((), None, output, 1) == output[1:]
    twice = [row for row in output for _ in range(2)]
    assert part((END,), FILL, twice, 1) == [[2, 2, END]] * 2 + [[3, 3, END]] * 2


def test_a_row_that_has_not_ended_keeps_the_others_whole() -> None:
    output = [[FILL, 1, 5, 5, 5], [2, 2, END, FILL, FILL], [3, 3, 4, 4, 4]]
    assert part((END,), FILL, output, 1) == output[1:]


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
