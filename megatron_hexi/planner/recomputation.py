"""Sets of modules that stages may compute again: of all of Megatron's those that are worth a search."""

from __future__ import annotations

from megatron_hexi.cost.layer_bytes import separate_norms
from megatron_hexi.models import Job
from megatron_hexi.plan.recompute import Module, Recompute
from megatron_hexi.planner.request import Request


def offered(request: Request, job: Job) -> tuple[Recompute, ...]:
    """Return what stages may compute again in each layer, each with fewer bytes kept than the one before.

    Nothing, modules that mostly move bytes, these with MLPs and experts, and whole layers. Only the last
    repeats core attention, whose seconds grow with the context; alone it is no choice, as it made no plan
    faster.

    Args:
        request: the job, with the terms that are fixed.
        job: the request's, or a plan's: it says whether latent columns travel.
    """
    if "recompute" in request.fixed:
        return (request.job.recompute,)
    scales_once = job.precision == "fp8" and job.fp8_recipe == "delayed"  # by values that are cast once
    has_experts = any(kind.model.routed for kind in job.kinds)
    has_mlps = any(
        not kind.model.routed and kind.model.feed_forward in kind.model.parts for kind in job.kinds
    )
    light, heavy = list[Module](), list[Module]()
    if not scales_once and any(any(separate_norms(kind)) for kind in job.kinds):
        light.append("layernorm")
    if True in job.model.attention.exchanges and not job.latent_exchange:
        light.append("mla_up_proj")
    if has_mlps and not job.model.biases:  # Megatron cannot compute an MLP with biases again by itself
        heavy.append("mlp")
    if has_experts:
        heavy.append("moe")
    activations: list[Module] = ["moe_act"] * (
        has_experts and "experts" not in job.unfused and not scales_once
    )
    sets = (*light, *activations), (*light, *heavy)
    return ("none", *dict.fromkeys(modules for modules in sets if modules), "full")
