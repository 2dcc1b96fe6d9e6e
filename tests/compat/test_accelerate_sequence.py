"""Sequence parallelism as clients switch it on, unmodified: Accelerate's and the Trainer's, equal to one process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.init import free_port
from tests.compat.common import forget_clients, gloo_accelerator, need, zero_block
from tests.compat.test_hf_sequence import ADAM, model_of
from tests.compat.test_hf_trainer import arguments, auto_config, history
from tests.harness.pool import RankPool

need("accelerate", "transformers")
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:.*all_gather is deprecated")]
TOKENS, CLIP = 16, 0.5


def rows_of(count: int) -> list[dict[str, Any]]:
    """Rows with prompts of different lengths, which have no loss."""
    rows = []
    for number in range(count):
        ids = (torch.arange(TOKENS) * (number + 3)) % 61 + 1
        labels = ids.clone()
        labels[: number % 11] = -100
        rows.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(TOKENS)})
    return rows


def parallelism(sp: int) -> Any:
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    data = dist.get_world_size() // sp
    replicas = {"dp_replicate_size": data} if data > 1 else {}
    return ParallelismConfig(sp_backend="deepspeed", sp_size=sp, sp_handler=handler, **replicas)


def whole_batches(batch: dict[str, Any], sp: int) -> list[dict[str, Any]]:
    """The batches that the groups of ``sp`` ranks have parts of."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, batch)
    feeds = [parts[first : first + sp] for first in range(0, len(parts), sp)]
    return [{name: torch.cat([part[name] for part in feed], 1) for name in feed[0]} for feed in feeds]


def gathered(value: torch.Tensor, group: Any) -> Any:
    """The values of the ranks of ``group``, differentiable; torch's older way fails on gloo for a part of the job."""
    if group.size() == dist.get_world_size():
        return torch.distributed.nn.functional.all_gather(value, group=group)
    return torch.distributed._functional_collectives.all_gather_tensor_autograd(value[None], 0, group)


