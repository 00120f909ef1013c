"""An entry point that writes the logits of the first batch and ends, in place of training."""

from __future__ import annotations

import sys
from typing import Any

import torch

import megatron_hexi.pretrain_gpt
from megatron_hexi.megatron import gpt


def main() -> None:
    gpt.forward_step = _write_logits
    megatron_hexi.pretrain_gpt.main()


def _write_logits(data_iterator: Any, model: torch.nn.Module) -> Any:
    batch = gpt.get_batch(data_iterator, None)
    with torch.no_grad():
        logits = model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    torch.save({"tokens": batch["tokens"], "logits": logits}, "logits.pt")
    sys.exit(0)
