"""Recipes: jobs by name that plan on two fleets, and whose arguments are Megatron's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron_hexi.argument_file import read_words
from megatron_hexi.models import presets, read_model, read_terms, recipes
from megatron_hexi.models.named_models import preset_constants
from megatron_hexi.plan import read_plan
from tests.support.shell import call_hexi, is_one_error_line

NAMES = list(recipes())
CLUSTERS = Path(__file__).parents[3] / "examples" / "clusters"
#: Two fleets that hold each model at all of its lengths; the number behind a name multiplies its nodes.
FLEETS = {
    "llama3-8b": ("mixed-16", "fleet-96"),
    "llama3-70b": ("fleet-96", "fleet-96 x 2"),
    "qwen3-8b": ("mixed-16", "fleet-96"),
    "qwen3-32b": ("mixed-32", "fleet-96"),
    "qwen3-30b-a3b": ("mixed-32", "fleet-96"),
    "gpt-oss-20b": ("mixed-16", "fleet-96"),
    "deepseek-v3": ("fleet-96 x 4", "fleet-96 x 5"),
}
#: In CI the smaller models at the shortest length on the smaller fleet: a plan takes seconds. On request all.
QUICK = (("llama3-8b-32k", "mixed-16"),)


def test_each_model_has_a_recipe_at_each_length_that_it_holds():
    models = ("llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b")
    expected = [f"{model}-{length}" for model in models for length in ("32k", "128k", "512k")]
    expected += [
        f"{model}-{length}" for model in ("gpt-oss-20b", "deepseek-v3") for length in ("32k", "128k")
    ]
    assert expected == NAMES
    assert not set(NAMES) & set(presets())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_its_preset_s_model(name, tmp_path):
    recipe, model = recipes()[name], presets()[recipes()[name].model]
    found = read_model(name)
    for field in ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "ffn_hidden_size", "vocab_size"):
        assert getattr(found, field) == getattr(model, field)
    assert found.qk_norm == model.qk_norm
    terms = read_terms(name)
    assert terms is not None
    assert terms.fields["seq_length"] == recipe.seq_length == int(name.rpartition("-")[2][:-1]) * 1024
    assert terms.fields["precision"] == "bf16"
    assert terms.fields["global_batch_size"] == recipe.global_batch_size


@pytest.mark.parametrize("name", NAMES)
def test_an_iteration_has_millions_of_tokens_and_every_value_a_source(name):
    recipe = recipes()[name]
    assert recipe.seq_length * recipe.global_batch_size == (8 if name.endswith("512k") else 4) * 2**20
    assert all(
        "http" in source or "arXiv" in source or "our choice" in source or "ProLong" in source
        for source in recipe.sources
    )
    assert float(recipe.flags["--min-lr"]) == pytest.approx(recipe.lr / 10)
    epsilon = preset_constants()[recipe.model]
    assert epsilon[epsilon.index("--norm-epsilon") + 1] == recipe.flags["--norm-epsilon"]


def test_show_write_and_list_agree(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    shown = call_hexi(monkeypatch, capsys, ["recipe", "show", "qwen3-32b-128k"])
    assert call_hexi(monkeypatch, capsys, ["recipe", "write", "qwen3-32b-128k", "-o", "job.args"]).code == 0
    assert Path("job.args").read_text() == shown.out
    words = read_words(Path("job.args"))
    assert words[words.index("--rotary-base") + 1] == "5000000"
    assert words[words.index("--lr") + 1] == "5e-06"
    listed = json.loads(call_hexi(monkeypatch, capsys, ["recipe", "list", "--json"]).out)
    assert [one["name"] for one in listed["recipes"]] == NAMES
    table = call_hexi(monkeypatch, capsys, ["recipe", "list"]).out
    assert all(name in table for name in NAMES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("recipe show llama3-8b", "'llama3-8b' is no recipe; did you mean llama3-8b-"),
        ("recipe show x", "'x' is no recipe; see hexi recipe list"),
        (
            "recipe write llama3-8b-32k -o job.yaml",
            "the file is to be text, but its name ends as that of YAML",
        ),
        ("recipe write llama3-8b-32k -o missing/job.args", "the folder missing is not there"),
        ("plan none.yaml --model llama3-8b-64k -o plan.yaml", "is no preset, recipe or file; did you mean"),
    ],
)
def test_wrong_names_are_one_line(monkeypatch, capsys, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    found = call_hexi(monkeypatch, capsys, words.split())
    assert found.code == 2
    assert said in found.err
    assert is_one_error_line(found.err)


@pytest.mark.timeout(1200)  # DeepSeek-V3 on 480 GPUs of three kinds
@pytest.mark.parametrize(
    ("name", "fleet"),
    [
        pytest.param(name, fleet, marks=[] if (name, fleet) in QUICK else [pytest.mark.slow])
        for name, recipe in recipes().items()
        for fleet in FLEETS[recipe.model]
    ],
)
def test_a_recipe_plans_and_launches(name, fleet, monkeypatch, capsys, tmp_path):
    """A plan on each fleet, whose lines start Megatron with the recipe's arguments."""
    monkeypatch.chdir(tmp_path)
    cluster = _fleet(fleet, tmp_path)
    said = call_hexi(monkeypatch, capsys, ["plan", cluster, "--model", name, "-o", "plan.yaml", "--json"])
    assert said.code == 0, said.err
    plan = read_plan("plan.yaml")
    assert plan.provenance is not None
    assert plan.provenance.model == name
    assert plan.workload.seq_length == recipes()[name].seq_length
    words = ["launch", "plan.yaml", "--cluster", cluster, "--json", "--", "--data-path", "text"]
    flags = json.loads(call_hexi(monkeypatch, capsys, words).out)["flags"]
    for flag in ("--lr", "--min-lr", "--rotary-base", "--tokenizer-model", "--train-iters", "--adam-beta2"):
        assert flags[flags.index(flag) + 1] == str(recipes()[name].flags[flag])
    assert "--mock-data" not in flags


def _fleet(name: str, folder: Path) -> Path:
    """The cluster file of a fleet in `FLEETS`."""
    example, _, times = name.partition(" x ")
    data = yaml.safe_load((CLUSTERS / f"{example}.yaml").read_text(encoding="utf-8"))
    for node in data["nodes"]:
        node["count"] *= int(times or 1)
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path
