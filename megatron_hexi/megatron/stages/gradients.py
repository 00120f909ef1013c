"""Gradients where stages differ: summed over all holders of a piece of a weight.

Megatron's wrapper of a model stays, with its hooks and its calls in the schedule. The pieces' buckets take
the place of its buffers and groups of buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hexi.errors import user_errors
from megatron_hexi.megatron.packing import document_ends, packed_shard
from megatron_hexi.megatron.session import Session, TrainingTerms, active_session
from megatron_hexi.megatron.stages.boxes import held_boxes
from megatron_hexi.megatron.stages.routers import end_iteration
from megatron_hexi.megatron.stages.slices import StageSlices
from megatron_hexi.megatron.unit_weights import Holding, holdings, unknown
from megatron_hexi.mesh import Box, cut_pieces, make_buckets
from megatron_hexi.patching import Patch, patched
from megatron_hexi.runtime.bucket_buffer import HeldBox
from megatron_hexi.runtime.piece_buffers import PieceBuffers
from megatron_hexi.runtime.row_channel import DeviceRows, HostRows

#: Megatron's own size of a bucket where gradients are reduced behind the backward pass, elements.
_BUCKET_SIZE = 40_000_000


def _with_pieces(original: type) -> type:
    """Return a class that makes Megatron's wrapper, or where stages differ, the class below."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    class DistributedDataParallel(original):
        __doc__ = original.__doc__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            session = active_session()
            uneven = cls is DistributedDataParallel and session is not None and session.stages is not None
            return super().__new__(PieceDataParallel if uneven else cls)

    class PieceDataParallel(DistributedDataParallel):
        """Megatron's DistributedDataParallel with one `PieceBuffers` as its only buffer and bucket group."""

        def __init__(
            self,
            config: Any,
            ddp_config: Any,
            module: torch.nn.Module,
            disable_bucketing: bool = False,
            **_: Any,
        ) -> None:
            _BaseDataParallel.__init__(self, config=config, module=module)
            session = active_session()
            assert session is not None
            assert session.stages is not None
            self.ddp_config = ddp_config
            self.force_all_reduce = False
            self.overlap_param_gather_with_optimizer_step = False
            self.use_forward_hook = False
            self.remove_forward_pre_hook_handles: dict[Any, Any] = {}
            stages = session.stages
            #: The ministages of the model; ``None`` where it runs whole.
            self.slices = (
                None if stages.view.place.ministages is None else StageSlices(module, stages.view.place)
            )
            with user_errors():
                self.pieces = _piece_buffers(session, config, module, self.slices, ddp_config)
            #: Rows that wait between ministages.
            offloads_rows = "activations" in stages.view.place.offload
            self.waiting_rows = HostRows(self.pieces.host) if offloads_rows else DeviceRows()
            self.buffers = self.bucket_groups = [self.pieces]
            self.expert_parallel_buffers: list[Any] = []
            self.expert_parallel_bucket_groups: list[Any] = []
            for submodule in module.modules():
                submodule.register_forward_pre_hook(self._settle)
            self.param_to_bucket_group: dict[Parameter, PieceBuffers] = {}
            self.params_with_grad: list[Parameter] = []
            self.grad_accs: list[Any] = []
            for parameter in module.parameters():
                if not parameter.requires_grad:
                    continue
                # Megatron's mark of experts with groups and an optimizer of their own: here pieces have
                # holders, and parameter groups are those of one rank.
                parameter.allreduce = True  # type: ignore[attr-defined]
                self.param_to_bucket_group[parameter] = self.pieces
                self.params_with_grad.append(parameter)
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
                # The node that adds a gradient to a parameter; it must stay alive for its hook.
                view: Any = parameter.expand_as(parameter)
                accumulator = view.grad_fn.next_functions[0][0]
                accumulator.register_hook(self._make_backward_post_hook(parameter))
                self.grad_accs.append(accumulator)

        def _settle(self, module: torch.nn.Module, _: Any) -> None:
            """Wait for the new weights of a module that is about to run."""
            self.pieces.settle_values(module.parameters(recurse=False))

        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            """Run Megatron's `forward`; first receive its input if the rows depend on the documents."""
            session = active_session()
            assert session is not None
            documents = packed_shard(session, document_ends(kwargs.get("packed_seq_params"))).documents
            if documents is not None and session.stages is not None:
                session.stages.channels.take_documents(documents)
            return super().forward(*inputs, **kwargs)

        def broadcast_params(self) -> None:
            """Do nothing: holders have the same values from the beginning."""

    return DistributedDataParallel


