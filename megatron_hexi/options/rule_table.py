"""The table `OPTIONS` of all rules that support, replace or refuse an option beside a plan, by topic."""

from __future__ import annotations

from megatron_hexi.options import (
    rules_attention,
    rules_command_line,
    rules_experts,
    rules_megatron,
    rules_parallelism,
    rules_planning,
    rules_replaced,
    rules_replicas,
    rules_stages,
    rules_training,
)
from megatron_hexi.options.kinds import Refused, Replaced, Supported

OPTIONS: dict[str, tuple[Supported | Replaced | Refused, ...]] = {
    **rules_replaced.OPTIONS,
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
