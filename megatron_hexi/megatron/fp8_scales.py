"""Scales of ``--fp8-recipe delayed``, which are equal on all ranks that share a layer.

Transformer Engine takes the largest values of all tensors over a process group, and renews scales, after
each pass. Under a plan some ranks of a layer take more passes than others, and two ranks may share some of
their layers only. So passes record their largest values; once an iteration all ranks of the job take the
maximum for each tensor of the model by its name, and renew the scales. Every rank has the state of the whole
model, ranks that compute in bf16 too, so any rank can save it, and any plan can load it.

Example:
    A layer of two replicas, of which one takes three micro-batches and the other one: its largest inputs are
    2, 5 and 3 on a rank of the first, 4 on one of the second. The next iteration's scale of both is 448 / 5.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.megatron.session import active_session, given_plan
from megatron_hexi.patching import Patch, patched

_KEY = "hexi_fp8_scales"
#: Transformer Engine's state of a product's tensors: inputs, weights and outputs in the forward pass,
#: gradients of outputs and of inputs in the backward pass; and the columns of `Scales` that hold them.
_COLUMNS = {"scaling_fwd": (0, 1, 2), "scaling_bwd": (3, 4)}
_LAYER = re.compile(r"layers\.\d+")
#: State of a checkpoint that was loaded, until the model takes it.
_loaded: dict[str, Any] | None = None
_scales: Scales | None = None


class Scales:
    """Scales and largest values of the tensors of all products in fp8 of the whole model.

    Attributes:
        names: names of the N products in the whole model.
        scales: [5 N], by product and the columns of `_COLUMNS`.
        histories: largest values, [H, 5 N]: row 0 of the present iteration, the others of past ones.
    """

    def __init__(self, model: Sequence[Any], fp8_format: str) -> None:
        """Agree with all ranks of the job on the model's products; a collective.

        Args:
            model: chunks of the model on this rank.
            fp8_format: ``e4m3`` or ``hybrid``.
        """
        from megatron.core.extensions.transformer_engine import TEDelayedScaling
        from megatron.core.utils import get_model_config
        from transformer_engine.common.recipe import Format

        config, device = get_model_config(model[0]), next(model[0].parameters()).device
        self._is_fp8 = bool(config.fp8)  # a rank in bf16 has the scales, and no use for them
        self._recipe = recipe = TEDelayedScaling(config=config, fp8_format=Format[fp8_format.upper()])
        modules = dict(_named_products(model))
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, [name for names in modules.values() for name in names])
        self.names = sorted(set().union(*everywhere))
        number = {name: index for index, name in enumerate(self.names)}
        limits = recipe.fp8_format.value
        largest = torch.tensor([limits.max_fwd] * 3 + [limits.max_bwd] * 2, device=device)
        self._largest = (largest / 2**recipe.margin).repeat(len(self.names))
        #: For each module and pass, the places of its tensors.
        self._places = [
            (
                module,
                key,
                torch.tensor([5 * number[name] + c for name in names for c in columns], device=device),
            )
            for module, names in modules.items()
            for key, columns in _COLUMNS.items()
        ]
        self.scales = torch.ones_like(self._largest)
        self.histories = self._largest.new_zeros(recipe.amax_history_len, len(self._largest))

    def renew(self) -> None:
        """Take the largest values of this iteration over all ranks, and the next one's scales by them."""
        latest = torch.zeros_like(self.scales)
        for state, places in self._states():
            latest[places] = state.amax_history[0]
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        past = torch.cat((self.histories[1:], latest[None]))
        over = past.amax(0) if self._recipe.amax_compute_algo == "max" else latest
        scales = (self._largest / over).clamp(max=torch.finfo(torch.float32).max)
        was_cast = latest > 0  # other tensors keep their scale and their past
        self.scales = torch.where(was_cast & over.isfinite(), scales, self.scales)
        past[0] = 0
        self.histories = torch.where(was_cast, past, self.histories)
        self._spread()

    def state_dict(self) -> dict[str, Any]:
        """Return the names, scales and largest values for a checkpoint."""
        return {"names": self.names, "scales": self.scales.cpu(), "histories": self.histories.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the scales of a checkpoint; products that it lacks begin with a scale of 1."""
        saved = {name: number for number, name in enumerate(state["names"])}
        for number, name in enumerate(self.names):
            if name in saved:
                here, there = (slice(5 * first, 5 * first + 5) for first in (number, saved[name]))
                self.scales[here] = state["scales"][there].to(self.scales)
                if len(state["histories"]) == len(self.histories):
                    self.histories[:, here] = state["histories"][:, there].to(self.histories)
        for module, _, _ in self._places if self._is_fp8 else ():
            # Otherwise Transformer Engine would make its state in the first pass.
            module.fp8_meta |= {"recipe": self._recipe, "num_gemms": getattr(module, "num_gemms", 1)}
            module.init_fp8_meta_tensors(self._recipe)
        self._spread()

    def _spread(self) -> None:
        """Give each module of this rank the scales and largest values of its tensors."""
        for state, places in self._states():
            state.scale.copy_(self.scales[places])
            state.amax_history.copy_(self.histories[:, places])

    def _states(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield Transformer Engine's state of each module and pass, with the places of its tensors."""
        for module, key, places in self._places:
            if key in module.fp8_meta:
                yield module.fp8_meta[key], places


def _named_products(model: Sequence[Any]) -> Iterator[tuple[Any, list[str]]]:
    """Yield each module of Transformer Engine that multiplies, and the names of its products."""
    from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear

    for chunk in model:
        modules = dict(chunk.named_modules())
        for path, module in modules.items():
            if isinstance(module, (Linear, LayerNormLinear, GroupedLinear)):
                yield module, _whole_names(path, modules)


def _whole_names(path: str, modules: dict[str, Any]) -> list[str]:
    """Return the names of a module's products in the whole model: one, or one for each expert.

    Args:
        path: name of the module in a rank's chunk, where layers and experts are numbered from 0.
        modules: the chunk's modules by name.
    """
    parts = path.split(".")
    parents = [".".join(parts[:end]) for end in range(1, len(parts))]
    numbered = next((name for name in parents if _LAYER.search(name) and _number(modules[name])), "")
    name = path.replace("module.", "")
    if numbered:
        name = _LAYER.sub(f"layers.{_number(modules[numbered]) - 1}", name, count=1)
    experts = next(
        (own for one in parents if (own := getattr(modules[one], "local_expert_indices", None))), None
    )
    if experts is None or ".experts." not in name:
        return [name]
    if local := re.search(r"local_experts\.(\d+)\.", name):
        return [name.replace(local[0], f"{experts[int(local[1])]}.")]
    return [f"{name}.{expert}" for expert in experts]


def _number(module: Any) -> int:
    """Return the number of a layer in the whole model, from 1; 0 if a module is no layer."""
    return getattr(module, "layer_number", 0)


def _present(model: Sequence[Any]) -> Scales | None:
    """Return the model's scales, which all ranks ask for together; ``None`` with another recipe."""
    global _scales
    given = given_plan()
    if active_session() is None or given is None or given.fp8_recipe != "delayed":
        return None
    if _scales is None:
        assert given.fp8_format is not None, "the job is in fp8"
        _scales = Scales(model, given.fp8_format)
    return _scales


@patched(
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
    why="the largest values for scales of fp8 are taken over all ranks of the job, once an iteration",
)
def _with_scales(original: Callable[..., None], model: list[Any], *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    if scales := _present(model):
        scales.renew()


def _once_an_iteration(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def reduce_and_update_fp8_tensors(cls: type, forward: bool = True) -> None:
        if active_session() is None:
            original.__func__(cls, forward)

    return classmethod(reduce_and_update_fp8_tensors)


@patched(
    "megatron.training.checkpointing:generate_state_dict",
    why="saves the scales of fp8 as tensors, and not in the state that Transformer Engine pickles",
)
def _with_saved_scales(
    original: Callable[..., dict[str, Any]], args: Any, model: list[Any], *rest: Any, **kwargs: Any
) -> dict[str, Any]:
    state = original(args, model, *rest, **kwargs)
    if scales := _present(model):
        state[_KEY] = scales.state_dict()
        for key in [key for key in state if key.startswith("model")]:
            _empty_extra_state(state[key])
    return state


def _empty_extra_state(tree: Any) -> None:
    """Set the objects that Transformer Engine pickles to empty ones, as ranks in bf16 have."""
    for key, value in tree.items():
        if isinstance(value, dict):
            _empty_extra_state(value)
        elif "_extra_state" in str(key) and hasattr(value, "data"):
            value.data = torch.empty(0, dtype=torch.uint8)


@patched(
    "megatron.training.checkpointing:_load_base_checkpoint", why="keeps the scales of fp8 that are loaded"
)
def _with_loaded_scales(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _loaded
    found = original(*args, **kwargs)
    if isinstance(found[0], dict) and _KEY in found[0]:
        _loaded = found[0][_KEY]
    return found


@patched(
    "megatron.training.checkpointing:load_checkpoint", why="gives the model the scales of fp8 that are loaded"
)
def _into_model(original: Callable[..., Any], ddp_model: list[Any], *args: Any, **kwargs: Any) -> Any:
    done = original(ddp_model, *args, **kwargs)
    if (scales := _present(ddp_model)) and _loaded is not None:
        scales.load_state_dict(_loaded)
    return done


FP8_PATCHES = (
    _with_scales,
    Patch(
        "transformer_engine.pytorch.fp8:FP8GlobalStateManager.reduce_and_update_fp8_tensors",
        why="a pass records the largest values for scales of fp8, which are renewed once an iteration",
        build=_once_an_iteration,
        parameters=("cls", "forward"),
        versions=">=2",
        requires="transformer_engine",
        package="transformer-engine",
    ),
    _with_saved_scales,
    _with_loaded_scales,
    _into_model,
)
