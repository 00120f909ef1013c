"""The optimizer where stages differ: each rank keeps the state of its slabs, in the plan's shares.

Megatron's mixed-precision optimizer steps on the owned slabs, each an fp32 parameter of its own, so its step,
loss scaling, clipping and norm are Megatron's: every element is owned once in the job, and all ranks agree on
whether a gradient is infinite. Afterwards owners broadcast the new values.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch import Tensor
from torch.nn import Parameter

from megatron_hexi.errors import user_errors
from megatron_hexi.megatron.loss_scale import scales_losses
from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.host_optimizer import (
    clip_on_host,
    host_norm,
    host_optimizer,
    unscale_on_host,
)
from megatron_hexi.megatron.stages.optimizer_state import (
    MASTER_NAMES,
    master_name,
    read_document,
    sharded_state,
    state_document,
    state_names,
)
from megatron_hexi.mesh import Slab
from megatron_hexi.patching import patched
from megatron_hexi.runtime.bucket_buffer import BucketBuffer
from megatron_hexi.runtime.host_memory import HostMemory
from megatron_hexi.runtime.piece_buffers import PieceBuffers


@dataclass(frozen=True)
class _OwnedSlab:
    """A slab that this rank owns, with its weights and gradients."""

    slab: Slab
    values: Tensor
    gradients: Tensor
    main: Parameter


def _owned(buffer: BucketBuffer, slab: Slab, host: HostMemory) -> _OwnedSlab:
    shape = [stop - start for start, stop in slab.cell]
    span = slice(slab.start - buffer.own_run.start, slab.stop - buffer.own_run.start)
    values = buffer.own_values[span].view(shape)
    residence = buffer.residence
    if residence.state_on_host and not (residence.weights_on_host and values.dtype == torch.float32):
        main = Parameter(host.copy_of(values, torch.float32))
    else:
        main = Parameter(values.float())  # a view where the values are fp32
    # One owner in the world: the norm counts it once.
    main.tensor_model_parallel = True  # type: ignore[attr-defined]
    return _OwnedSlab(slab, values, buffer.own_gradients[span].view(shape), main)


class PieceOptimizer(MixedPrecisionOptimizer):
    """Megatron's mixed-precision optimizer over the slabs (`mesh.shares.Slab`) that this rank owns.

    Args:
        optimizer: torch's or apex's optimizer over the slabs' fp32 parameters.
        config: Megatron's configuration.
        grad_scaler: Megatron's loss scaler; ``None`` where losses are not scaled.
        init_state_fn: initializes the state of parameters that have none.
        owned: the slabs whose optimizer state this rank keeps.
        is_on_host: whether the slabs, their state and their gradients are in host memory.
    """

    is_stub_optimizer = False

    def __init__(
        self,
        optimizer: Any,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Callable[..., None],
        buffers: PieceBuffers,
        owned: list[_OwnedSlab],
        is_on_host: bool,
    ) -> None:
        super().__init__(optimizer, config, grad_scaler, init_state_fn)
        self.buffers = buffers
        self.owned = owned
        self.is_on_host = is_on_host
        #: Steps so far, also where this rank owns nothing.
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the last step; the buckets have those of the model."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's own state, which Megatron's checkpoints do not use."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def _copy_model_grads_to_main_grads(self) -> None:
        """Set the fp32 gradient of every slab to its summed gradient."""
        for part in self.owned:
            part.main.grad = part.gradients.float()

    def _collect_main_grad_data_for_unscaling(self) -> list[Tensor]:
        return [part.main.grad for part in self.owned if part.main.grad is not None]

    def _unscale_main_grads_and_check_for_nan(self) -> bool:
        """Divide the gradients by the loss scale; return whether any is infinite or NaN."""
        if not self.is_on_host:
            return bool(super()._unscale_main_grads_and_check_for_nan())
        gradients = self._collect_main_grad_data_for_unscaling()
        self.found_inf.fill_(unscale_on_host(gradients, self.grad_scaler.inv_scale))
        group = self.get_grad_stats_parallel_group()
        dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX, group=group)
        return bool(self.found_inf.item())

    @torch.no_grad()
    def get_grad_norm(self) -> Any:
        """Return the norm of all gradients of the job."""
        if not self.is_on_host:
            return super().get_grad_norm()
        gradients = self._collect_main_grad_data_for_unscaling()
        return host_norm(gradients, self.get_grad_stats_parallel_group(), self.get_loss_scale().device)

    @torch.no_grad()
    def step(self) -> tuple[bool, Any, Any]:
        """Clip the gradients and step, as Megatron's `ChainedOptimizer` does on one rank.

        All ranks of the job must call it. What a rank owns decides on local work alone, where Megatron's own
        `step` enters a collective only with parameters, and takes the norm only to clip by it.

        Returns:
            Whether the weights were updated, the norm of all gradients before clipping, and the number of
            zeros among them; ``None`` where it is not logged.
        """
        if self.prepare_grads():
            return False, None, None
        norm = self.get_grad_norm()
        if self.owned and self.config.clip_grad > 0.0:
            clip = clip_on_host if self.is_on_host else clip_grad_by_total_norm_fp32
            clip(self.get_parameters(), self.config.clip_grad, norm)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        return self.step_with_ready_grads(), norm, zeros

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step on this rank's slabs, and broadcast the new values to all holders."""
        self.buffers.settle_values()  # for a part of the model that did not run
        success = bool(super().step_with_ready_grads())
        self.steps += 1
        session = active_session()
        self.buffers.broadcast_values(waits=session is None or not session.given.terms.overlaps_values())
        return success

    def _copy_main_params_to_model_params(self) -> None:
        for part in self.owned:
            if part.main.data_ptr() != part.values.data_ptr():
                part.values.copy_(part.main)

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Set the slabs' fp32 weights to the model's present weights."""
        self.buffers.collect_values()
        for part in self.owned:
            part.main.data.copy_(part.values)

    @torch.no_grad()
    def weights_loaded(self) -> None:
        """Copy loaded fp32 weights of the model to slabs with memory of their own."""
        for part in self.owned:
            if part.values.dtype == torch.float32 and part.main.data_ptr() != part.values.data_ptr():
                part.main.data.copy_(part.values)

    @property
    def _is_half(self) -> bool:
        """Whether the model's weights are in half precision, apart from the fp32 weights of the slabs."""
        return bool(self.config.bf16 or self.config.fp16)

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state of this rank's slabs, for Megatron to save or to load into.

        Raises:
            PlanError: the checkpoint's format depends on the layout that it was saved under.
        """
        from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

        with user_errors():
            master = master_name(metadata, self._is_half)
        if is_loading or not self.steps:
            self._complete_state()
        states = [self._state_of(part, master) for part in self.owned]
        tensors = sharded_state([part.slab for part in self.owned], states)
        groups = [{**group, "params": LocalNonpersistentObject([])} for group in self.optimizer.param_groups]
        scaler = self.grad_scaler and self.grad_scaler.state_dict()
        return state_document(tensors, groups, self.steps, metadata, self._is_half, scaler)

    def _complete_state(self) -> None:
        """Make the state that the optimizer would make in its first step, if there was no step yet."""
        for part in self.owned:
            state = self.optimizer.state[part.main]
            for name in state_names(self.config):
                if name not in state:
                    state[name] = torch.zeros_like(part.main)
            if self._counts_by_parameter and "step" not in state:
                state["step"] = torch.tensor(0.0)

    @property
    def _counts_by_parameter(self) -> bool:
        """Whether each parameter has a step count of its own; else each group of parameters has."""
        from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER

        return self.config.optimizer == "adam" and bool(USING_PYTORCH_OPTIMIZER or self.is_on_host)

    def _state_of(self, part: _OwnedSlab, master: str | None) -> dict[str, Tensor]:
        state = {
            name: value
            for name, value in self.optimizer.state[part.main].items()
            if isinstance(value, Tensor) and name != "step"
        }
        return state if master is None else {**state, master: part.main.data}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that Megatron read for `sharded_state_dict`."""
        tensors, groups, self.steps = read_document(state_dict)
        if self.grad_scaler and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        self.buffers.collect_values()
        for number, part in enumerate(self.owned):
            state = dict(tensors[number])
            masters = [state.pop(name) for name in MASTER_NAMES if name in state]
            # Megatron has loaded them into `main` itself: model weights are these, rounded.
            part.main.copy_(masters[0] if masters else part.values)
            slab_state = self.optimizer.state[part.main] if self.is_on_host else {}
            for name, tensor in state.items():
                slab_state[name] = slab_state[name].copy_(tensor) if name in slab_state else tensor.clone()
            if self._counts_by_parameter and slab_state:
                slab_state["step"] = torch.tensor(float(self.steps))  # one a parameter: each counts its own
            self.optimizer.state[part.main] = slab_state
        bare = [{**group, "params": None} for group in groups]
        param_groups = self.optimizer.param_groups
        for group, loaded in zip(
            param_groups, self._filter_and_reorder_param_groups(param_groups, bare), strict=True
        ):
            group.update({name: value for name, value in loaded.items() if name not in ("params", "step")})
            if self.config.optimizer == "adam" and not self._counts_by_parameter:
                group["step"] = self.steps


