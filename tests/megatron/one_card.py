"""Training of several ranks on one GPU, started like `tests.megatron.forked`'s runs on the CPU.

What is above the wire is as on a cluster; times mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.one_gpu.ranks import PLAIN, Ranks
from tests.megatron.forked import ENTRY, Outcome, Trainer

#: Compiling would take longer than training; one channel is enough for tiny messages. Transformer Engine
#: multiplies fp32 in TF32 unless cuBLAS is told otherwise.
_VARIABLES = {"TORCHDYNAMO_DISABLE": "1", "NCCL_MAX_NCHANNELS": "1", "NVIDIA_TF32_OVERRIDE": "0"}


class OneCard(Trainer):
    """Runs all ranks of a job on the first GPU, with Megatron's own layers."""

    words: tuple[str, ...] = (*PLAIN, "--hexi-platform", "cuda")

    def launch(
        self,
        folder: Path,
        *,
        ranks: int,
        args: Sequence[str | Path],
        entry: str = ENTRY,
        timeout: float = 200.0,
    ) -> Outcome:
        """See `Trainer.launch`."""
        ended = Ranks(folder, entry, args, ranks, [_VARIABLES] * ranks).run(timeout)
        return Outcome(ended.codes, ended.logs)


class OneCardWithTe(OneCard):
    """Likewise, with Transformer Engine's layers, Megatron's default.

    Checkpoints of Megatron's own layers, which references start from, lack the state that Transformer Engine
    keeps for fp8.
    """

    words = ("--dist-ckpt-strictness", "ignore_all", "--hexi-platform", "cuda")
