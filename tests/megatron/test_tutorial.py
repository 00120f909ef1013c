"""Weights from Hugging Face's format to Megatron's, trained under an uneven plan, and back."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_hexi.plan import Plan, Workload, proportional_plan
from tests.megatron.conversion import SEQ_LENGTH, VOCABULARY, Conversion
from tests.megatron.launch import environment

safetensors_torch = pytest.importorskip("safetensors.torch", reason="pip install safetensors")

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 96, 160, 3, 6, 2, 24
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS = {
    "llama": LLAMA,
    "llama-biases-yarn": {
        **LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen2": {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3-tied-scaled": {
        **LLAMA,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": True,
        # Wavelengths of this base lie in all three ranges of Llama 3's rule.
        "rope_scaling": LLAMA3,
    },
}


def write_model(folder: Path, config: dict, dtype: torch.dtype = torch.float32) -> None:
    """A model with random weights, norms too: a converter that mixes two up is found out."""
    torch.manual_seed(1)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        inside = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (queries, HIDDEN),
            "self_attn.k_proj.weight": (keys, HIDDEN),
            "self_attn.v_proj.weight": (keys, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, queries),
            "mlp.gate_proj.weight": (FFN, HIDDEN),
            "mlp.up_proj.weight": (FFN, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, FFN),
        }
        if config["model_type"] == "qwen2" or config.get("attention_bias"):
            inside |= {f"self_attn.{name}_proj.bias": (queries if name == "q" else keys,) for name in "qkv"}
        if config.get("attention_bias"):
            inside |= {"self_attn.o_proj.bias": (HIDDEN,), "mlp.down_proj.bias": (HIDDEN,)}
            inside |= {f"mlp.{name}_proj.bias": (FFN,) for name in ("gate", "up")}
        if config["model_type"] == "qwen3":
            inside |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    tensors = {
        name: (torch.randn(shape) * 0.1 + ("norm" in name)).to(dtype) for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def long_wavelengths_scaled(frequencies: torch.Tensor, rule: dict) -> torch.Tensor:
    """Llama 3's rule: frequencies of long wavelengths are divided, those between are mixed."""
    turns = rule["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rule["factor"])


def yarn_scaled(frequencies: torch.Tensor, base: float, rule: dict) -> torch.Tensor:
    """YaRN's rule (arXiv 2309.00071): those that turn less than 1 to 32 times are divided, more or less."""
    turns = torch.tensor([32.0, 1.0], dtype=torch.float64)
    at = HEAD_DIM * (rule["original_max_position_embeddings"] / (turns * 2 * torch.pi)).log()
    low, high = (at / (2 * torch.tensor(base).log())).tolist()
    low, high = max(0, math.floor(low)), min(HEAD_DIM - 1, math.ceil(high))
    divided = ((torch.arange(HEAD_DIM // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return frequencies * (divided / rule["factor"] + 1 - divided)


def reference_logits(folder: Path, tokens_bs: torch.Tensor) -> torch.Tensor:
    """A plain Llama (Qwen2, Qwen3) in float64, [B, S, V]."""
    weights = {
        name: t.double() for name, t in safetensors_torch.load_file(folder / "model.safetensors").items()
    }
    config = json.loads((folder / "config.json").read_text())

    def norm(x, name):
        scaled = x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()
        return scaled * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    positions = torch.arange(tokens_bs.shape[1], dtype=torch.float64)
    frequencies = config["rope_theta"] ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    rule, amplitude = config.get("rope_scaling"), 1.0
    if rule and rule["rope_type"] == "yarn":
        frequencies = yarn_scaled(frequencies, config["rope_theta"], rule)
        amplitude = 1 + 0.1 * math.log(rule["factor"])
    elif rule:
        frequencies = long_wavelengths_scaled(frequencies, rule)
    angles = (positions[:, None] * frequencies).repeat(1, 2)

    def heads(x, norm_name, rotate=True):
        x_bhsd = x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        if f"{norm_name}.weight" in weights:
            x_bhsd = norm(x_bhsd, norm_name)
        if not rotate:
            return x_bhsd
        first, second = x_bhsd.chunk(2, dim=-1)
        return amplitude * (x_bhsd * angles.cos() + torch.cat([-second, first], -1) * angles.sin())

    x = weights["model.embed_tokens.weight"][tokens_bs]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q = heads(linear(y, f"{at}.self_attn.q_proj"), f"{at}.self_attn.q_norm")
        k = heads(linear(y, f"{at}.self_attn.k_proj"), f"{at}.self_attn.k_norm")
        v = heads(linear(y, f"{at}.self_attn.v_proj"), "", rotate=False)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(y, f"{at}.mlp.gate_proj"))
        x = x + linear(gate * linear(y, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    x = norm(x, "model.norm")
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def uneven_plan() -> Plan:
    workload = Workload(
        SEQ_LENGTH, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, layers=LAYERS, hidden_size=HIDDEN
    )
    return proportional_plan(workload, [[(3.0, 1.0), (2.0,)]])


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-tied-scaled",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("llama-biases-yarn", "qwen2")),
    ],
)
def test_weights_come_back_as_they_were_and_megatron_computes_the_same(forks, tmp_path, family):
    write_model(tmp_path / "model", CONFIGS[family])
    conversion = Conversion(forks, tmp_path)
    conversion.convert("hf-to-megatron", "model", "weights")
    conversion.convert("megatron-to-hf", "weights", "back", "--like", "model")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()

    tokens, logits = conversion.megatron_logits("weights")
    expected = reference_logits(tmp_path / "model", tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)


def test_what_was_trained_under_an_uneven_plan_comes_back(forks, tmp_path):
    write_model(tmp_path / "model", LLAMA)
    conversion = Conversion(forks, tmp_path)
    conversion.convert("hf-to-megatron", "model", "weights")
    saving = ["--load", "weights", "--finetune", "--save", "trained", "--save-interval", "3"]
    log = forks.train(tmp_path, ranks=3, args=[*conversion.arguments(), *saving], plan=uneven_plan())
    assert log.losses[-1] < log.losses[0]
    conversion.convert("megatron-to-hf", "trained", "back", "--like", "model")

    tokens, logits = conversion.megatron_logits("trained")
    after = reference_logits(tmp_path / "back", tokens)
    torch.testing.assert_close(logits.double(), after, atol=1e-5, rtol=1e-5)
    assert (after - reference_logits(tmp_path / "model", tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("family", CONFIGS)
def test_the_reference_computes_what_transformers_does(tmp_path, family):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    write_model(tmp_path / "model", CONFIGS[family])
    tokens = torch.randint(VOCABULARY, (2, SEQ_LENGTH))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    with torch.no_grad():
        found = model(tokens).logits
    torch.testing.assert_close(found, reference_logits(tmp_path / "model", tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_half_precision_stays_and_is_loaded_into_single(forks, tmp_path):
    write_model(tmp_path / "model", LLAMA, torch.bfloat16)
    conversion = Conversion(forks, tmp_path)
    conversion.convert("hf-to-megatron", "model", "weights")
    conversion.convert("megatron-to-hf", "weights", "back", "--like", "model")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (
        tmp_path / "model/model.safetensors"
    ).read_bytes()
    tokens, logits = conversion.megatron_logits("weights")
    torch.testing.assert_close(
        logits.double(), reference_logits(tmp_path / "model", tokens), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}, "model_type"),
        ({"model_type": "mistral", "architectures": None}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": LLAMA3 | {"factor": 32.0}}, r"rope_scaling\.factor = 32\.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
)
def test_what_is_not_converted_is_refused_by_name(tmp_path, change, said):
    from megatron_hexi.convert.config import read_model
    from megatron_hexi.errors import HexiError

    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(HexiError, match=said):
        read_model(tmp_path)


def test_the_command_ends_with_one_line_and_leaves_nothing_behind(forks, tmp_path):
    write_model(tmp_path / "model", LLAMA)
    (tmp_path / "model/config.json").write_text(json.dumps({**LLAMA, "intermediate_size": FFN + 1}))
    command = [forks.python, "-m", "megatron_hexi.convert", "hf-to-megatron", "model", "weights"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert "gate_proj.weight has shape (160, 96), config.json asks for (161, 96)" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
