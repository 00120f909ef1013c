"""Counts a GPT's weights as Megatron builds it: word lists as JSON lines on stdin, a number or an error back.

Megatron's own parser and checks make its model, on one rank; nothing of the planner is used. Weights are on
the meta device, without memory, so that models may have the sizes in which they are trained.
"""

from __future__ import annotations

import json
import os
import sys
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import import_module
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

import megatron_hexi.adaptor  # noqa: F401  (before Megatron: torch.cuda on a CPU)
from tests.megatron.latent_spec import WrittenOut


def weigh(words: list[str]) -> int:
    """Return the number of weights of the model that Megatron builds from its arguments.

    Biases of routers are among them, which are buffers, as no gradient changes them.
    """
    sys.argv = ["weighing.py", *words]
    args = parse_args()
    validate_args(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    padded = args.padded_vocab_size or -(-args.vocab_size // multiple) * multiple
    config = core_transformer_config_from_args(args)
    kind = {"normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm}
    local = get_gpt_decoder_block_spec(config, False, **kind)
    if args.multi_latent_attention:  # Megatron's local attention takes no values of another size than keys
        for layer in local.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = WrittenOut
    layers = local if args.spec in (None, ["local"]) else import_module(args.spec)
    further = None
    if args.mtp_num_layers:
        further = get_gpt_mtp_block_spec(config, layers.layer_specs[-1], use_transformer_engine=False)
    # Megatron's linear layers make their weights on the current device, others on the default one.
    meta = torch.device("meta")
    with patch.object(torch.cuda, "current_device", return_value=meta), meta:
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers,
            mtp_block_spec=further,
            vocab_size=padded,
            max_sequence_length=args.max_position_embeddings,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
        )
    biases = (buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias"))
    return sum(weight.numel() for weight in (*model.parameters(), *biases))


def main() -> None:
    """Answer each line until there is none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Megatron prints is no answer
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    for line in sys.stdin:
        try:
            answer: int | str = weigh(json.loads(line))
        except (AssertionError, RuntimeError, ValueError) as problem:
            answer = f"{type(problem).__name__}: {problem}"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
