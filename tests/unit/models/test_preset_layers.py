"""Presets with experts, windows or latent attention are the published models, and flags say them back."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from megatron_hexi.argument_file import replace_flags
from megatron_hexi.errors import HexiError, NoFlagError
from megatron_hexi.models import Job, constant_flags, model_flags, read_model
from tests.support.published_configs import PUBLISHED

#: The published model of each preset.
PRESETS = {
    "mistral-7b": "Mistral-7B-v0.1",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "kimi-k2": "moonshotai/Kimi-K2-Base",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "glm-4.5": "zai-org/GLM-4.5",
    "gemma-3-27b": "google/gemma-3-27b-pt",
    "llama-4-scout": "meta-llama/Llama-4-Scout-17B-16E",
    "llama-4-maverick": "meta-llama/Llama-4-Maverick-17B-128E",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "nemotron-h-8b": "nvidia/Nemotron-H-8B-Base-8K",
    "nemotron-h-56b": "nvidia/Nemotron-H-56B-Base-8K",
    "qwen2.5-vl-7b": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen2.5-vl-72b": "Qwen/Qwen2.5-VL-72B-Instruct",
    "qwen3-vl-30b-a3b": "Qwen/Qwen3-VL-30B-A3B-Instruct",
}
#: Those that Megatron has no flags for, with what it lacks.
NO_FLAGS = {
    "kimi-k2": "beta_fast = 1.0",
    "gemma-3-27b": "two rotary bases",
    "llama-4-scout": "attention in chunks",
    "llama-4-maverick": "attention in chunks",
}


def shapes(model):
    """The model without what only people read, and with norms' biases said."""
    return replace(model, name="", source="", norm_biases=model.norm_params(1) == 2)


@pytest.fixture
def published(tmp_path):
    """Writes a published model's config.json."""

    def write(name):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(PUBLISHED[name]))
        return path

    return write


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_published_model(name, published):
    path = published(PRESETS[name])
    assert shapes(read_model(name)) == shapes(read_model(path))
    if name not in NO_FLAGS:
        assert constant_flags(name) == constant_flags(path)
        return
    for model in (name, path):
        with pytest.raises(NoFlagError, match=NO_FLAGS[name]):
            constant_flags(model)


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - NO_FLAGS.keys()))
def test_printed_flags_are_read_back_as_the_same_model(name, tmp_path, monkeypatch):
    # Whether training takes such a model is another question.
    monkeypatch.setattr("megatron_hexi.models.megatron_arguments.find_refused", lambda *_: [])
    path = tmp_path / "job.args"
    path.write_text(shlex.join(replace_flags(model_flags(read_model(name), 4096), constant_flags(name))))
    without_vision = replace(read_model(name), vision=None)  # which flags do not describe
    assert shapes(read_model(path)) == shapes(without_vision)


@pytest.mark.parametrize("name", PRESETS)
def test_layers_that_are_not_modelled_are_refused_where_time_or_memory_is_asked_for(name):
    if not name.startswith("llama-4"):
        assert Job(read_model(name), 4096).kinds
        return
    why = "attention in chunks is not supported: its time and memory"
    with pytest.raises(HexiError, match=f"model {name}: {why}"):
        Job(read_model(name), 4096)


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-4-Scout-17B-16E", "google/gemma-3-4b-pt"], ids=["llama4", "gemma3"]
)
def test_a_model_without_its_vision_says_so(name, published):
    assert read_model(published(name)).source.endswith("text_config; vision is left out")


#: Weights, without padding of the vocabulary, and in billions those that a token goes through.
WEIGHTS = {
    "mixtral-8x7b": (46_702_792_704, 12.75),
    "qwen3-30b-a3b": (30_532_122_624, 3.04),
    "qwen3-235b-a22b": (235_093_634_560, 21.57),
    "deepseek-v3": (671_026_419_200, 36.63),
    "kimi-k2": (1_026_408_232_448, 31.69),
    "gpt-oss-20b": (20_914_757_184, 3.61),
    "gpt-oss-120b": (116_829_156_672, 5.13),
    "gemma-3-27b": (27_009_346_304, 27.01),
    "llama-4-scout": (107_769_861_120, 16.14),
    "llama-4-maverick": (400_711_848_960, 16.15),
    "glm-4.5": (352_797_829_024, 32.86),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_the_published_ones(name):
    total, active = WEIGHTS[name]
    model = replace(read_model(name), vocab_multiple=1)
    assert model.total_params == total
    assert model.active_params == pytest.approx(active * 1e9, rel=5e-3)


@pytest.mark.parametrize(("name", "billions"), [("deepseek-v3", 11.61), ("glm-4.5", 3.99), ("kimi-k2", 0)])
def test_prediction_heads_are_counted_apart(name, billions):
    assert read_model(name).mtp_params == pytest.approx(billions * 1e9, rel=1e-3)


def test_layers_that_no_flag_describes_are_refused(published):
    with pytest.raises(NoFlagError, match="norms behind attention and MLP"):
        model_flags(read_model(published("google/gemma-3-1b-pt")), 4096)
