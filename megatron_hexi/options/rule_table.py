"""The table `OPTIONS` of all rules that support or refuse an option in a job with a plan, by topic."""

from __future__ import annotations

from megatron_hexi.options import (
    rules_attention,
    rules_command_line,
    rules_experts,
    rules_megatron,
    rules_parallelism,
    rules_planning,
    rules_replicas,
    rules_stages,
    rules_training,
)
from megatron_hexi.options.kinds import Refused, Supported

OPTIONS: dict[str, tuple[Supported | Refused, ...]] = {
    **rules_attention.OPTIONS,
    **rules_parallelism.OPTIONS,
    **rules_replicas.OPTIONS,
    **rules_stages.OPTIONS,
    **rules_training.OPTIONS,
    **rules_experts.OPTIONS,
    **rules_planning.OPTIONS,
    **rules_command_line.OPTIONS,
    **rules_megatron.OPTIONS,
}
