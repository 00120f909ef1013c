"""Checkpoints where stages differ: in Megatron's own format, from any layout to any other.

A checkpoint stores weights by name and box, so a layout does not matter as long as each rank gives its box,
and one of the ranks that hold a box writes it. Boxes of unequal layouts are no regular grid, which Megatron's
stacked layers assume; as single boxes they can be stored and found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megatron_hexi.megatron.session import active_session
from megatron_hexi.patching import patched


def stages_active() -> bool:
    """Whether this rank trains by a plan whose stages differ."""
    session = active_session()
    return session is not None and session.stages is not None


def with_own_boxes(state: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's state dict with this rank's weights as single boxes.

    Args:
        state: state dict that Megatron generated for saving or loading; changed in place.
    """
    session = active_session()
    if session is None or session.stages is None:
        return state
    stages = session.stages
    copy, experts = stages.mesh.copy(stages.view.place), stages.experts

    # The embedding of a last stage that predicts further tokens is a copy of the first stage's.
    is_first = stages.view.place.stage == 0

    def copy_of(key: str) -> int:
        if not is_first and key.startswith("embedding."):
            return copy + 1
        return experts.domain.copy if experts is not None and ".experts." in key else copy

    state["model"] = _walk(state["model"], copy_of)
    return state


def _walk(tree: Any, copy_of: Callable[[str], int]) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(tree, dict):
        return {key: _walk(value, copy_of) for key, value in tree.items()}
    if not hasattr(tree, "replica_id"):
        return tree
    replica_id = _replica(tree.replica_id, copy_of(tree.key))
    if isinstance(tree, ShardedTensor):
        return _own_box(replace(tree, replica_id=replica_id))
    if isinstance(tree, ShardedTensorFactory):
        return _own_boxes(replace(tree, replica_id=replica_id))
    tree.replica_id = replica_id
    return tree


def _replica(replica_id: Any, copy: int) -> Any:
    """Return a replica id with the number of the copy last, where Megatron has a rank; copy 0 is written."""
    return (*replica_id[:-1], copy) if isinstance(replica_id, tuple) else copy


def _own_box(tensor: Any) -> Any:
    """Return a tensor as a single box; where layers are stacked, a factory that adds the layers' axis."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if not tensor.prepend_axis_num:
        return replace(tensor, axis_fragmentations=None)
    shape = tensor.data.shape

    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        return _unstacked(replace(tensor, key=key, data=data, replica_id=replica_id))

    return ShardedTensorFactory(
        tensor.key, tensor.data, build, lambda loaded: loaded.view(shape), tensor.replica_id
    )


def _own_boxes(factory: Any) -> Any:
    """Return a factory whose tensors are single boxes."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    build, merge = factory.build_fn, factory.merge_fn
    stacked = next(
        leaf.prepend_axis_num for leaf in nested_values([factory.build()]) if isinstance(leaf, ShardedTensor)
    )

    def build_boxes(*args: Any, **kwargs: Any) -> Any:
        return dict_list_map_outplace(
            lambda leaf: _unstacked(leaf) if isinstance(leaf, ShardedTensor) else leaf, build(*args, **kwargs)
        )

    def merge_boxes(loaded: Any) -> Any:
        return merge(dict_list_map_outplace(lambda tensor: tensor.view(tensor.shape[stacked:]), loaded))

    return replace(factory, build_fn=build_boxes, merge_fn=merge_boxes)


def _unstacked(tensor: Any) -> Any:
    """Return a box with the stacked axes, which Megatron only implies, in front."""
    shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    return replace(
        tensor, data=tensor.data.view(shape), local_shape=shape, axis_fragmentations=None, prepend_axis_num=0
    )


@patched(
    "megatron.training.checkpointing:get_rng_state",
    why="random states are stored by rank, where Megatron has a grid of pipeline and tensor-parallel ranks",
)
def by_rank(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the random states that Megatron saves, in a grid of one row for each rank."""
    state = original(*args, **kwargs)
    session = active_session()
    if session is not None and session.stages is not None:
        state.global_shape = (len(session.stages.mesh.units), 1)
        state.global_offset, state.replica_id = (session.stages.view.rank, 0), 0
    return state


@contextlib.contextmanager
def whole_models(model: list[Any]) -> Iterator[None]:
    """Gather the weights of a rank's models, most of which ranks hold in shares with ministages."""
    with contextlib.ExitStack() as stack:
        for chunk in model if stages_active() else ():
            stack.enter_context(chunk.pieces.whole())
        yield


@contextlib.contextmanager
def into_buckets(model: list[Any], optimizer: Any) -> Iterator[None]:
    """Take weights that are loaded in this context into the buckets that hold their pieces."""
    yield
    if stages_active():
        for chunk in model:
            chunk.pieces.collect_values()
        if optimizer is not None:
            optimizer.weights_loaded()


@contextlib.contextmanager
def as_chain(sizes: Any, **others: Any) -> Iterator[None]:
    """Let Megatron's arguments describe the whole model as a pipeline over all ranks.

    Megatron compares them with the checkpoint's to decide whether it can load random states.

    Args:
        sizes: object whose attributes the arguments are.
        others: further attributes within the context.
    """
    session = active_session()
    if session is None or session.stages is None:
        yield
        return
    ranks = len(session.stages.mesh.units)
    with attributes(sizes, tensor_model_parallel_size=1, pipeline_model_parallel_size=ranks, **others):
        yield


@contextlib.contextmanager
def attributes(holder: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object within the context."""
    own = {name: getattr(holder, name) for name in values}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(holder, name, value)


@patched(
    "megatron.training.checkpointing:save_checkpoint",
    why="the checkpoint's grid of random states is a pipeline of all ranks; weights, most of which ranks "
    "hold in shares with ministages, are gathered",
)
def _of_whole_models(
    original: Callable[..., Any], iteration: int, model: list[Any], *args: Any, **kwargs: Any
) -> Any:
    with whole_models(model), _job_as_chain():
        return original(iteration, model, *args, **kwargs)


@patched(
    "megatron.training.checkpointing:load_checkpoint",
    why="the checkpoint's grid of random states is a pipeline of all ranks; loaded weights go to the buckets "
    "that hold their pieces",
)
def _into_buckets(
    original: Callable[..., Any], ddp_model: list[Any], optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    with into_buckets(ddp_model, optimizer), _job_as_chain():
        return original(ddp_model, optimizer, *args, **kwargs)


def _job_as_chain() -> contextlib.AbstractContextManager[None]:
    from megatron.training import get_args

    args = get_args()
    pattern = getattr(args, "hexi_pattern", None)
    return as_chain(args, **({} if pattern is None else {"hybrid_layer_pattern": pattern}))


STAGE_CHECKPOINT_PATCHES = (by_rank, _of_whole_models, _into_buckets)
