"""Tokens/s per GPU, as model FLOP/s, and as a part of the datasheet's rate (MFU)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_hexi.cluster import Device
from megatron_hexi.models.documents import Documents
from megatron_hexi.models.job import Job
from megatron_hexi.models.model import Model


def model_flops(
    model: Model,
    context: int,
    counting: Literal["full", "half"] = "half",
    documents: Documents | None = None,
) -> float:
    """Return the model FLOPs of one token, forward and backward, without recomputation.

    As Megatron counts them: three products of 2 FLOPs a weight, one forward and two backward. Of routed
    experts only those count to which a token goes.

        6 (layers x weights of a layer's matrices + hidden x vocabulary) + 12 x layers x heads x D x keys

    where `keys` is the number of keys that a token sees: the context, half of it, or the window. A block of
    multi-token prediction is a layer more, a projection of 2 x hidden to hidden, and the vocabulary once
    more. Scans: `State.counted_flops`.

    Args:
        model: the model; its vocabulary counts without padding.
        counting: part of the pairs of query and key that counts: all (``full``), or those of causal attention
            (``half``), which Megatron counts since core 0.15.
        documents: documents of which the context is packed, which attend within themselves; ``None``: one.
    """
    kinds = list(zip(model.kinds, model.layers_run, strict=True))
    matrices = model.hidden_size * model.vocab_size * (1 + model.mtp_layers)
    matrices += model.mtp_layers * model.projection_params()
    mixing = 0.0
    packed = ((1.0, context),) if documents is None else documents.classes(context)
    for kind, layers in kinds:
        active = sum(experts.active for experts in kind.routed) * kind.expert_params()
        matrices += layers * (kind.matrix_params() + active)
        # A window counts as a shorter context.
        seen = sum(
            share * (min(length, kind.span.size) if counting == "full" else kind.span.keys_seen(length))
            for share, length in packed
        )
        mixing += layers * kind.mixer.mixing_flops(kind, seen)
    return float(6 * matrices + 3 * mixing)


@dataclass(frozen=True)
class Throughput:
    """The speed of a training, in several units.

    Args:
        tokens_per_s: tokens/s of all GPUs together.
        gpus: number of GPUs.
        flops_per_token: model FLOPs of a token (`model_flops`).
        peak_tflops: TFLOP/s of all GPUs together by their datasheets; ``None``: a GPU has no rate for the
            precision.
    """

    tokens_per_s: float
    gpus: int
    flops_per_token: float
    peak_tflops: float | None

    @classmethod
    def of(cls, job: Job, devices: Sequence[Device], tokens_per_s: float) -> Throughput:
        """Return the throughput of a job that reaches these tokens/s on some GPUs."""
        rates = [getattr(device.nominal, job.precision) for device in devices]
        peak = None if None in rates else float(sum(rates))
        flops = model_flops(job.model, job.seq_length, documents=job.documents)
        return cls(tokens_per_s, len(devices), flops, peak)

    def at(self, tokens_per_s: float) -> Throughput:
        """Return the throughput of the same job on the same GPUs at other tokens/s."""
        return replace(self, tokens_per_s=tokens_per_s)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Mean tokens/s of a GPU."""
        return self.tokens_per_s / self.gpus

    @property
    def model_tflops_per_gpu(self) -> float:
        """Mean model TFLOP/s of a GPU, without recomputation."""
        return self.tokens_per_s * self.flops_per_token / self.gpus / 1e12

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s as a part of the datasheet's dense rate; ``None``: the rate is not known."""
        if self.peak_tflops is None:
            return None
        return self.tokens_per_s * self.flops_per_token / 1e12 / self.peak_tflops

    @property
    def facts(self) -> dict[str, float | None]:
        """Figures by name, which JSON output has next to ``tokens_per_s``."""
        return {
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "mfu": self.mfu,
        }