def accelerated(sp: int, stage: int) -> dict[str, float]:
    """The loop of Accelerate's documentation beside one process that sees what all ranks see; the largest errors."""
    from accelerate import DeepSpeedPlugin

    from deepspeed.tools.verify.grads import scaled_error
    from deepspeed.utils import groups, safe_get_full_fp32_param

    forget_clients()
    plain, model = model_of("llama"), model_of("llama")
    plugin = DeepSpeedPlugin(hf_ds_config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero_block(stage), "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
    })  # fmt: skip
    acc = gloo_accelerator(plugin, parallelism_config=parallelism(sp))
    optimizer, beside = (torch.optim.AdamW(one.parameters(), **ADAM) for one in (model, plain))
    loader = torch.utils.data.DataLoader(rows_of(8), batch_size=1)
    model, optimizer, loader = acc.prepare(model, optimizer, loader)
    group, worst = groups._get_sequence_parallel_group(), dict.fromkeys(("loss", "norm"), 0.0)
    for batch in loader:
        whole = whole_batches(batch, sp)
        targets = batch["shift_labels"]
        logits = model(**batch).logits
        loss = acc.unwrap_model(model).loss_function(logits=logits, labels=None, shift_labels=targets, vocab_size=64)
        losses = gathered(loss, group)
        counts = gathered((targets != -100).sum(), group)
        pairs = zip(losses, counts, strict=True)
        loss = sum(one * count for one, count in pairs if count > 0) / sum(counts)
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        wanted = [plain(**{**one, "labels": one["shift_labels"]}).loss for one in whole]
        beside.zero_grad()
        (sum(wanted) / len(wanted)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
        beside.step()
        mine = wanted[dist.get_rank() // sp]
        worst["loss"] = max(worst["loss"], abs(float(loss.detach() - mine.detach())))
        worst["norm"] = max(worst["norm"], abs(model.get_global_grad_norm() / norm - 1))
    theirs = dict(plain.named_parameters())
    worst["parameter"] = max(
        scaled_error(safe_get_full_fp32_param(param), theirs[name].detach())
        for name, param in model.module.named_parameters()
    )
    model.destroy()
    forget_clients()
    return worst


@pytest.mark.parametrize(("sp", "stage"), [(2, 3), (4, 1), (2, 0)])
def test_accelerate_trains_as_one_process(sp: int, stage: int, pool4: RankPool) -> None:
    for found in pool4.run(accelerated, sp, stage, time_limit=120):
        assert max(found.values()) < 3e-6, found


def trained(folder: str, sp: int, stage: int) -> tuple[list[float], list[float]]:
    """The Trainer's losses in training and evaluation."""
    from transformers import Trainer

    options: dict[str, Any] = {"parallelism_config": parallelism(sp)} if sp > 1 else {}
    config = auto_config(stage, own_optimizer=True)
    # The Trainer weighs the micro-batches of a window by their tokens at size 1 only: windows of one.
    args = arguments(
        folder, config, per_device_train_batch_size=1, max_steps=6, gradient_accumulation_steps=1, **options
    )
    made = Trainer(model=model_of("llama"), args=args, train_dataset=rows_of(8), eval_dataset=rows_of(4))
    made.get_train_dataloader()
    made.train()
    evaluated = made.evaluate()["eval_loss"]
    losses = history(made, "loss")
    made.model_wrapped.destroy()
    forget_clients()
    return losses, [evaluated]


def test_the_trainer_with_a_parallelism_config_trains_and_evaluates_as_one_rank(
    tmp_path: Path, pool2: RankPool, pool1: RankPool
) -> None:
    wanted = pool1.run(trained, str(tmp_path / "one"), 1, 2, time_limit=120)[0]
    for found in pool2.run(trained, str(tmp_path / "two"), 2, 2, time_limit=120):
        assert found[0] == pytest.approx(wanted[0], abs=2e-5)
        assert found[1] == pytest.approx(wanted[1], abs=2e-5)


def registered_by_path(folder: str) -> Any:
    """The published loop: attention is registered before there is a model, and the mpu is passed on."""
    from transformers import AutoModelForCausalLM

    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups

    deepspeed.init_distributed(verbose=False)
    options = {"core_attn_implementation": "sdpa", "micro_batch_size": 1, "seq_length": TOKENS}
    mpu = UlyssesSPAttentionHF.register_with_transformers(folder, sequence_parallel_size=2, **options)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero_block(3), "optimizer": {"type": "Adam"}}
    refused = []
    for size in (1, 4):
        try:
            model = AutoModelForCausalLM.from_pretrained(folder)
            deepspeed.initialize(model=model, config={**config, "sequence_parallel_size": size}, mpu=mpu)
        except ValueError as error:
            refused.append(str(error))
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = deepspeed.initialize(model=model, config=config, mpu=mpu)[0]
    group, losses = groups._get_sequence_parallel_group(), []
    row = [{name: value[None] for name, value in rows_of(1 + dist.get_rank())[-1].items()}]
    for batch in UlyssesSPDataLoaderAdapter(row, groups._get_sequence_parallel_rank(), group, 2, engine.device):
        targets = batch["shift_labels"]
        loss = engine.module.loss_function(engine(**batch).logits, None, 64, shift_labels=targets)
        count = (targets != -100).sum()
        loss = (gathered(loss, group) * gathered(count, group)).sum() / gathered(count, group).sum()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    sizes = engine.train_batch_size(), engine.mesh.zero.size, mpu.get_data_parallel_world_size()
    engine.destroy()
    return losses, sizes, refused


def test_the_published_loop_registers_before_the_model_is_loaded(tmp_path: Path, pool4: RankPool) -> None:
    model_of("llama").save_pretrained(tmp_path)
    plain = model_of("llama")
    found = pool4.run(registered_by_path, str(tmp_path), time_limit=120)
    for rank, (losses, sizes, refused) in enumerate(found):
        row = rows_of(1 + rank // 2 * 2)[-1]
        first = plain(**{name: value[None] for name, value in row.items()}).loss
        assert losses[0] == pytest.approx(float(first.detach()), abs=2e-6) and len(losses) == 2
        assert sizes == (2, 4, 2)
        assert "sequence_parallel_size is 1" in refused[0] and "sequence_parallel_size is 4" in refused[1]


def refusals(folder: str) -> list[str]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    register, said = UlyssesSPAttentionHF.register_with_transformers, []
    model, linear = model_of("llama"), model_of("llama")
    linear.config.layer_types = ["full_attention", "linear_attention"]
    for first, changes in (
        (folder, {"core_attn_implementation": "eager"}),
        (model, {"core_attn_implementation": "flash_attention_2"}),
        (model, {"seq_length_is_variable": False}),
        (model, {"seq_length_is_variable": False, "seq_length": 7}),
        (model, {"sequence_parallel_size": 8}),
        (folder, {"sequence_parallel_size": 8}),
        (linear, {}),
    ):
        options = {"core_attn_implementation": "sdpa", "sequence_parallel_size": 2, "micro_batch_size": 1, **changes}
        with pytest.raises(ValueError) as caught:
            register(first, **options)
        said.append(str(caught.value))
    assert register(model, "sdpa", 1, 1) is None
    return said


def test_registration_refuses_what_cannot_be_divided(tmp_path: Path, pool2: RankPool) -> None:
    model_of("llama").save_pretrained(tmp_path)
    wanted = [
        "attention 'eager' cannot be divided",
        "the model was loaded with attention 'sdpa'",
        "seq_length is None",
        "seq_length is 7",
        "has 4 attention heads, and each rank needs one",
        "8 ranks, but 4 attention heads",
        "layers of the kind linear_attention",
    ]
    for said in pool2.run(refusals, str(tmp_path)):
        assert [text in one for text, one in zip(wanted, said, strict=True)] == [True] * len(wanted), said


def _tiny_llama(folder: Path) -> None:
    """A model and a tokenizer in files, where a script expects one of a hub."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def test_the_script_of_accelerate_runs(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("accelerate.test_utils.scripts.external_deps.test_ds_alst_ulysses_sp")
    if spec is None or spec.origin is None:
        pytest.skip("this Accelerate has no such script")
    _tiny_llama(tmp_path / "hf-internal-testing" / "tiny-random-LlamaForCausalLM")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2"]
    command += ["--main_process_port", str(free_port()), "--zero_stage", "3", "--mixed_precision", "no"]
    command += ["--gradient_accumulation_steps", "1", "--num_machines", "1", "--dynamo_backend", "no", spec.origin]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("loss=tensor(") >= 4
