"""Megatron Bridge's run_config.yaml, as its recipes of megatron-bridge 0.6.2 write it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_hexi.errors import HexiError
from megatron_hexi.models import argument_words, read_model, read_terms, reading_notes
from megatron_hexi.models.bridge_fields import LEFT_FIELDS
from megatron_hexi.options.parser import read_rows
from megatron_hexi.options.registry import class_of

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
    assert " logger," in reading_notes(FILES / "qwen3-30b-a3b.yaml")[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("torch.nn.functional.silu", "torch.nn.functional.tanh", r":\d+: model\.activation_func: .*tanh"),
        (
            "models.gpt_provider.GPTModelProvider",
            "models.x.VLProvider",
            r":\d+: model\._target_: .*VLProvider",
        ),
        (
            "mixed_precision: bf16_mixed",
            "mixed_precision: bf16_with_mxfp8_mixed",
            "mixed_precision: .*mxfp8.*fp8_param_gather: false",
        ),
        (
            "mixed_precision: bf16_mixed",
            "mixed_precision: {bf16: true, fp4: e2m1}",
            r":\d+: mixed_precision\.fp4: .*write null",
        ),
        (
            "mixed_precision: bf16_mixed",
            "mixed_precision: {bf16: true, fp8: hybrid, fp8_dot_product_attention: true}",
            r"fp8_dot_product_attention: .*attention in 16 bits; write false",
        ),
        ("hidden_size: 2048", "hidden_size: many", r"line \d+: argument --hidden-size"),
        ("  parallel_output: true", "  parallel_output: false", r":\d+: model\.parallel_output: "),
        (
            "  activation_func_fp8_input_store: false",
            "  activation_func_fp8_input_store: true",
            r":\d+: model\.activation_func_fp8_input_store: ",
        ),
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


def test_fine_tuning_and_adapters_are_read_for_a_plan_only(tmp_path):
    text = (FILES / "llama3-8b.yaml").read_text(encoding="utf-8")
    plain = read_terms(FILES / "llama3-8b.yaml")
    path = tmp_path / "run_config.yaml"
    sections = yaml.safe_load(text)
    sections["peft"] = {"_target_": "megatron.bridge.peft.dora.DoRA", "dim": 16}
    sections["dataset"] = {
        "_target_": "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig",
        "seq_length": 4096,
        "offline_packing_specs": {"packed_sequence_size": 8192},
        "hf_dataset": {"_target_": "megatron.bridge.data.sources.hf.HFDatasetSourceConfig"},
    }
    path.write_text(yaml.safe_dump(sections, sort_keys=False), encoding="utf-8")
    terms = read_terms(path)
    assert terms is not None
    assert plain is not None
    # Rotary embeddings within documents are not fused.
    assert terms.fields == {**plain.fields, "lora_rank": 16, "unfused": ("rotary", "permutation", "experts")}
    assert terms.restricting == {"--dataloader-inter-document-masking": ("unequal_stages",)}
    with pytest.raises(HexiError, match=r"adapters on frozen weights and data for fine-tuning: "):
        argument_words(path)
    for wrong in ({"dim": 0}, {"_target_": "mine.Adapters"}):
        sections["peft"] |= wrong
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        with pytest.raises(HexiError, match=r"run_config\.yaml:\d+: peft"):
            read_terms(path)


def test_what_megatron_makes_for_itself_is_named_as_not_read(tmp_path):
    text = (FILES / "qwen3-30b-a3b.yaml").read_text(encoding="utf-8")
    for field, value in {
        "init_method": "{_target_: megatron.core.utils.init_method_normal, _call_: false}",
        "finalize_model_grads_func": "{_target_: megatron.core.distributed.finalize, _call_: false}",
    }.items():
        text = text.replace(f"  {field}: null", f"  {field}: {value}")
    path = tmp_path / "run_config.yaml"
    path.write_text(text, encoding="utf-8")
    assert {"model.init_method", "model.finalize_model_grads_func"} <= set(reading_notes(path)[0].split(", "))
    assert read_terms(path) == read_terms(FILES / "qwen3-30b-a3b.yaml")


def test_defaults_are_not_named_as_not_read():
    unread = reading_notes(FILES / "llama3-8b.yaml")[0].split(", ")
    assert "model.deallocate_pipeline_outputs" in unread  # on, where Megatron's default is off
    assert not {"model.batch_p2p_comm", "model.transformer_impl", "model.perform_initialization"} & set(
        unread
    )


def test_what_no_plan_depends_on_becomes_a_flag():
    words = argument_words(FILES / "llama3-8b.yaml")
    assert words is not None
    assert {"--cross-entropy-loss-fusion", "--no-overlap-p2p-communication"} <= set(words)
    assert "--cross-entropy-fusion-impl" not in words  # te in the recipe, which Megatron's script refuses


def test_no_field_that_is_left_has_a_flag_without_influence_on_plans():
    graphs = {name for name in LEFT_FIELDS if name.startswith("cuda_graph_")}
    rows = {row.dest: row.flags[0] for row in read_rows()}
    assert {name for name in LEFT_FIELDS & set(rows) if class_of(rows[name]) == "free"} <= graphs
    models = [
        yaml.safe_load((FILES / f"{name}.yaml").read_text())["model"] for name in (*NAMES, "deepseek-v3")
    ]
    assert {field for model in models for field in model} >= LEFT_FIELDS


def test_a_dense_job_of_a_recipe():
    terms = read_terms(FILES / "llama3-8b.yaml")
    assert terms is not None
    assert (terms.fields["seq_length"], terms.fields["global_batch_size"]) == (8192, 512)
    assert terms.context_parallel == 2


def test_deepseek_is_read_with_its_prediction_head_and_its_pipeline(tmp_path):
    path = FILES / "deepseek-v3.yaml"
    read, preset = read_model(path), read_model("deepseek-v3")
    same = {name: getattr(preset, name) for name in ("name", "source", "norm_biases")}
    assert replace(read, **same, vocab_multiple=preset.vocab_multiple) == preset
    assert read.mtp_layers == 1
    with pytest.raises(
        HexiError, match=r"deepseek-v3\.yaml, line \d+: --use-precision-aware-optimizer does not"
    ):
        read_terms(path)
    text = path.read_text(encoding="utf-8")
    aware = "  use_precision_aware_optimizer: true"
    assert aware in text
    (tmp_path / "run_config.yaml").write_text(text.replace(aware, aware.replace("true", "false")))
    terms = read_terms(tmp_path / "run_config.yaml")
    assert terms is not None
    assert terms.fields["pipeline_parallel"] == 16


def test_nothing_that_the_file_names_is_called(tmp_path):
    text = (FILES / "qwen3-30b-a3b.yaml").read_text(encoding="utf-8")
    path, victim = tmp_path / "run_config.yaml", tmp_path / "victim"
    call = f"\nenv_vars:\n  a: {{_target_: os.mkdir, _args_: ['{victim}']}}"
    path.write_text(text.replace("\nenv_vars:", call, 1), encoding="utf-8")
    assert argument_words(path)
    assert not victim.exists()


def test_what_is_false_by_a_flag_of_its_own_is_said():
    words = argument_words(FILES / "gpt-oss-20b.yaml")
    assert words is not None
    assert "--no-yarn-correction-range-round-to-int" in words
