"""Plans that training has for a model's layers: the rules of Megatron's options, asked with its flags."""

from __future__ import annotations

from megatron_hexi.errors import NoFlagError, raise_all
from megatron_hexi.models import model_flags
from megatron_hexi.options.parser import parse_words
from megatron_hexi.options.refusals import find_refused
from megatron_hexi.planner.request import Request
from megatron_hexi.shell.words import unplaced


def refuse_untrained(request: Request) -> None:
    """Refuse a request for layers that training refuses in every plan.

    Raises:
        HexiError: training refuses the layers, or the tensor-parallel size; with the option and the reason.
    """
    model = request.job.model
    try:
        flags = model_flags(model, request.job.seq_length)
    except NoFlagError:
        return  # no job can be started, and its times may be asked for
    if any(experts.score_bias for experts in model.routed):  # which Megatron has of sigmoids alone
        flags += ["--moe-router-score-function", "sigmoid"]
    words = unplaced(flags)
    options = find_refused(parse_words(words, model.name).args, "any")
    raise_all([f"model {model.name}: {option.message}" for option in options])