@patched(
    "megatron.core.optimizer:get_megatron_optimizer",
    why="each rank keeps the optimizer's state of its slabs",
)
def optimizer_of_slabs(
    original: Callable[..., Any], config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any
) -> Any:
    """Return the optimizer of this rank's slabs where stages differ, and Megatron's elsewhere."""
    session = active_session()
    if session is None or session.stages is None:
        return original(config, model_chunks, *args, **kwargs)
    (chunk,) = model_chunks
    overrides = kwargs.get("config_overrides", args[0] if args else None)
    return _make_optimizer(config, chunk, overrides, session.stages.view.world)


@patched(
    "megatron.training.training:calc_params_l2_norm",
    why="each weight counts once in their norm, at its owner",
)
def norm_of_slabs(original: Callable[..., float], model: Any, *args: Any, **kwargs: Any) -> float:
    """Return the norm of all weights of the job, over the slabs of all ranks where stages differ."""
    session = active_session()
    if session is None or session.stages is None:
        return original(model, *args, **kwargs)
    (chunk,) = model
    owned = (weights.detach().double().square().sum().to("cuda") for weights in chunk.owned_weights)
    total = sum(owned, torch.zeros((), dtype=torch.float64, device="cuda"))
    dist.all_reduce(total, group=session.stages.view.world)
    return float(total.sqrt())


