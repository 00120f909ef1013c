"""Ranks forked from a process in which Transformer Engine's extension is emulated: see `te_emulated`."""

from __future__ import annotations

import os

from benchmarks.one_gpu import fused_accumulation
from megatron_hexi.platform import cpu_device, select
from tests.megatron import forked, te_emulated

#: Defaults of Megatron that the CPU platform replaces, and that the emulation carries out.
_CARRIED_OUT = {"transformer_impl", "apply_rope_fusion", "gradient_accumulation_fusion"}

if __name__ == "__main__":
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    fused_accumulation.install()
    te_emulated.install()
    # Transformer Engine asks whether CUDA is there as Megatron does.
    callers, arguments = vars(cpu_device), vars(select)
    callers["MEGATRON_MODULES"] = (*callers["MEGATRON_MODULES"], "transformer_engine.")
    arguments["_DEFAULTS"] = tuple(
        default for default in arguments["_DEFAULTS"] if default[0] not in _CARRIED_OUT
    )
    forked.serve(te_emulated.use_torch_in_megatron)
