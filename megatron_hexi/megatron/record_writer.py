"""``--hexi-record PATH``: the record of a run, which rank 0 writes for ``hexi report``."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_hexi.elastic.training.goodput import present_round
from megatron_hexi.megatron.session import Session
from megatron_hexi.plan.recompute import spell_recompute, stated_recompute
from megatron_hexi.record import Interval, Start, append_to_record


class RecordWriter:
    """Writer of the job's record, if it has one: all ranks make a writer, rank 0 writes."""

    def __init__(self, session: Session, args: Namespace) -> None:
        self._path = None if args.hexi_record is None else Path(args.hexi_record)
        self._start = job_start(session, args)
        self._written = ""

    def write(self, interval: Interval, digest: str) -> None:
        """Append an interval, after the job's start if that is not written yet.

        A swapped plan begins with another start.

        Raises:
            HexiError: it cannot be written.
        """
        if self._path is None or dist.get_rank() != 0:
            return
        if self._written != digest:
            start = self._start
            if self._written:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                start = replace(start, digest=digest, started=now, swapped_at=interval.iterations[0])
            append_to_record(self._path, start)
            self._written = digest
        append_to_record(self._path, interval)


def job_start(session: Session, args: Namespace) -> Start:
    """Return the record's description of the job; a collective of all ranks."""
    devices: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(devices, torch.cuda.get_device_name())
    return Start(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        digest=session.given.digest,
        platform="cuda" if session.shard.positions.is_cuda else "cpu",
        devices=tuple(devices),
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        virtual_stages=args.virtual_pipeline_model_parallel_size or 1,
        recompute=spell_recompute(stated_recompute(args) or "none"),
        precision=(
            "fp8" if session.given.fp8_recipe else "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
        ),
        distributed_optimizer=args.use_distributed_optimizer,
        overlap_gradients=args.overlap_grad_reduce,
        sequence_parallel=args.sequence_parallel,
        round=present_round(),
    )