def _make_optimizer(config: Any, chunk: Any, overrides: Any, world: Any) -> PieceOptimizer:
    """Return Megatron's optimizer over this rank's slabs, with Megatron's parameter groups.

    A collective call of all ranks of the job. Without `overrides` of some parameters' settings, Megatron's
    standard ones hold.
    """
    from megatron.core import optimizer as megatron_optimizer

    if overrides is None:
        overrides = megatron_optimizer.get_standard_config_overrides(config)
    groups = megatron_optimizer._get_param_groups([chunk], config, overrides)
    group_of = {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
    buffers: PieceBuffers = chunk.pieces
    owned = [_owned(buffer, slab, buffers.host) for buffer, slab in buffers.owned()]
    chunk.owned_weights = [part.main for part in owned]
    own: list[list[Parameter]] = [[] for _ in groups]
    for part in owned:
        own[group_of[buffers.parameter_of(part.slab)]].append(part.main)
    is_on_host = buffers.steps_on_host
    on_host = [{**group, "params": mains} for group, mains in zip(groups, own, strict=True)]
    for group in groups:  # Transformer Engine's SGD asks the first for its device; a rank may own none
        group["params"] = [Parameter(torch.empty(0, device=torch.cuda.current_device()))]
    # The inner optimizer alone, which Megatron makes from the arguments.
    plain = copy.copy(config)
    plain.bf16, plain.fp16, plain.use_distributed_optimizer = False, False, False
    made = megatron_optimizer._get_megatron_optimizer_based_on_param_groups(
        plain, [chunk], groups, model_parallel_group=world
    )
    inner = host_optimizer(on_host, config, buffers.host) if is_on_host else made.optimizer
    for group, mains in zip(inner.param_groups, own, strict=True):
        group["params"] = mains
    scaler = _loss_scaler(config, chunk, world)
    optimizer = PieceOptimizer(inner, config, scaler, made.init_state_fn, buffers, owned, is_on_host)
    for name in ("grad_stats_parallel_group", "tp_group", "expert_tp_group"):
        if hasattr(made, name):
            setattr(optimizer, name, getattr(made, name))
    return optimizer


def _loss_scaler(config: Any, chunk: Any, world: Any) -> Any:
    """Return the loss scaler that Megatron makes from the arguments; ``None`` where losses are not scaled."""
    from megatron.core import optimizer as megatron_optimizer

    if not scales_losses(config):
        return None
    mixed = copy.copy(config)
    mixed.bf16, mixed.use_distributed_optimizer = not config.fp16, False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "WARNING: there is no optimizer")  # it is made for its scaler
        stub = megatron_optimizer._get_megatron_optimizer_based_on_param_groups(
            mixed, [chunk], [], model_parallel_group=world
        )
    return stub.grad_scaler
