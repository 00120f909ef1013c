"""Megatron Bridge's run_config.yaml, as its recipes of megatron-bridge 0.6.2 write it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hexi.cost import argument_words, read_model, read_terms, unread_fields
from megatron_hexi.errors import HexiError

FILES = Path(__file__).parent / "bridge"
NAMES = ("qwen3-30b-a3b", "gpt-oss-20b", "llama3-8b")


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
        (
            "  init_method: null",
            "  init_method: {_target_: mine.orthogonal, _call_: false}",
            r":\d+: model\.init_method: 'mine\.orthogonal': a function or object of its own",
        ),
        (
            "  no_sync_func: null",
            "  no_sync_func: {_target_: functools.partial, _args_: [{_target_: mine.hook}]}",
            r":\d+: model\.no_sync_func: 'mine\.hook': ",
        ),
        (
            "  quant_recipe: null",
            "  quant_recipe: {_target_: megatron.core.quantization.Recipe, _call_: true}",
            r":\d+: model\.quant_recipe: .*a function or object of its own",
        ),
        ("  lr: 0.0003", "  lr: {_target_: mine.rate}", r":\d+: optimizer\.lr: 'mine\.rate': "),
    ],
)
def test_what_flags_cannot_say_is_refused(old, new, said, tmp_path):
    text = (FILES / "qwen3-30b-a3b.yaml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "run_config.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(HexiError, match=said):
        read_model(path)


def test_what_megatron_makes_for_itself_is_named_as_not_read(tmp_path):
    text = (FILES / "qwen3-30b-a3b.yaml").read_text(encoding="utf-8")
    for field, value in {
        "init_method": "{_target_: megatron.core.utils.init_method_normal, _call_: false}",
        "finalize_model_grads_func": "{_target_: megatron.core.distributed.finalize, _call_: false}",
    }.items():
        text = text.replace(f"  {field}: null", f"  {field}: {value}")
    path = tmp_path / "run_config.yaml"
    path.write_text(text, encoding="utf-8")
    assert {"model.init_method", "model.finalize_model_grads_func"} <= set(unread_fields(path))
    assert read_terms(path) == read_terms(FILES / "qwen3-30b-a3b.yaml")


def test_defaults_are_not_named_as_not_read():
    unread = unread_fields(FILES / "llama3-8b.yaml")
    assert "model.cross_entropy_loss_fusion" in unread  # on, where Megatron's script has it off
    assert not {"model.batch_p2p_comm", "model.transformer_impl", "model.perform_initialization"} & set(
        unread
    )


def test_a_dense_job_of_a_recipe():
    terms = read_terms(FILES / "llama3-8b.yaml")
    assert terms is not None
    assert (terms.fields["seq_length"], terms.fields["global_batch_size"]) == (8192, 512)
    assert terms.context_parallel == 2


def test_deepseek_s_prediction_heads_beside_its_pipeline_are_refused(tmp_path):
    """The rest of the dump is the preset."""
    path = FILES / "deepseek-v3.yaml"
    with pytest.raises(HexiError, match=r"deepseek-v3\.yaml, line \d+: --mtp-num-layers does not work"):
        read_model(path)
    text = path.read_text(encoding="utf-8")
    for old, new in (("  mtp_num_layers: 1", "  mtp_num_layers: null"), ("      - mtp\n", "")):
        assert old in text or new == ""
        text = text.replace(old, new)
    (tmp_path / "run_config.yaml").write_text(text, encoding="utf-8")
    read, preset = read_model(tmp_path / "run_config.yaml"), read_model("deepseek-v3")
    same = {name: getattr(preset, name) for name in ("name", "source", "mtp_layers", "norm_biases")}
    assert replace(read, **same, vocab_multiple=preset.vocab_multiple) == preset


def test_nothing_that_the_file_names_is_called(tmp_path):
    text = (FILES / "qwen3-30b-a3b.yaml").read_text(encoding="utf-8")
    path, victim = tmp_path / "run_config.yaml", tmp_path / "victim"
    call = f"\nenv_vars:\n  a: {{_target_: os.mkdir, _args_: ['{victim}']}}"
    path.write_text(text.replace("\nenv_vars:", call, 1), encoding="utf-8")
    assert argument_words(path)
    assert not victim.exists()
