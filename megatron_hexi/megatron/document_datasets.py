"""Data sets on inner pipeline stages, where sequences consist of documents.

Every stage reads the ends of documents. NVIDIA's ``pretrain_gpt.py`` builds data sets on inner stages for
``--sft`` only, so with ``--dataloader-inter-document-masking`` they have nothing to read from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hexi.megatron.session import active_session
from megatron_hexi.patching import patched


@patched(
    "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
    why="every pipeline stage reads where documents end, whatever the script builds data sets on",
)
def _on_every_stage(
    original: Callable[..., None],
    self: Any,
    cls: Any,
    sizes: Any,
    is_built_on_rank: Callable[[], bool],
    config: Any,
) -> None:
    from megatron.core import mpu

    session = active_session()
    if session is not None and session.given.terms.has_documents:
        # The first tensor-parallel rank reads for the others.
        original(self, cls, sizes, lambda: mpu.get_tensor_model_parallel_rank() == 0, config)
    else:
        original(self, cls, sizes, is_built_on_rank, config)


DOCUMENT_DATASET_PATCHES = (_on_every_stage,)
