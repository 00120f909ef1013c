"""Tables of jobs whose stages differ: ranks, rows sent over borders, pieces of weights, optimizer shares.

The package does not import torch.
"""

from megatron_hexi.mesh.border import HeldRows, RowBlock, RowMessage, border_messages, held_rows, row_messages
from megatron_hexi.mesh.experts import ExpertDomain, job_experts
from megatron_hexi.mesh.mesh import Mesh
from megatron_hexi.mesh.pieces import Box, Cell, MinistageId, Piece, cell_contains, cell_size, cut_pieces
from megatron_hexi.mesh.pipeline_order import (
    PipelineStep,
    interleaved_order,
    most_kept,
    passes_ahead,
    pipeline_steps,
    step_source,
)
from megatron_hexi.mesh.residence import (
    ROWS_ON_DEVICE,
    MinistagePass,
    Residence,
    bucket_residence,
    is_summed_last,
    ministage_passes,
)
from megatron_hexi.mesh.shares import Bucket, Slab, make_buckets

__all__ = [
    "ROWS_ON_DEVICE",
    "Box",
    "Bucket",
    "Cell",
    "ExpertDomain",
    "HeldRows",
    "Mesh",
    "MinistageId",
    "MinistagePass",
    "Piece",
    "PipelineStep",
    "Residence",
    "RowBlock",
    "RowMessage",
    "Slab",
    "border_messages",
    "bucket_residence",
    "cell_contains",
    "cell_size",
    "cut_pieces",
    "held_rows",
    "interleaved_order",
    "is_summed_last",
    "job_experts",
    "make_buckets",
    "ministage_passes",
    "most_kept",
    "passes_ahead",
    "pipeline_steps",
    "row_messages",
    "step_source",
]
