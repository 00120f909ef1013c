"""Writes what Megatron Bridge trains of encoders of images; run it by `bridge_models_run` with a folder.

The folder gets small models of `bridge_vision`, and ``frozen-RANKS.json``: for each kind of model and each of
`CASES` the numbers of trained and of frozen weights of the encoder on a rank, and the bytes of 16 patches
that it keeps for a backward pass. All ranks are one tensor-parallel unit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(out: Path) -> None:
    import torch
    import torch.distributed as dist
    from megatron.bridge.peft.lora import LoRA

    from tests.megatron import bridge_vision
    from tests.megatron.bridge_models_ranks import model_configuration, write_imported
    from tests.megatron.test_bridge_frozen import CASES, RANK

    def kept_bytes(encoder: Any) -> int:
        """Return the bytes of the tensors that a forward pass saves, without weights."""
        weights = {weight.untyped_storage().data_ptr() for weight in encoder.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        pixels = torch.zeros(16, encoder.patch_embed.proj.weight[0].numel())
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            encoder(pixels, torch.tensor([[1, 4, 4]]))
        return sum(storage.nbytes() for storage in kept.values())

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if ranks == 1:
        write_imported(out)
    found: dict[str, dict[str, tuple[int, int, int]]] = {}
    for kind in bridge_vision.KINDS:
        for case, fields in CASES.items():
            how = {"tensor_model_parallel_size": ranks, **fields}
            provider: Any = model_configuration(out, kind, None, imports=False, **how).model
            provider.finalize()
            if not found:
                provider.initialize_model_parallel(seed=1)
            (model,) = provider.provide_distributed_model(wrap_with_ddp=False, mixed_precision_wrapper=None)
            if case == "lora":
                (model,) = LoRA(dim=RANK)([model], training=True)
            encoder = model.visual if kind == "vision" else model.vision_model
            sizes = [0, 0]
            for weight in encoder.parameters():
                sizes[weight.requires_grad] += weight.numel()
            found.setdefault(kind, {})[case] = sizes[True], sizes[False], kept_bytes(encoder)
    if dist.get_rank() == ranks - 1:
        (out / f"frozen-{ranks}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