def _piece_buffers(
    session: Session,
    config: Any,
    module: torch.nn.Module,
    slices: StageSlices | None,
    ddp_config: Any,
) -> PieceBuffers:
    """Return the buckets of this rank's parameters; a collective of all ranks."""
    assert session.stages is not None
    mesh, view, groups = session.stages.mesh, session.stages.view, session.stages.groups
    held = held_boxes(module)
    if slices is not None:
        held = [replace(h, box=replace(h.box, ministage=slices.ministage_of(h.parameter))) for h in held]
    boxes: list[list[Box]] = [[] for _ in mesh.units]
    dist.all_gather_object(boxes, [h.box for h in held])
    weights = {rank: unit.state for rank, unit in enumerate(mesh.units)}
    pieces = cut_pieces(boxes)
    size = _bucket_size(ddp_config, session.given.terms, sum(piece.size for piece in pieces))
    buckets = make_buckets(pieces, weights, size)
    unit = view.place.ranks
    copies = _copies(module, held, [boxes[rank] for rank in unit], config) if len(unit) > 1 else set()

    def scale_of(parameter: Parameter) -> float:
        return 1.0 / len(unit) if parameter in copies else 1.0

    def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        group = groups.of(ranks, "HOLDERS")
        return None if len(ranks) == 1 else group

    buffers = PieceBuffers(
        buckets,
        held,
        scale_of,
        view.rank,
        group_of,
        torch.float32 if ddp_config.grad_reduce_in_fp32 else None,
        lambda rank: mesh.units[rank].offload,
        session.shard.positions.device,
    )
    # Tied embeddings begin at zero on the last stage, and Megatron's seeds differ by stage.
    stage_of = [unit.stage for unit in mesh.units]
    buffers.take_values_from(lambda holders: min(holders, key=lambda rank: (stage_of[rank], rank)))
    return buffers


def _bucket_size(ddp_config: Any, terms: TrainingTerms, weights: int) -> int | None:
    """Return the number of elements after which a bucket is closed, of a model with so many; ``None``: never.

    It is equal on all ranks; `ddp_config.bucket_size` follows from a rank's own parameters and groups.
    """
    if not ddp_config.overlap_grad_reduce:
        return None
    if terms.buckets is not None:
        return weights // terms.buckets
    return terms.bucket_size or _BUCKET_SIZE


def _copies(
    module: torch.nn.Module, held: Sequence[HeldBox], unit: Sequence[Sequence[Box]], config: Any
) -> set[Parameter]:
    """Return the parameters whose whole gradient each rank of a unit has; ``unit`` has the ranks' boxes.

    Raises:
        PlanError: it is not known how the ranks hold a parameter.
    """
    common = set.intersection(*({(box.key, box.cell) for box in boxes} for boxes in unit))
    names = {parameter: name for name, parameter in module.named_parameters()}
    table = holdings(module)
    for one in held:
        if (table[one.parameter] is Holding.SPLIT) == ((one.box.key, one.box.cell) in common):
            raise unknown(names[one.parameter])
    copied = {parameter for parameter, holding in table.items() if holding is not Holding.SPLIT}
    return {parameter for parameter in copied if not table[parameter].is_part(config.sequence_parallel)}


@patched(
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
    why="gradients are divided by the tokens of all ranks that compute the loss",
)
def _over_all_holders(
    original: Callable[..., None],
    model: list[Any],
    num_tokens: Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> None:
    session = active_session()
    if session is None or session.stages is None:
        original(model, num_tokens, pg_collection, force_all_reduce)
        return
    for chunk in model:
        chunk.finish_grad_sync()
    assert num_tokens is not None, "a plan sets --calculate-per-token-loss"
    stages = session.stages
    # The ranks of one unit all counted the unit's tokens.
    counts = stages.view.rank in stages.mesh.loss_ranks()
    total = num_tokens if counts else torch.zeros_like(num_tokens)
    dist.all_reduce(total, group=stages.view.world)
    for chunk in model:
        chunk.scale_gradients(1.0 / torch.clamp(total, min=1))
    end_iteration(model, stages)


GRADIENT_PATCHES = (
    Patch(
        target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        why="gradients are summed over all holders of a piece of a weight",
        build=_with_pieces,
    ),
    _over_all_holders,
)
