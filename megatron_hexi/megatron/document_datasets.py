"""Data sets on pipeline stages between the first and the last, where sequences consist of documents.

Every stage reads where documents end. NVIDIA's ``pretrain_gpt.py`` builds data sets on the stages between for
``--sft`` only, so that with ``--dataloader-inter-document-masking`` these have none to read from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_hexi.megatron.session import active_session
from megatron_hexi.options.kinds import is_packed
from megatron_hexi.patching import Patch


def _on_every_stage(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, cls: Any, sizes: Any, is_built_on_rank: Callable[[], bool], config: Any) -> None:
        from megatron.core import mpu
        from megatron.training import get_args

        if active_session() is not None and is_packed(get_args()):
            # Other tensor-parallel ranks are sent what the first one reads.
            original(self, cls, sizes, lambda: mpu.get_tensor_model_parallel_rank() == 0, config)
        else:
            original(self, cls, sizes, is_built_on_rank, config)

    return __init__


DOCUMENT_DATASET_PATCHES = (
    Patch(
        target="megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
        why="every pipeline stage reads where documents end, whatever the script builds data sets on",
        build=_on_every_stage,
        parameters=("self", "cls", "sizes", "is_built_on_rank", "config"),
    ),
)
