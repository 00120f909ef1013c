"""Fine-tuning by Megatron Bridge on its ranks, in several jobs one after the other.

Run `bridge_tuning` by `bridge_run`, with a folder and a list of `Step` in JSON. On one rank it first writes
the data and trains the weights to begin with.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.data.sft_processing import PromptCompletionSFTPreprocessingConfig
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import ParallelLinearAdapter
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from tests.megatron.bridge_models_ranks import EXPERTS, OWN_LAYERS
from tests.megatron.bridge_ranks import ITERATIONS, LENGTH, SHARED, Results, by_size, configuration

#: Token that ends a text, of `NullTokenizer`.
END = 126


def write_data(folder: Path) -> None:
    """Write texts, and packs of them."""
    folder.mkdir()
    draw = random.Random(3)
    texts = [[draw.randrange(1, END) for _ in range(draw.randrange(4, 90))] for _ in range(64)]
    lines = []
    for text in texts:
        cut = draw.randrange(1, len(text) - 1)
        lines.append({"input": " ".join(map(str, text[:cut])), "output": " ".join(map(str, text[cut:]))})
    for name in ("training", "validation"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "packs.json").write_text("[]")
    for multiple in (1, 4):
        packs = [pack(draw, multiple) for _ in range(48)]
        numpy.save(folder / f"packs-{multiple}.npy", numpy.array(packs, dtype=object), allow_pickle=True)


def pack(draw: random.Random, multiple: int) -> dict[str, list[int]]:
    """Return texts in one sequence, each filled up to a multiple of tokens with one more for its label."""
    tokens: list[int] = []
    starts: list[int] = []
    mask: list[int] = []
    while True:
        text = [draw.randrange(1, END) for _ in range(draw.choice((3, 5, 11, 26, 40)))]
        length = -(-len(text) // multiple) * multiple + 1
        if len(tokens) - len(starts) + length - 1 > LENGTH:
            break
        starts.append(len(tokens))
        tokens += text + [END] * (length - len(text))
        answer = len(text) // 2
        mask += [int(answer <= place < len(text)) for place in range(length)]
    return {"input_ids": tokens, "seq_start_id": starts, "loss_mask": mask}


def base(iterations: int, has_experts: bool) -> ConfigContainer:
    """Return a job with a dense model, or one with experts."""
    config = configuration(iterations, **SHARED)
    for name, value in EXPERTS.items() if has_experts else ():
        setattr(config.model, name, value)
    if has_experts:
        config.model.transformer_layer_spec = OWN_LAYERS
    return config


def pretrained(out: Path, has_experts: bool) -> Path:
    """Return the folder of the weights that are tuned."""
    return out / ("pretrained-experts" if has_experts else "pretrained")


def tuning(
    out: Path, iterations: int, packs: int | None = None, peft: Any = None, has_experts: bool = False
) -> ConfigContainer:
    """Return a job of fine-tuning."""
    config = base(iterations, has_experts)
    specs = None
    if packs is not None:
        file = str(out / "data" / f"packs-{packs}.npy")
        specs = PackedSequenceSpecs(
            packed_sequence_size=LENGTH,
            packed_train_data_path=file,
            packed_val_data_path=file,
            packed_metadata_path=out / "data" / "packs.json",
            pad_seq_to_mult=packs,
        )
    config.dataset = GPTSFTDatasetConfig(
        seq_length=LENGTH,
        dataset_root=out / "data",
        preprocessing=PromptCompletionSFTPreprocessingConfig(
            prompt_column="input", completion_column="output", separator=""
        ),
        enable_offline_packing=specs is not None,
        offline_packing_specs=specs,
        dataset_kwargs={"pad_to_max_length": True} if packs == 4 else {},
        do_test=False,
        num_workers=0,
    )
    config.optimizer.adam_eps = 1e-5  # else the smallest gradients decide on their signs alone
    config.peft = peft
    config.checkpoint.dist_ckpt_optim_fully_reshardable = True
    config.checkpoint.pretrained_checkpoint = str(pretrained(out, has_experts))
    return config


def mask_documents() -> None:
    """Let Megatron's attention take documents, which it leaves to kernels of GPUs."""
    own = DotProductAttention.forward

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        packed_seq_params: Any,
        **kwargs: Any,
    ) -> Tensor:
        if packed_seq_params is None:
            return own(self, query, key, value, *args, **kwargs)
        return attend_in_documents(query, key, value, packed_seq_params)

    DotProductAttention.forward = forward


