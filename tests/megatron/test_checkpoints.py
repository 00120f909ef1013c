"""Checkpoints know neither the plan nor this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.launch import environment
from tests.megatron.option_cases import DISTRIBUTED, PIPELINE, SEQUENCE, Case
from tests.megatron.test_uneven_training import MODEL

RESHARDABLE = (*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable")

LOADED_UNDER = {
    "another-plan": (Case(), "no-heads"),
    "no-plan": (Case(), None),
    "tensor-parallel": (Case(job=SEQUENCE), "no-tokens"),
    "pipeline": (Case(job=PIPELINE), "groups"),
}


@pytest.fixture(scope="module")
def saved(forks, references, tmp_path_factory):
    """A training of four iterations under a plan, with what it saved after two."""
    folder = tmp_path_factory.mktemp("saved")
    words = [*MODEL, *RESHARDABLE, "--load", references(())[0], "--finetune", "--train-iters", "4"]
    words += ["--save", folder / "weights", "--save-interval", "2"]
    log = forks.train(folder, ranks=3, args=words, plan=Case().plans()["groups"])
    (folder / "weights" / "latest_checkpointed_iteration.txt").write_text("2")
    return folder / "weights", log


#: A pipeline is another parallelism, too.
ON_REQUEST = ("tensor-parallel",)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(*loaded, id=name, marks=pytest.mark.slow if name in ON_REQUEST else ())
        for name, loaded in LOADED_UNDER.items()
    ],
)
def test_training_goes_on_under_any_plan_and_parallelism(case: Case, name, saved, forks, tmp_path):
    weights, whole = saved
    plan = case.plans()[name] if name else None
    ranks = plan.units * case.model_parallel if plan else 1
    words = [*MODEL, *RESHARDABLE, *case.job, "--train-iters", "4", "--load", weights, "--no-load-rng"]
    log = forks.train(tmp_path, ranks=ranks, args=words, plan=plan)
    assert log.iterations == [3, 4]
    assert log.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    assert log.grad_norms == pytest.approx(whole.grad_norms[2:], rel=1e-5)


# Megatron alone: loads each checkpoint into its own model, and says how far the weights are apart (RMS).
STOCK = """
import json, sys
sys.modules["megatron_hexi"] = None  # importing it is an ImportError from now on
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
loaded = []
for folder in sys.argv[2:]:
    saved = dist_checkpointing.load_common_state_dict(folder)["args"]
    config = TransformerConfig(
        num_layers=saved.num_layers,
        hidden_size=saved.hidden_size,
        ffn_hidden_size=saved.ffn_hidden_size,
        num_attention_heads=saved.num_attention_heads,
        num_query_groups=saved.num_query_groups,
        kv_channels=saved.kv_channels,
        gated_linear_unit=saved.swiglu,
        normalization=saved.normalization,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), saved.padded_vocab_size, saved.seq_length,
        share_embeddings_and_output_weights=True, position_embedding_type="rope",
    )
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)
    model.load_state_dict(state["model"])
    loaded.append(dict(model.named_parameters()))
apart = {
    name: (tensor - loaded[1][name]).square().mean().sqrt().item() for name, tensor in loaded[0].items()
}
keys = [set(FileSystemReader(folder).read_metadata().state_dict_metadata) for folder in sys.argv[2:]]
ours = [name for name in vars(saved) if "hexi" in name]
more = sorted(keys[1] - keys[0])
print(json.dumps({"apart": apart, "ours": ours, "cp": saved.context_parallel_size, "more": more}))
"""


def loaded_by_stock_megatron(alone: Path, under_a_plan: Path, store: Path) -> dict[str, Any]:
    """What two checkpoints hold, as Megatron finds them where this package cannot be imported."""
    loading = [sys.executable, "-c", STOCK, *map(str, (store, alone, under_a_plan))]
    result = subprocess.run(
        loading, capture_output=True, text=True, env=environment(), timeout=250, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_stock_megatron_loads_what_a_plan_saved(saved, forks, references, tmp_path):
    """Its weights after two iterations are those of a training without a plan from the same start."""
    words = [*MODEL, *RESHARDABLE, "--load", references(())[0], "--finetune", "--train-iters", "4"]
    saving = ["--save", tmp_path / "alone", "--save-interval", "2", "--exit-interval", "2"]
    forks.train(tmp_path, ranks=1, args=[*words, *saving])
    found = loaded_by_stock_megatron(
        tmp_path / "alone" / "iter_0000002", saved[0] / "iter_0000002", tmp_path / "store"
    )
    assert found["cp"] == 3
    assert [
        key for key in found["more"] if not key.startswith("rerun_state_machine_state")
    ] == []  # of a rank
    assert found["ours"] == ["hexi_plan"]
    assert len(found["apart"]) > 10
    # Two steps of Adam move each weight by 1e-3 or so: also where its gradient is next to nothing, and
    # rounding decides which way.
    assert max(found["apart"].values()) < 1e-6
