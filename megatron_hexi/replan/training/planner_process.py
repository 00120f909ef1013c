"""The planner's process as rank 0 uses it: asked, and its answers read, without waiting."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from argparse import Namespace
from typing import Any

from megatron_hexi.megatron.session import Session
from megatron_hexi.options.layer_features import model_features, query_size
from megatron_hexi.plan.recompute import stated_recompute


class PlannerConnection:
    """A connection to the planner's process that never blocks; on rank 0."""

    def __init__(self, opening: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "megatron_hexi.replan.planning.advisor"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="hexi-replan", daemon=True).start()
        self.ask(opening)

    def ask(self, document: dict[str, Any]) -> None:
        """Send a document; does nothing if the planner has ended."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(document) + "\n")
        except OSError:
            self._answers.put({"error": "the planner's process has ended"})

    def hear(self) -> dict[str, Any] | None:
        """Return the next answer, or ``None`` if it has not arrived."""
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))


def model_document(args: Namespace, session: Session) -> dict[str, Any]:
    """Return the arguments of `megatron_hexi.models.Model` for this job."""
    args = Namespace(**vars(args) | {"fp8": session.given.fp8_format})  # the arguments are this rank's
    return {
        "name": "the job's",
        "layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "heads": args.num_attention_heads,
        "kv_heads": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        "head_dim": query_size(args),
        "ffn_hidden_size": args.ffn_hidden_size,
        "vocab_size": args.padded_vocab_size,
        **model_features(args, "the job"),
    }


def job_document(args: Namespace, session: Session) -> dict[str, Any]:
    """Return the arguments of `megatron_hexi.cost.Job` for this job, without its model."""
    plan, stages, recipe = session.given.plan, session.stages, session.given.fp8_recipe
    recompute = stated_recompute(args) or "none"
    if recompute == "full" and args.recompute_method == "block":
        recompute = args.recompute_num_layers
    if stages is not None and stages.view.place.recompute is not None:  # the arguments are this rank's
        recompute = plan.job.recompute or "none"
    return {
        "seq_length": session.seq_length,
        "micro_batch_size": args.micro_batch_size,
        "global_batch_size": args.global_batch_size,
        "tensor_parallel": plan.workload.tensor_parallel or 1,  # units of several sizes say their own
        "pipeline_parallel": args.pipeline_model_parallel_size if stages is None else 1,
        "virtual_stages": args.virtual_pipeline_model_parallel_size or 1,
        "data_parallel": len(plan.replicas),
        "recompute": recompute,
        "precision": "fp8" if recipe else "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        **({"fp8_recipe": recipe} if recipe else {}),
        "distributed_optimizer": args.use_distributed_optimizer,
        "overlap_gradients": args.overlap_grad_reduce,
        "sequence_parallel": args.sequence_parallel if stages is None else stages.mesh.sequence_parallel,
    }


def may_move_shares(args: Namespace, session: Session) -> bool:
    """Return whether replicas' micro-batch counts may change: where the plan sets them, one at a time."""
    is_dealt = session.given.plan.takes_micro_batches
    return session.share is not None and args.virtual_pipeline_model_parallel_size is None and not is_dealt
