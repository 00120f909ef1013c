"""Options that only choose speed or memory are replaced: training is without them, and a line says so."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace

import pytest

from megatron_hexi.options.kinds import Replaced
from megatron_hexi.options.refusals import refuse_unsupported, replace_options, replaced
from tests.megatron.option_cases import LATENT
from tests.megatron.test_uneven_training import MODEL
from tests.support.stage_layouts import FOUR_LAYERS, stage_layout

#: Words that the job without the option has too.
BESIDE = {
    "--dataloader-inter-document-masking": "--dataloader-inter-document-masking --micro-batch-size 1",
    "--sft": "--sft --micro-batch-size 1 --eval-iters 0",
    "--multi-latent-attention": " ".join(LATENT),
    "--moe-token-dispatcher-type": "--num-experts 4 --expert-model-parallel-size 2",
    "--moe-token-dispatcher-type-stages": "--num-experts 4",
    "--delay-wgrad-compute": "--transformer-impl local",
    "--recompute-modules": "--recompute-granularity selective",
}
#: The option's own words, and those by which Megatron trains what stands in its place.
WORDS = {
    "--attention-backend": ("--attention-backend flash", ""),
    "--dataloader-inter-document-masking": ("", "--no-rope-fusion"),
    "--sft": ("", "--no-rope-fusion"),
    "--multi-latent-attention": ("", "--no-rope-fusion"),
    "--cp-comm-type": ("--cp-comm-type a2a", ""),
    "--hierarchical-context-parallel-sizes": ("--hierarchical-context-parallel-sizes 2 2", ""),
    "--moe-token-dispatcher-type": (
        "--moe-token-dispatcher-type flex --moe-enable-deepep --moe-flex-dispatcher-backend hybridep",
        "--moe-token-dispatcher-type alltoall",
    ),
    "--moe-token-dispatcher-type-stages": (
        "--moe-token-dispatcher-type allgather",
        "--moe-token-dispatcher-type alltoall",
    ),
    "--overlap-moe-expert-parallel-comm": ("--overlap-moe-expert-parallel-comm --delay-wgrad-compute", ""),
    "--num-distributed-optimizer-instances": ("--num-distributed-optimizer-instances 2", ""),
    "--cuda-graph-impl": ("--cuda-graph-impl local --cuda-graph-modules attn", ""),
    "--cpu-offloading-num-layers": ("--cpu-offloading-num-layers 1", ""),
    "--recompute-modules": ("--recompute-modules core_attn gdn_norm_out", "--recompute-modules core_attn"),
    "--optimizer-cpu-offload-stages": ("--optimizer-cpu-offload --use-precision-aware-optimizer", ""),
    "--microbatch-group-size-per-virtual-pipeline-stage-stages": (
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
        "",
    ),
}
#: Lines of one job with as many of these options as Megatron parses beside each other, on a CPU.
MANY = (
    *("--attention-backend", "flash", "--cp-comm-type", "a2a", "--tp-comm-overlap", "--use-tp-pp-dp-mapping"),
    *("--cuda-graph-impl", "local", "--cuda-graph-modules", "attn", "--ddp-average-in-collective"),
    *("--fine-grained-activation-offloading", "--delay-wgrad-compute", "--cpu-offloading-num-layers", "1"),
)


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    """Megatron's own."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


def parsed(parser: ArgumentParser, option: Replaced, words: str) -> Namespace:
    return parser.parse_args([*MODEL, *BESIDE.get(option.name, "").split(), *words.split()])


@pytest.mark.parametrize("option", replaced(), ids=lambda option: option.name)
def test_arguments_are_those_without_the_option(option: Replaced, parser: ArgumentParser):
    known = parser._option_string_actions
    used, instead = WORDS.get(option.name, (option.option, ""))
    if option.option not in known:
        pytest.skip(f"{option.option}: an earlier version's")
    args, plain = parsed(parser, option, used), parsed(parser, option, instead)
    assert vars(args) != vars(plain)
    lines = replace_options(args, option.beside)
    assert any(re.fullmatch(rf"{option.option}( \S+)?: {re.escape(option.instead)}", line) for line in lines)
    assert vars(args) == vars(plain)
    args.group_query_attention = False  # of the job that all share; latent attention has none
    refuse_unsupported(args, option.beside)
    assert not replace_options(args, option.beside)


def test_losses_are_those_without_the_options(forks, references, tmp_path):
    weights, _ = references(FOUR_LAYERS, iterations=4)
    plan = stage_layout("units", tmp_path)
    words = [*MODEL, *FOUR_LAYERS, "--train-iters", "2", "--load", weights, "--finetune"]
    plain = forks.train(tmp_path, ranks=plan.ranks, args=words, plan=plan)
    many = forks.train(tmp_path, ranks=plan.ranks, args=[*words, *MANY], plan=plan)
    assert many.losses == plain.losses
    assert many.grad_norms == plain.grad_norms
    for argument, value in (("attention_backend", "AttnBackend.auto"), ("cuda_graph_impl", "none")):
        assert re.search(rf"{argument} \.+ {re.escape(value)}", many.output)
