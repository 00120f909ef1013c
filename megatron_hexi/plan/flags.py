"""The command-line option of Megatron for each field of a job and of a model."""

from __future__ import annotations

from typing import Any, Final

#: Options by field name of `Job` (megatron_hexi.cost), `JobTerms` and `Workload`.
FLAGS: Final = {
    "seq_length": "--seq-length",
    "heads": "--num-attention-heads",
    "kv_heads": "--num-query-groups",
    "local_heads": "--heads",  # on a rank, for which Megatron has no name
    "head_dim": "--kv-channels",
    "value_dim": "--v-head-dim",
    "hidden_size": "--hidden-size",
    "micro_batch_size": "--micro-batch-size",
    "global_batch_size": "--global-batch-size",
    "tensor_parallel": "--tensor-model-parallel-size",
    "pipeline_parallel": "--pipeline-model-parallel-size",
    "virtual_stages": "--num-virtual-stages-per-pipeline-rank",
    "context_parallel": "--context-parallel-size",
    "expert_parallel": "--expert-model-parallel-size",
    "data_parallel": "--data-parallel-size",  # Megatron derives it: args.data_parallel_size
    "recompute": "--recompute-granularity",
    "optimizer": "--optimizer",
    "distributed_optimizer": "--use-distributed-optimizer",
    "overlap_gradients": "--overlap-grad-reduce",
    "sequence_parallel": "--sequence-parallel",
    "fp8_recipe": "--fp8-recipe",
}


def spell_flag(field: str, value: Any) -> str:
    """Return a field and its value as command-line text, such as ``--micro-batch-size 4``.

    Args:
        value: value of the field; ``True`` gives a flag, ``False`` the opposite flag, a tuple its items with
            commas.
    """
    flag = flag_name(field)
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {','.join(value) if isinstance(value, tuple) else value}"


def flag_name(field: str) -> str:
    """Return the option of a field: the one in `FLAGS`, or else the field's name spelled as an option."""
    return FLAGS.get(field, f"--{field.replace('_', '-')}")


def argument_name(flag: str) -> str:
    """Return the name of the argument that argparse sets for a flag, such as ``num_layers``."""
    return flag.removeprefix("--").replace("-", "_")
