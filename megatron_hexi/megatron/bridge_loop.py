"""Patches of Megatron Bridge's own loop (`megatron.bridge.training`): the plan, its groups and its batches.

Bridge takes some ten seconds to import, so the patches are installed when a script imports its loop.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from megatron_hexi.errors import set_fault_listener, user_errors
from megatron_hexi.megatron.bridge_checkpoint import BRIDGE_CHECKPOINT_PATCHES, OF_BRIDGE
from megatron_hexi.megatron.bridge_data import BRIDGE_DATA_PATCHES
from megatron_hexi.megatron.bridge_encoder import BRIDGE_ENCODER_PATCHES
from megatron_hexi.megatron.bridge_job import given_options, hold_configuration
from megatron_hexi.megatron.bridge_vision import BRIDGE_VISION_PATCHES
from megatron_hexi.megatron.groups import agree
from megatron_hexi.megatron.session import active_session, given_plan
from megatron_hexi.megatron.stages.patches import over_borders
from megatron_hexi.patching import Patch, PatchSet
from megatron_hexi.platform import Platform

_TRAINING = "megatron.bridge.training"
#: What every training by Bridge imports.
_FIRST = f"{_TRAINING}.setup"
_Patch = functools.partial(Patch, **OF_BRIDGE)


def bridge_patches(platform: Platform) -> list[Patch]:
    """Return the patches of Bridge's loop."""
    samplers = ("MegatronPretrainingSampler", "MegatronPretrainingRandomSampler")
    return [
        _Patch(
            target=f"{_TRAINING}.config:ConfigContainer.validate",
            why="reads the plan, checks the configuration against it, and sets what it decides",
            build=functools.partial(_with_plan, device=platform.device),
            parameters=("self",),
        ),
        _Patch(
            target=f"{_TRAINING}.initialize:_initialize_distributed",
            why="agrees on the plan with all ranks before any process group is made",
            build=_with_agreement,
        ),
        *(
            _Patch(
                target=f"{_TRAINING}.{module}:P2PCommunicator",
                why=over_borders.why,
                build=over_borders.build,
            )
            for module in ("train", "eval")
        ),
        *(
            _Patch(
                target=f"megatron.bridge.data.samplers:{sampler}.__iter__",
                why="a rank draws the micro-batches of its replica, where replicas differ",
                build=_of_own_share,
                parameters=("self",),
            )
            for sampler in samplers
        ),
        *BRIDGE_CHECKPOINT_PATCHES,
        *BRIDGE_DATA_PATCHES,
        *BRIDGE_VISION_PATCHES,
        *BRIDGE_ENCODER_PATCHES,
    ]


def _with_plan(original: Callable[[Any], None], device: torch.device) -> Callable[[Any], None]:
    @functools.wraps(original)
    def validate(self: Any) -> None:
        options, model = given_options(), self.model
        if options.hexi_plan is None:
            return original(self)
        known = vars(self).get("hexi_job")  # Bridge and scripts may call it several times
        if given_plan() is None or known is None or known[0] != options.hexi_plan:
            with user_errors():
                held = hold_configuration(self, options, device)
            self.hexi_given = held.apply()
            known = self.hexi_job = options.hexi_plan, held.args.data_parallel_size
        self.data_parallel_size = known[1]
        # Bridge wants sequences that 2 x the context-parallel size divides; the plan has no such rule.
        size, model.context_parallel_size = model.context_parallel_size, 1
        original(self)
        model.context_parallel_size = size

    return validate


def _with_agreement(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.bridge.utils.common_utils import get_rank_safe, get_world_size_safe

    @functools.wraps(original)
    def initialize_distributed(model_config: Any, dist_config: Any, *args: Any, **kwargs: Any) -> Any:
        set_fault_listener(None)  # the agreement reports errors to all ranks itself
        timeout = timedelta(minutes=dist_config.distributed_timeout_minutes)
        with user_errors():
            agree(given_plan(), get_rank_safe(), get_world_size_safe(), timeout)
        return original(model_config, dist_config, *args, **kwargs)

    return initialize_distributed


def _of_own_share(original: Callable[[Any], Iterator[list[int]]]) -> Callable[[Any], Iterator[list[int]]]:
    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[list[int]]:
        session = active_session()
        share = session.share if session else None
        for micro_batch in original(self):
            # Kept with the sampler: an epoch may end inside a global batch.
            number = self.hexi_drawn = getattr(self, "hexi_drawn", -1) + 1
            if share is None or number % share.total in share:
                yield micro_batch

    return __iter__


class _AtImport(importlib.abc.MetaPathFinder):
    """Installs the patches once Bridge's loop has been imported."""

    def __init__(self, patches: PatchSet) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _FIRST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._run, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _run(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        with user_errors():
            given_options()
        execute(module)
        with user_errors():
            self._patches.install()


def await_bridge(platform: Platform) -> None:
    """Replace what a plan needs replaced in Bridge's loop, once that is imported."""
    patches = PatchSet(bridge_patches(platform))
    if _FIRST in sys.modules:
        given_options()
        patches.install()
    else:
        sys.meta_path.insert(0, _AtImport(patches))
