"""Plans that training has for a model's layers: the rules of Megatron's options, asked with its flags."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from megatron_hexi.argument_file import located_words
from megatron_hexi.cost import NoFlagError, model_flags
from megatron_hexi.errors import HexiError
from megatron_hexi.options.kinds import PlanKind
from megatron_hexi.options.parser import parse_words
from megatron_hexi.options.refusals import find_refused
from megatron_hexi.plan.flags import spell_flag
from megatron_hexi.planner.request import Request


def trained_request(request: Request) -> Request:
    """Return a request that allows no plan which training refuses for layers with a state, or of one part.

    Where stages with layers of their own are refused, a pipeline is one stage: hybrids train in no other.

    Raises:
        HexiError: training refuses the layers in every plan, or in all that the request asks for; with the
            option and the reason.
    """
    model = request.job.model
    if model.state is None and not model.pattern:
        return request
    try:
        words = shlex.join(model_flags(model, request.job.seq_length))
    except NoFlagError:
        return request  # no job can be started, and its times may be asked for
    args = parse_words(located_words(words, Path(model.name)), model.name).args

    def refusal(kind: PlanKind) -> str:
        option = find_refused(args, kind)
        return "" if option is None else option.message

    always, stages = refusal("any"), refusal("stages")
    why = always or (stages if model.experts is not None else "")
    if why:  # a plan says where experts are in stages with layers only
        raise HexiError(f"model {model.name}: {why}")
    if request.lacks_sequence_parallel(request.job.tensor_parallel):
        asked = spell_flag("tensor_parallel", request.job.tensor_parallel)
        raise HexiError(f"{asked}: model {model.name} has delta nets; give --sequence-parallel too")
    rules = request.rules
    if refusal("unequal"):
        rules = replace(rules, unequal_replicas=False)
    if not stages:
        return replace(request, rules=rules)
    if "pipeline_parallel" in request.fixed and request.job.pipeline_parallel > 1:
        asked = spell_flag("pipeline_parallel", request.job.pipeline_parallel)
        raise HexiError(f"{asked}: model {model.name}: {stages}")
    rules = replace(rules, unequal_stages=False, ministages=False, offload=False)
    job = replace(request.job, pipeline_parallel=1)
    return replace(request, job=job, fixed=request.fixed | {"pipeline_parallel"}, rules=rules)
