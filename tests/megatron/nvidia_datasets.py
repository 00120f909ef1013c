"""Our entry point with data sets where NVIDIA's ``pretrain_gpt.py`` of core_v0.19.0 builds them.

That script knows of packed sequences under ``--sft`` only.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.core import mpu
from megatron.training.utils import is_first_or_last_pipeline_stage


def _is_dataset_built_on_rank(args: Namespace, vp_stage: int | None) -> bool:
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    return bool(args.sft) or bool(is_first_or_last_pipeline_stage(vp_stage))


def main() -> None:
    """Train."""
    from megatron_hexi import pretrain_gpt
    from megatron_hexi.megatron import gpt

    gpt._needs_dataset = _is_dataset_built_on_rank
    pretrain_gpt.main()
