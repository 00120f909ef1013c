"""`OPTIONS`: how each option that meets a plan stands beside it, by what it is about."""

from __future__ import annotations

from megatron_hexi.options import (
    attention,
    command_line,
    experts,
    parallelism,
    planned,
    replicas,
    stages,
    training,
)
from megatron_hexi.options.kinds import Refused, Supported

OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    **attention.OPTIONS,
    **parallelism.OPTIONS,
    **replicas.OPTIONS,
    **stages.OPTIONS,
    **training.OPTIONS,
    **experts.OPTIONS,
    **planned.OPTIONS,
    **command_line.OPTIONS,
}
