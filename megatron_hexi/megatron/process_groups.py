"""Options of the plan's process groups: those that Megatron gives to its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import yaml

from megatron_hexi.text_file import read_text

#: Megatron's name for the groups that exchange keys and values, in its options of NCCL.
_CONTEXT_PARALLEL = "cp"


@dataclass(frozen=True)
class GroupOptions:
    """Options of each process group that Megatron makes, used for the plan's groups too.

    Args:
        communicators: options of NCCL's communicators by Megatron's names of groups, from the file of
            ``--nccl-communicator-config-path``. Those of `cp` hold for the plan's groups.
    """

    timeout: timedelta
    communicators: dict[str, dict[str, Any]]

    @classmethod
    def of_call(cls, call: dict[str, Any]) -> GroupOptions:
        """Return the options from the arguments of ``initialize_model_parallel``."""
        path = call["nccl_communicator_config_path"]
        communicators = {} if path is None else yaml.safe_load(read_text(path))
        if _CONTEXT_PARALLEL in (call["high_priority_stream_groups"] or ()):
            configured = communicators.get(_CONTEXT_PARALLEL, {})
            communicators = {
                **communicators,
                _CONTEXT_PARALLEL: {**configured, "is_high_priority_stream": True},
            }
        return cls(timedelta(minutes=call["distributed_timeout_minutes"]), communicators)

    def make(self, ranks: list[int], name: str) -> dist.ProcessGroup:
        """Make a group that this rank belongs to, by its members alone, in Megatron's list of groups.

        A rank that is alone makes a group too: torch names groups by the number that a process has made, and
        with unequal numbers the next common group would hang.
        """
        group = self._make(ranks, name, by_members=True)
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        return group

    def make_by_all(self, ranks: list[int], name: str) -> dist.ProcessGroup | None:
        """Make a group by all ranks of the job together; ``None`` on ranks that do not belong to it."""
        group = self._make(ranks, name, by_members=False)
        return group if isinstance(group, dist.ProcessGroup) else None

    def _make(self, ranks: list[int], name: str, by_members: bool) -> Any:
        from megatron.core import parallel_state

        return parallel_state.create_group(
            ranks,
            timeout=self.timeout,
            pg_options=parallel_state.get_nccl_options(_CONTEXT_PARALLEL, self.communicators),
            use_local_synchronization=by_members,
            group_desc=name,
        )
