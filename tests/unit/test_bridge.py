"""Megatron Bridge's run_config.yaml, as its recipes of megatron-bridge 0.6.2 write it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hexi.cost import argument_words, read_model, read_terms, unread_fields
from megatron_hexi.errors import HexiError

FILES = Path(__file__).parent / "bridge"
NAMES = ("qwen3-30b-a3b", "gpt-oss-20b")


@pytest.mark.parametrize("name", NAMES)
def test_the_model_of_a_recipe_is_the_preset(name):
    read, preset = read_model(FILES / f"{name}.yaml"), read_model(name)
    # Bridge pads no vocabulary, whose size is a multiple of 128 in both.
    assert preset.vocab_size % preset.vocab_multiple == 0
    multiple = preset.vocab_multiple
    assert replace(read, name=preset.name, source=preset.source, vocab_multiple=multiple) == preset


def test_the_job_of_a_recipe():
    terms = read_terms(FILES / "qwen3-30b-a3b.yaml")
    assert terms is not None
    assert terms.fields["seq_length"] == 4096
    assert terms.fields["global_batch_size"] == 32
    assert terms.fields["precision"] == "bf16"
    assert (terms.fields["tensor_parallel"], terms.fields["pipeline_parallel"]) == (4, 2)
    assert {"--lr", "--train-iters", "--tokenizer-model"} <= set(terms.free)
    assert "logger" in unread_fields(FILES / "qwen3-30b-a3b.yaml")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("torch.nn.functional.silu", "torch.nn.functional.tanh", r":\d+: model\.activation_func: .*tanh"),
        (
            "models.gpt_provider.GPTModelProvider",
            "models.x.VLProvider",
            r":\d+: model\._target_: .*VLProvider",
        ),
        ("mixed_precision: bf16_mixed", "mixed_precision: bf16_with_mxfp8_mixed", "mixed_precision: .*mxfp8"),
        ("hidden_size: 2048", "hidden_size: many", r"line \d+: argument --hidden-size"),
        ("\npeft: null", "\npeft: {dim: 8}", r":\d+: peft: "),
        ("  moe_token_dropping: false", "  moe_token_dropping: true", r":\d+: model\.moe_token_dropping: "),
        ("config.GPTDatasetConfig", "config.OtherConfig", r":\d+: dataset\._target_: "),
    ],
)
def test_what_flags_cannot_say_is_refused(old, new, said, tmp_path):
    text = (FILES / "qwen3-30b-a3b.yaml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "run_config.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(HexiError, match=said):
        read_model(path)


def test_nothing_that_the_file_names_is_called(tmp_path):
    text = (FILES / "qwen3-30b-a3b.yaml").read_text(encoding="utf-8")
    path, victim = tmp_path / "run_config.yaml", tmp_path / "victim"
    call = f"\nenv_vars:\n  a: {{_target_: os.mkdir, _args_: ['{victim}']}}"
    path.write_text(text.replace("\nenv_vars:", call, 1), encoding="utf-8")
    assert argument_words(path)
    assert not victim.exists()
