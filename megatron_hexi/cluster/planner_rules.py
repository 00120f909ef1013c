"""The features that plans for a cluster may use, by the cluster file and by the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Final

from pydantic import ConfigDict, Field

from megatron_hexi.cluster.schema import STRICT

Flag = Annotated[bool, Field(strict=True)] | None


@dataclass(frozen=True)
class PlannerRules:
    """Whether plans may use each of five features; a feature that is not stated is allowed.

    Args:
        ministages: stages that run in several parts: one after the other, with weights that are fetched when
            they are needed, or interleaved.
        offload: weights, optimizer state or activations in host memory.
        unequal_replicas: data-parallel replicas with different GPUs, stages or numbers of micro-batches.
        unequal_stages: pipeline stages with different numbers of layers; ministages and offload need them.
        unequal_experts: ranks that hold different numbers of a layer's experts.
    """

    ministages: Flag = None
    offload: Flag = None
    unequal_replicas: Flag = None
    unequal_stages: Flag = None
    unequal_experts: Flag = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def over(self, defaults: PlannerRules) -> PlannerRules:
        """Return these rules, with features that they do not state taken from `defaults`."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return PlannerRules(**(vars(defaults) | values))

    def allow(self, feature: str) -> bool:
        """Return whether plans may use a feature, given by its field name."""
        return getattr(self, feature) is not False

    @property
    def refused(self) -> tuple[str, ...]:
        """Names of the features that plans may not use, in the order of the fields."""
        return tuple(field.name for field in fields(self) if not self.allow(field.name))


#: Share of usable memory that plans keep free unless told otherwise.
MEMORY_MARGIN: Final = 0.05
#: Rules that allow every feature.
ANYTHING: Final = PlannerRules()
