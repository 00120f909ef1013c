"""Layers of pipeline stages that are alike, timed once.

Most stages of a large plan hold the same tokens and heads on GPUs whose links are alike, and a search times
many plans of which only a few stages differ.
"""

from __future__ import annotations

from functools import partial

from megatron_hexi.cost.layer import ExpertCycle, Layer, layer_times
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.recent import Recent
from megatron_hexi.cost.sections import Section
from megatron_hexi.models.job import Job

#: Layers that are kept: two kinds of 16 stages, twice.
_MOST_LAYERS = 64
#: The most units of a stage whose layers are kept: of larger stages a plan has few.
_MOST_UNITS = 256


class KnownLayers:
    """Times layers on one cluster, each layer of stages that are alike once.

    Args:
        links: the cluster's links.
    """

    def __init__(self, links: LinkTable) -> None:
        self.links = links
        self._layers = Recent[Layer](_MOST_LAYERS)

    def times(self, section: Section, kind: Job, experts: ExpertCycle | None) -> Layer:
        """Return the seconds of a layer of one kind in a section, as `layer_times` does.

        Args:
            experts: seconds of the layer's routed experts; ``None``: it has none.
        """
        plan, stage = section.arrays, section.placement.stage
        make = partial(layer_times, plan, kind, stage, self.links, section.window, experts)
        if len(plan.tokens) > _MOST_UNITS:
            return make()
        arrays = [plan.tokens, plan.starts, plan.stops, stage.kinds, stage.bandwidth, stage.latency]
        if experts is not None:
            arrays += [experts.compute, experts.exchange, experts.wait, experts.activation]
        key = (
            kind,
            section.window,
            plan.causal,
            plan.grouping,
            self.links.likeness(stage.gpus),
            *(values.tobytes() for values in arrays),
        )
        return self._layers.of(key, make)
