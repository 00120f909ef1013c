"""Tables of jobs whose stages differ: ranks, rows sent over borders, pieces of weights, optimizer shares.

The package does not import torch.
"""

from megatron_hexi.mesh.border import HeldRows, RowBlock, RowMessage, border_messages, held_rows, row_messages
from megatron_hexi.mesh.experts import ExpertDomain, job_experts
from megatron_hexi.mesh.mesh import Mesh
from megatron_hexi.mesh.pieces import Box, Cell, MinistageId, Piece, cell_contains, cell_size, cut_pieces
from megatron_hexi.mesh.pipeline_order import (
    MinistagePass,
    PipelineStep,
    StageRun,
    Way,
    ministage_passes,
    most_kept,
    passes_ahead,
    pipeline_runs,
    pipeline_steps,
    stage_runs,
    step_source,
)
from megatron_hexi.mesh.residence import ROWS_ON_DEVICE, Residence, bucket_residence, is_summed_last
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
    "StageRun",
    "Way",
    "border_messages",
    "bucket_residence",
    "cell_contains",
    "cell_size",
    "cut_pieces",
    "held_rows",
    "is_summed_last",
    "job_experts",
    "make_buckets",
    "ministage_passes",
    "most_kept",
    "passes_ahead",
    "pipeline_runs",
    "pipeline_steps",
    "row_messages",
    "stage_runs",
    "step_source",
]
