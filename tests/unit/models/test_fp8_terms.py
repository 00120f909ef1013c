"""Precision in fp8, as scripts and Bridge's configurations state it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hexi.models import read_model, read_terms

SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --position-embedding-type rope "
    "--transformer-impl transformer_engine --seq-length 8192"
)
ENDS = "--first-last-layers-bf16 --num-layers-at-end-in-bf16 2"
STARTS = "first_last_layers_bf16: true, num_layers_at_start_in_bf16: 3"
BRIDGE = Path(__file__).parent / "bridge" / "llama3-8b.yaml"


@pytest.mark.parametrize(
    ("words", "precision", "recipe", "ends"),
    [
        ("--fp8-format hybrid", "fp8", "delayed", (0, 0)),
        (f"--fp8-format e4m3 --fp8-recipe mxfp8 {ENDS}", "fp8", "mxfp8", (1, 2)),
        (f"--fp8-recipe blockwise {ENDS}", "bf16", None, (0, 0)),
    ],
)
def test_a_script_states_fp8(words, precision, recipe, ends, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(f"torchrun pretrain_gpt.py {SHAPE} --micro-batch-size 1 --bf16 {words}\n")
    terms = read_terms(path)
    assert terms is not None
    assert (terms.fields["precision"], terms.fields.get("fp8_recipe")) == (precision, recipe)
    assert read_model(path).ends_in_bf16 == ends


@pytest.mark.parametrize(
    ("precision", "recipe", "ends"),
    [
        ("bf16_with_fp8_subchannel_scaling_mixed", "blockwise", (0, 0)),
        ("{bf16: true, fp8: hybrid, fp8_param_gather: false}", "tensorwise", (0, 0)),
        (
            f"{{bf16: true, fp8: e4m3, fp8_recipe: mxfp8, {STARTS}}}",
            "mxfp8",
            (3, 0),
        ),
    ],
)
def test_a_configuration_of_bridge_states_fp8(precision, recipe, ends, tmp_path):
    text, usual = BRIDGE.read_text(encoding="utf-8"), "mixed_precision: bf16_mixed"
    assert usual in text
    path = tmp_path / "run_config.yaml"
    path.write_text(text.replace(usual, f"mixed_precision: {precision}"), encoding="utf-8")
    terms = read_terms(path)
    assert terms is not None
    assert (terms.fields["precision"], terms.fields["fp8_recipe"]) == ("fp8", recipe)
    assert read_model(path).ends_in_bf16 == ends