def attend_in_documents(query: Tensor, key: Tensor, value: Tensor, packed: Any) -> Tensor:
    """Attend within documents by a mask that is written out, [T, H, D]."""
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    place = torch.arange(len(query))
    document = torch.searchsorted(ends, place, right=True)
    seen = (document[:, None] == document[None]) & (place[:, None] >= place[None])
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


class Step(NamedTuple):
    """A job of fine-tuning.

    Args:
        result: name of the results.
        job: name in `JOBS`.
        plan: name of a plan; ``None``: Bridge alone.
        save: folder to save the job in when its first half is done.
        load: folder to go on from at that half.
        fault: name in `FAULTS`; two iterations show it.
    """

    result: str
    job: str
    plan: str | None = None
    save: str | None = None
    load: str | None = None
    fault: str | None = None


JOBS: dict[str, dict[str, Any]] = {
    "sft": {},
    "packed": {"packs": 4},
    "lora": {"packs": 1, "peft": LoRA(dim=4, alpha=8)},
    "dora": {"peft": DoRA(dim=4, alpha=8)},
    "canonical": {"peft": CanonicalLoRA(dim=4, alpha=8)},
    "experts": {
        "packs": 4,  # the balancing loss counts padding, which is the same to the plan's length
        "peft": LoRA(["linear_qkv", "linear_proj"], dim=4, alpha=8),
        "has_experts": True,
    },
}


def configure(out: Path, step: Step) -> ConfigContainer:
    """Return the configuration of a step."""
    config = tuning(out, 2 if step.fault else ITERATIONS, **copy.deepcopy(JOBS[step.job]))
    if step.plan is None:  # as a plan decides
        config.model.calculate_per_token_loss, config.ddp.average_in_collective = True, False
    if step.plan == "units":
        config.model.tensor_model_parallel_size, config.model.sequence_parallel = 2, True
    if step.plan == "pipeline":
        config.model.pipeline_model_parallel_size = 2
    if step.save:
        config.checkpoint.save, config.checkpoint.save_interval = str(out / step.save), ITERATIONS // 2
    if step.load:
        config.checkpoint.load, config.checkpoint.ckpt_step = str(out / step.load), ITERATIONS // 2
    return config


def shifted_boundary() -> Any:
    """Let the first document of each sequence end a token later."""
    from megatron_hexi.megatron import bridge_data

    def shifted(sample: dict[str, Any], length: int) -> dict[str, Any]:
        whole = whole_sequences(sample, length)
        whole["cu_seqlens_q"] = whole["cu_seqlens_q"].clone()
        whole["cu_seqlens_q"][:, 1] += 1
        return whole

    whole_sequences = bridge_data.whole_sequences
    return mock.patch.object(bridge_data, "whole_sequences", shifted)


def unsummed_gradients() -> Any:
    """Let each rank keep the gradients of its own rows."""
    return mock.patch.object(DistributedDataParallel, "finish_grad_sync", return_value=None)


FAULTS = {"boundary": shifted_boundary, "gradients": unsummed_gradients}


def begin(out: Path, has_experts: bool) -> None:
    """Write the data, and train the weights that are tuned."""
    if not (out / "data").is_dir():
        write_data(out / "data")
    config = base(1, has_experts)
    config.model.calculate_per_token_loss, config.ddp.average_in_collective = True, False
    config.checkpoint.save, config.checkpoint.save_interval = str(pretrained(out, has_experts)), 1
    pretrain(config, forward_step)


def main() -> None:
    folder, steps = sys.argv[1:]  # our options are taken out
    out = Path(folder)
    NullTokenizer.eos_id = END  # which data sets for fine-tuning ask for
    ParallelLinearAdapter._get_init_fn = lambda self, method: by_size
    dist.init_process_group("gloo")
    if dist.get_world_size() == 1:
        mask_documents()
        for has_experts in (False, True):
            wanted = any("has_experts" in JOBS[job] for _, job, *_ in json.loads(steps)) or not has_experts
            if wanted and not pretrained(out, has_experts).is_dir():
                begin(out, has_experts)
    else:
        from megatron_hexi import bridge
    for step in (Step(*entries) for entries in json.loads(steps)):
        config, results = configure(out, step), [Results(out / (step.fault or ""), step.result)]
        with FAULTS[step.fault]() if step.fault else contextlib.nullcontext():
            if step.plan is None:
                finetune(config, forward_step, callbacks=results)
            else:
                bridge.finetune(config, forward_step, plan=out / f"{step.plan}.yaml", callbacks=results)
