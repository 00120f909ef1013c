"""Options of planning that allow or forbid features of plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from megatron_hexi.cluster import PlannerRules
from megatron_hexi.errors import HexiError
from megatron_hexi.plan.flags import spell_flag

#: Fields of `PlannerRules`, each of them an option.
FEATURES = ("ministages", "offload", "unequal_replicas", "unequal_stages", "unequal_experts")


def _feature(field: str, text: str) -> Any:
    """Return the option that allows or forbids a feature, by the field of `PlannerRules`."""
    name = "/".join(spell_flag(field, value) for value in (True, False))
    help_text = f"{text}; default: the cluster file's planner setting, else on."
    return typer.Option(name, help=help_text, rich_help_panel="What plans may use")


@dataclass(frozen=True, kw_only=True)
class PlanFeatures:
    """The features that plans may use; ``None`` where the command line does not set one."""

    ministages: Annotated[
        bool | None,
        _feature("ministages", "Let a stage run its layers in parts, which saves memory or idle time"),
    ] = None
    offload: Annotated[
        bool | None, _feature("offload", "Keep weights, optimizer state or activations in host memory")
    ] = None
    unequal_replicas: Annotated[
        bool | None,
        _feature("unequal_replicas", "Let replicas differ in GPUs, stages and shares of the batch"),
    ] = None
    unequal_stages: Annotated[
        bool | None,
        _feature("unequal_stages", "Let stages differ in layers and ranks; ministages and offload need this"),
    ] = None
    unequal_experts: Annotated[
        bool | None, _feature("unequal_experts", "Let faster or larger GPUs hold more experts of a layer")
    ] = None

    @property
    def rules(self) -> PlannerRules:
        """The command line's rules of what plans may use.

        Raises:
            HexiError: a feature is asked for and what it needs refused.
        """
        for name in ("ministages", "offload"):
            if getattr(self, name) and self.unequal_stages is False:
                raise HexiError(
                    f"{spell_flag(name, True)} and {spell_flag('unequal_stages', False)}: the first needs "
                    "stages with layers of their own; leave out one of them"
                )
        return PlannerRules(**{name: getattr(self, name) for name in FEATURES})
