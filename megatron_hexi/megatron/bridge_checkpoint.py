"""Checkpoints and imported weights in Megatron Bridge's loop where stages differ, in Bridge's own formats.

Bridge writes its configuration beside a checkpoint, and compares the sizes of parallelism in both before it
loads. The configuration of a rank is that of its stage, so the job's is written and compared in its place.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, Final

import torch.distributed

from megatron_hexi.errors import CheckpointError, user_errors
from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.stage_checkpoints import (
    as_chain,
    attributes,
    by_rank,
    into_buckets,
    stages_active,
    whole_models,
    with_own_boxes,
)
from megatron_hexi.patching import Patch, patched

_MODULE = "megatron.bridge.training.checkpointing"
#: The versions of Bridge that its patches are written for.
OF_BRIDGE: Final[dict[str, Any]] = {"package": "megatron-bridge", "versions": ">=0.6.2,<0.7"}
#: Bridge's errors where the optimizer's state cannot be loaded into another layout.
_OF_ONE_LAYOUT = re.compile("not supported for DistributedOptimizer|distrib_optim_sharding_type")

#: A weight of a layer of a ministage that comes before the first of its stage's `layers`.
_BEFORE = re.compile(r"(.+?\.layers\.)(-\d+)(\..+)")


@patched(f"{_MODULE}:generate_state_dict", why="weights of a stage are stored as single boxes", **OF_BRIDGE)
def _with_own_boxes(
    original: Callable[..., Any], ckpt_cfg: Any, model: list[Any], *args: Any, **kwargs: Any
) -> Any:
    session = active_session()
    if session is None or session.stages is None:
        return original(ckpt_cfg, model, *args, **kwargs)
    unit = session.stages.view.place
    # Megatron numbers a stage's layers by its own sizes, of the configuration that `as_chain` changes.
    own = {"tensor_model_parallel_size": unit.width, "pipeline_model_parallel_size": unit.depth}
    with attributes(model[0].config, **own):
        return with_own_boxes(original(ckpt_cfg, model, *args, **kwargs))


@patched(
    f"{_MODULE}:save_checkpoint",
    why="weights, which ranks hold in shares with ministages, are gathered",
    **OF_BRIDGE,
)
def _of_whole_models(
    original: Callable[..., Any], state: Any, model: list[Any], *args: Any, **kwargs: Any
) -> Any:
    with whole_models(model):
        return original(state, model, *args, **kwargs)


@patched(
    f"{_MODULE}:load_checkpoint",
    why="all ranks compare one size of parallelism; loaded weights go to the buckets that hold their pieces",
    **OF_BRIDGE,
)
def _into_buckets(
    original: Callable[..., Any], state: Any, model: list[Any], optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    with into_buckets(model, optimizer), as_chain(state.cfg.model), user_errors():
        try:
            return original(state, model, optimizer, *args, **kwargs)
        except (KeyError, RuntimeError) as problem:
            if not (stages_active() and _OF_ONE_LAYOUT.search(str(problem))):
                raise
            checkpoint = state.cfg.checkpoint
            raise CheckpointError(
                f"checkpoint.load {checkpoint.load}: its optimizer state is in a format that no other layout "
                "can load; save it with checkpoint.dist_ckpt_optim_fully_reshardable True and this job's "
                "ddp.use_distributed_optimizer, or set checkpoint.load_optim to False"
            ) from problem


@patched(
    "megatron.bridge.training.config:ConfigContainer.to_yaml",
    why="a checkpoint's configuration is the job's, not that of rank 0's stage",
    **OF_BRIDGE,
)
def _as_given(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for section, name, value in vars(self).get("hexi_given", ()) if stages_active() else ():
            stack.enter_context(attributes(section, **{name: value}))
        stack.enter_context(as_chain(self.model))
        return original(self, *args, **kwargs)


@patched(
    "megatron.bridge.models.conversion.model_bridge:"
    "MegatronModelBridge._megatron_global_param_names_all_pp_ranks",
    why="a rank imports the Hugging Face weights of its own stage",
    **OF_BRIDGE,
)
def _of_own_stage(original: Callable[..., Any], self: Any, megatron_model: list[Any]) -> Any:
    from megatron.core.utils import unwrap_model

    if not stages_active():
        return original(self, megatron_model)
    (chunk,) = unwrap_model(megatron_model)
    config = chunk.config
    for name in ("num_moe_experts", "share_embeddings_and_output_weights"):
        if getattr(config, name, None):
            with user_errors():
                raise CheckpointError(
                    f"model.{name} {getattr(config, name)}: Bridge cannot import such weights into stages "
                    "that have layers of their own; write a checkpoint with AutoBridge.import_ckpt, and "
                    "give it as checkpoint.pretrained_checkpoint"
                )

    def own_only(found: list[Any], own: Any, group: Any) -> None:
        found[:] = [own]  # of other stages no weight is needed

    with attributes(torch.distributed, all_gather_object=own_only):
        return original(self, megatron_model)


@patched(
    "megatron.bridge.models.conversion.model_bridge:_megatron_local_name_to_global",
    why="layers of ministages are named by numbers from the first of their stage, which may be below 0",
    **OF_BRIDGE,
)
def _in_the_model(
    original: Callable[..., str], models: Any, config: Any, param_name: str, *args: Any, **kwargs: Any
) -> str:
    found = _BEFORE.fullmatch(param_name)
    if found is None:
        return original(models, config, param_name, *args, **kwargs)
    from megatron.core.utils import unwrap_model

    layer = unwrap_model(models[0]).get_submodule(found[1] + found[2])
    return f"{found[1]}{layer.layer_number - 1}{found[3]}"


BRIDGE_CHECKPOINT_PATCHES = (
    Patch(f"{_MODULE}:get_rng_state", by_rank.why, by_rank.build, **OF_BRIDGE),
    _with_own_boxes,
    _of_whole_models,
    _into_buckets,
    _as_given,
    _of_own_stage,
    _in_the_model,
)
