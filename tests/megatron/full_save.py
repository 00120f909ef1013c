"""Our entry point with a disk that is full from the first checkpoint on: files may not grow beyond 64 KiB."""

from __future__ import annotations

import functools
import resource
from typing import Any

_MOST_BYTES = 2**16


def main() -> None:
    """Train."""
    from megatron.core import dist_checkpointing
    from megatron.training import checkpointing

    from megatron_hexi import pretrain_gpt

    def on_a_full_disk(save: Any) -> Any:
        @functools.wraps(save)
        def limited(*args: Any, **kwargs: Any) -> Any:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (_MOST_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            )
            return save(*args, **kwargs)

        return limited

    vars(dist_checkpointing)["save"] = on_a_full_disk(dist_checkpointing.save)
    vars(checkpointing)["torch"].save = on_a_full_disk(checkpointing.torch.save)
    pretrain_gpt.main()
