"""Words that Megatron's own checks refuse, by the name of the rule that refuses them before."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_hexi.argument_file import without_flags
from megatron_hexi.options.kinds import row_of
from megatron_hexi.options.parser import Row
from megatron_hexi.options.rules_megatron import STOPS, stops_together

_EXPERTS = "--num-experts 4"
_LATENT = (
    "--multi-latent-attention --no-rope-fusion --qk-layernorm --disable-bias-linear --kv-lora-rank 16 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 8"
)
#: Values of options that several conditions name.
_VALUES = {
    "--expert-model-parallel-size": "3",
    "--hybrid-layer-pattern": "*-",
    "--linear-attention-freq": "2",
    "--min-lr": "1.0",
    "--moe-router-load-balancing-type": "aux_loss",
    "--moe-router-num-groups": "3",
    "--mtp-hybrid-override-pattern": "x",
    "--no-rope-freq": "3",
    "--num-experts": "4",
    "--pipeline-model-parallel-size": "1",
}
#: Words before a rule's own, by the beginning of its conditions.
_BEFORE = {
    "--group-query-attention": "--num-query-groups 2",
    "--moe-router-topk": _EXPERTS,
    "--moe-router-enable": _EXPERTS,
    "--moe-router-group-topk > --": f"{_EXPERTS} --moe-router-num-groups 2",
    "--moe-deepep-num-sms": "--moe-hybridep-num-sms 8",
    "--moe-single-grouped": _EXPERTS,
    "--moe-flex": _EXPERTS,
    "--expert-model-parallel-size, ": f"{_EXPERTS} --moe-token-dispatcher-type alltoall",
    "--min-lr": "--lr 1e-4",
    "--lr-warmup-fraction": "--train-iters 10",
    "--save-retain-interval": "--save-interval 2",
    "--save-params-interval": "--save-interval 2 --use-distributed-optimizer --overlap-grad-reduce",
    "--eval-global": "--eval-micro-batch-size 2",
    "--log-memory-interval": "--log-interval 2",
    "--num-layers-per-virtual": "--pipeline-model-parallel-size 2",
    "--num-virtual": "--pipeline-model-parallel-size 2",
}


def _words(condition: str) -> str:
    """Return words for which a condition holds: see `with_words`."""
    parts = condition.partition(" or ")[0].split()
    if parts[0] == "no":
        return " ".join(parts)
    flag, *rest = parts
    if flag == "--multi-latent-attention":
        return _LATENT
    row = row_of(flag)
    if not rest:
        return flag if row.kind != "store" else f"{flag} {_VALUES.get(flag) or _any_value(row)}"
    values = rest[-1].split("|")
    if rest[0] == "not":
        return f"{flag} {next(str(choice) for choice in row.choices or ('x',) if choice not in values)}"
    if rest[0] in "<>%":
        if not rest[1].startswith("--"):
            return f"{flag} {int(rest[1]) + {'<': -1, '>': 1}[rest[0]]}"
        return f"{flag} {_VALUES.get(flag) or {'<': 7, '>': 9, '%': 5}[rest[0]]}"
    return f"{flag} {values[0]}"


def _any_value(row: Row) -> str:
    return {"int": "2", "float": "0.5"}.get(row.type) or str((row.choices or ("x",))[0])


def _all_words(text: str) -> str:
    before = [words for start, words in _BEFORE.items() if text.startswith(start)]
    return " ".join(filter(None, [*before, *map(_words, text.split(", "))]))


def with_words(job: Sequence[str], words: str) -> list[str]:
    """Return the words of a job with others, without the flags that follow a "no" there."""
    left_out = set(re.findall(r"\bno (--\S+)", words))
    return [*without_flags(job, left_out), *re.sub(r"\bno --\S+", "", words).split()]


#: Words by rule.
CONTRADICTIONS = {stops_together(text, "").name: _all_words(text) for text in STOPS} | {
    "--moe-aux-loss-coeff-another_number_of_balancing_losses": (
        f"{_EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1"
    ),
    "--moe-ffn-hidden-size---num-experts_left_out": "--moe-ffn-hidden-size 64",
    "--phase-transition-iterations-other_than_numbers": "--phase-transition-iterations ten",
}
