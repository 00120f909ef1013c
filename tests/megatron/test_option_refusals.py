"""Every option that a plan does not carry out is refused: by its real name, with a reason and a remedy."""

from __future__ import annotations

import re
from argparse import ArgumentParser

import pytest
from packaging.specifiers import SpecifierSet

from megatron_hexi.errors import HexiError
from megatron_hexi.options import parser as recorded
from megatron_hexi.options.kinds import Refused
from megatron_hexi.options.parser import parse_words
from megatron_hexi.options.refusals import refuse_unsupported, refuse_yaml_configuration, refused
from megatron_hexi.shell.words import Word
from tests.megatron.contradictions import CONTRADICTIONS, with_words
from tests.megatron.option_cases import LATENT, PACKED
from tests.megatron.test_uneven_training import MODEL

# The words that make Megatron's parser set the option, where it is more than the flag alone.
OPTION_WORDS = CONTRADICTIONS | {
    "--attention-dropout": "--attention-dropout 0.1",
    "--dataloader-type-unequal": "--dataloader-type external",
    "--decoder-seq-length": "--decoder-seq-length 64",
    "--deterministic-mode": (
        "--deterministic-mode --hybrid-layer-pattern G* --dataloader-inter-document-masking "
        "--micro-batch-size 1 --no-rope-fusion"
    ),
    "--eval-global-batch-size-unequal": "--eval-global-batch-size 8",
    "--eval-micro-batch-size-unequal": "--eval-micro-batch-size 1",
    "--experimental-attention-variant": "--experimental-attention-variant dsa",
    "--experimental-attention-variant<0.19": "--experimental-attention-variant gated_delta_net",
    "--expert-tensor-parallel-num-weight-shards": "--expert-tensor-parallel-num-weight-shards 2",
    "--fp4-format": "--fp4-format e2m1",
    "--fp8-format": "--fp8-format hybrid",
    "--fp8-recipe": "--fp8-recipe custom",
    "--heterogeneous-layers-config-path": "--heterogeneous-layers-config-path layers.json",
    "--hidden-dropout": "--hidden-dropout 0.1",
    "--hybrid-layer-pattern": "--hybrid-layer-pattern D-",
    "--hybrid-layer-pattern<0.19": "--hybrid-layer-pattern *-",
    "--iterations-to-skip-unequal": "--iterations-to-skip 2",
    "--log-interval": "--log-interval 0",
    "--logits-load-dir": "--logits-load-dir logits",
    "--logits-save-dir": "--logits-save-dir logits",
    "--eval-iters": "--sft --no-rope-fusion --eval-iters 2",
    "--micro-batch-size": "--dataloader-inter-document-masking --no-rope-fusion --micro-batch-size 2",
    "--max-seqlen-per-dp-cp-rank": "--max-seqlen-per-dp-cp-rank 64",
    "--moe-expert-capacity-factor": "--moe-expert-capacity-factor 1",
    "--moe-expert-rank-capacity-factor": "--moe-expert-rank-capacity-factor 1",
    "--moe-input-jitter-eps": "--moe-input-jitter-eps 0.1",
    "--moe-router-force-biased": "--moe-router-force-biased 1",
    "--moe-router-load-balancing-type": "--moe-router-load-balancing-type sinkhorn",
    "--moe-router-load-balancing-type<0.19": "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss",
    "--multi-latent-attention": " ".join((*LATENT, *PACKED, "--micro-batch-size", "1")),
    "--mlp-chunks-for-training": "--mlp-chunks-for-training 2",
    "--mtp-num-layers": "--mtp-num-layers 1 --pipeline-model-parallel-size 2",
    "--num-layers-per-virtual-pipeline-stage": (
        "--hybrid-layer-pattern *-*- --num-layers-per-virtual-pipeline-stage 1"
    ),
    "--num-experts": "--num-experts 4 --hybrid-layer-pattern *-",
    "--num-experts-repeated": "--num-experts 4",
    "--mrope-section": "--position-embedding-type mrope --mrope-section 4 2 2 --mtp-num-layers 1",
    "--mrope-section<0.19": "--position-embedding-type mrope --mrope-section 4 2 2",
    "--position-embedding-type": "--position-embedding-type relative",
    "--position-embedding-type-script": "--position-embedding-type mrope --mrope-section 4 2 2",
    "--rampup-batch-size<0.18": "--rampup-batch-size 2 2 12",
    "--rampup-batch-size>=0.18": "--rampup-batch-size 2 2 12",
    "--recompute-modules": "--recompute-granularity selective --recompute-modules mlp",
    "--rope-scaling-factor": "--use-rope-scaling --rope-scaling-factor 32",
    "--sft<0.19": "--sft --micro-batch-size 1 --eval-iters 0",
    "--sft-unequal": "--sft --no-rope-fusion --micro-batch-size 1 --eval-iters 0",
    "--te-precision-config-file": "--te-precision-config-file layers.yaml",
    "--tensor-model-parallel-size": "--tensor-model-parallel-size 2 --hybrid-layer-pattern G*",
    "--tensor-parallel-num-weight-shards": "--tensor-parallel-num-weight-shards 2",
    "--transformer-impl": "--transformer-impl inference_optimized",
    "--window-size": "--window-size 128,128",
    "--num-experts-stages<0.19": "--num-experts 4",
    "--load-main-params-from-ckpt-stages": "--load-main-params-from-ckpt --no-load-optim",
    "--moe-latent-size-stages": ("--num-experts 4 --moe-token-dispatcher-type alltoall --moe-latent-size 32"),
    "--moe-use-upcycling-stages": "--moe-use-upcycling --save out --save-interval 2",
    "--mtp-num-layers-stages<0.19": "--mtp-num-layers 1",
    "--mtp-detach-heads-stages": "--mtp-num-layers 1 --mtp-detach-heads",
    "--use-precision-aware-optimizer-stages": (
        "--use-precision-aware-optimizer --use-distributed-optimizer --exp-avg-dtype bf16"
    ),
    "--optimizer-stages": "--optimizer muon",
    "--distribute-saved-activations-planned": (
        "--distribute-saved-activations --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    ),
    "--fp32-residual-connection-planned": "--fp32-residual-connection --bf16",
    "--ckpt-format-stages": "--ckpt-format torch",
    "--non-persistent-ckpt-type-stages": (
        "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir here"
    ),
    "--check-weight-hash-across-dp-replicas-interval-stages": (
        "--check-weight-hash-across-dp-replicas-interval 2"
    ),
    "--moe-latent-size-planned": "--num-experts 4 --moe-latent-size 32",
    "--mtp-use-repeated-layer-planned": "--mtp-num-layers 1 --mtp-use-repeated-layer",
    "--hybrid-override-pattern-planned": "--hybrid-override-pattern *-",
    "--spec-planned": "--spec my.layers spec",
    "--step-batch-size-schedule-planned": "--step-batch-size-schedule 0:4",
    "--yaml-cfg": "--yaml-cfg job.yaml",
    "--batch-size": "--batch-size 4",
    "--warmup": "--warmup 10",
    "--model-parallel-size": "--model-parallel-size 2",
    "--heterogeneous-layers-config-encoded-json": "--heterogeneous-layers-config-encoded-json {}",
    "--logits-load-dir-script": "--logits-load-dir logits",
    "--logits-save-dir-script": "--logits-save-dir logits",
    "--yaml-cfg-script": "--yaml-cfg job.yaml",
    "--hybrid-layer-pattern-script<0.19": "--hybrid-layer-pattern *-",
    "--hybrid-override-pattern-script<0.19": "--hybrid-override-pattern *-",
    "--experimental-attention-variant-script<0.19": "--experimental-attention-variant dsa",
    "--heterogeneous-layers-config-path-script<0.19": "--heterogeneous-layers-config-path layers.json",
}


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    """Megatron's own, so that a renamed flag cannot slip through."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


@pytest.mark.parametrize("option", refused(), ids=lambda option: option.name)
def test_an_option_is_refused_by_its_real_name(
    option: Refused, parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch
):
    versions = SpecifierSet(option.versions or ">=0.19")
    version = next(version for version in ("0.19.2", "0.18.2", "0.17.1") if version in versions)
    monkeypatch.setattr(recorded, "assumed_release", lambda: version)
    words = with_words(MODEL, OPTION_WORDS.get(option.name, option.option))
    if option.option in parser._option_string_actions:
        args = parser.parse_args(words)
    else:  # of an earlier version, as recorded
        args = parse_words([Word(word, 0) for word in words], "").args
    message = option.message
    told = f"{option.option} does not work with {option.conflicts_with}: {option.reason}; "
    assert message.startswith(told)
    assert message.removeprefix(told) in (option.remedy, option.remedy.replace(" it", f" {option.option}", 1))
    with pytest.raises(HexiError, match=re.escape(message)):
        refuse_unsupported(args, option.beside)
    if option.beside not in ("any", "script"):
        refuse_unsupported(args, "any")


@pytest.mark.parametrize(
    "words",
    [
        "--moe-router-load-balancing-type aux_loss sinkhorn",
        "--position-embedding-type relative",
        "--hybrid-layer-pattern *-|*-",
    ],
)
def test_so_is_each_of_its_values(words: str, parser: ArgumentParser):
    with pytest.raises(HexiError, match="does not work with --hexi-plan"):
        refuse_unsupported(parser.parse_args([*MODEL, *words.split()]), "any")


def test_what_is_not_refused_passes(parser: ArgumentParser):
    refuse_unsupported(parser.parse_args(MODEL), "unequal")
    refuse_unsupported(parser.parse_args(MODEL), "stages")


def test_a_yaml_configuration_beside_a_plan_is_refused_before_it_drops_the_plan():
    with pytest.raises(HexiError, match="--yaml-cfg does not work with --hexi-plan"):
        refuse_yaml_configuration(["pretrain_gpt.py", "--yaml-cfg=job.yaml", "--hexi-plan", "plan.yaml"])
    refuse_yaml_configuration(["pretrain_gpt.py", "--yaml-cfg=job.yaml"])
