"""The test of each combination that works, and which refusals lie in the nature of things."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_M, _U = "tests/megatron/test_", "tests/unit"
_OPTIONS = f"{_M}option_training.py::test_losses_and_gradient_norms_are_those_without_a_plan[{{}}]"
_REPLICAS = f"{_M}unequal_replicas.py::test_training_is_that_of_one_rank[{{}}]"
_STAGES = f"{_M}stages_training.py::test_training_is_that_of_one_rank[{{}}]"
_MINISTAGES = f"{_M}ministages.py::test_training_is_that_of_one_rank[{{}}]"
_HEADS = f"{_M}stages_multi_token.py::test_training_is_that_of_one_rank[{{}}]"
_EXPERTS = f"{_M}stages_experts.py::test_experts_train_as_on_one_rank[{{}}]"
_PLANNED = f"{_M}planned_training.py::test_what_is_planned_trains_as_one_rank[{{}}]"
_SIMULATED = f"{_U}/lab/test_simulator.py::test_agrees_with_the_model_where_nothing_contends"
_REPLAYED = f"{_U}/planner/test_kinds.py::test_the_simulator_times_sinks_and_latent_attention[{{}}]"
_KINDS_REPLAYED = (
    f"{_U}/lab/test_simulator_kinds.py::"
    "test_layers_of_several_kinds_take_as_long_as_the_cost_model_says[none-{}]"
)
_SWAPPED = f"{_M}replanning.py::test_kinds_of_models_keep_their_losses_over_swaps[{{}}]"
_MOVED = f"{_M}replanning.py::test_kinds_of_layers_keep_their_losses_in_stages[{{}}]"
_SURVIVED = f"{_U}/elastic/test_survivors.py::test_kinds_of_models_are_planned_anew[network-{{}}]"
_LASTING = f"{_M}elastic_stages.py::test_six_losses_in_a_row_in_stages[{{}}]"
_KINDS = f"{_M}combinations.py::test_"
_OFFLOADED = _KINDS + "stages_that_offload_have_each_gradient_of_one_rank[{}]"
_UNEQUAL = _KINDS + "unequal_replicas_train_as_one_rank[{}]"
_RESUMED = _KINDS + "a_checkpoint_goes_on_under_another_plan[{}]"
_STATES = f"{_M}state_layers.py::test_"
_STATES_PLANNED = (
    f"{_U}/planner/test_states.py::test_a_plan_is_one_that_trains_and_no_slower_than_megatrons_flags[{{}}]"
)
_STATES_REPLAYED = f"{_U}/cost/test_states.py::test_the_simulator_takes_as_long_between_two_units"
_STATES_STAGED = f"{_M}stages_states.py::test_training_is_that_of_one_rank[{{}}]"
_CHAIN = f"{_M}checkpoint_chains.py::test_a_chain_ends_as_it_begins[{{}}]"
_IMAGES = f"{_M}bridge_models.py::test_losses_and_weights_are_those_of_one_rank[{{}}]"
_DOCUMENTS = f"{_M}stages_jobs.py::test_documents_{{}}"


def _in_stages(stages: str, offloaded: str) -> dict[str, str]:
    """Tests of the columns of stages, where one test shows samples, ministages and offloading together."""
    return {"stages": stages, **dict.fromkeys(("samples", "ministages", "offload"), offloaded)}


_ATTENTION = {
    "domain": _OPTIONS.format("windows-sinks-groups"),
    "replicas": _REPLICAS.format("windows-sinks"),
    **_in_stages(_STAGES.format("windows-sinks"), _OFFLOADED.format("windows-sinks")),
    "interleaving": _OPTIONS.format("windows-sinks-interleaved-groups"),
    "planner": _PLANNED.format("2+2-pipeline_parallel=2-windows-sinks"),
    "re-planning": _SWAPPED.format("windows-sinks"),
    "checkpoints": _RESUMED.format("windows-sinks"),
}

_HYBRID = {
    "stages": _STATES_STAGED.format("hybrid-depths"),
    "samples": _STATES_STAGED.format("hybrid-samples"),
    **dict.fromkeys(("ministages", "offload"), _STATES_STAGED.format("hybrid-ministages")),
}

#: By kind and feature, as `megatron_hexi`'s own code takes them: a test that the combination works.
TESTS: Final[Mapping[str, Mapping[str, str]]] = {
    "dense": {
        "domain": _OPTIONS.format("recompute-full-groups"),
        "replicas": _REPLICAS.format("two-and-one"),
        "stages": _STAGES.format("depths"),
        "samples": _STAGES.format("samples"),
        "ministages": _MINISTAGES.format("one-stage"),
        "offload": _MINISTAGES.format("by-one-of-two-replicas-offloaded"),
        "interleaving": _OPTIONS.format("virtual-pipeline-groups"),
        "planner": _PLANNED.format("2+2-free"),
        "simulator": _SIMULATED,
        "re-planning": f"{_M}replanning.py::test_losses_are_those_without_swaps[groups]",
        "elastic": f"{_M}elastic_stages.py::test_two_stages_go_on_by_a_plan_of_other_stages",
        "checkpoints": (
            f"{_M}checkpoints.py::test_training_goes_on_under_any_plan_and_parallelism[another-plan]"
        ),
    },
    "window": {
        **_ATTENTION,
        "simulator": _KINDS_REPLAYED.format("windows"),
        "elastic": _LASTING.format("windows"),
    },
    "sinks": {**_ATTENTION, "simulator": _REPLAYED.format("sinks"), "elastic": _SURVIVED.format("sinks")},
    "documents": {
        "domain": _OPTIONS.format("documents-groups"),
        "replicas": _REPLICAS.format("documents"),
        "stages": _DOCUMENTS.format("travel_over_borders_of_other_domains"),
        "ministages": _DOCUMENTS.format("pass_ministages[offload0]"),
        "offload": _DOCUMENTS.format("pass_ministages[offload1]"),
        "interleaving": _OPTIONS.format("documents-pipeline-groups"),
        "planner": (
            f"{_U}/cli/test_argument_files.py::test_an_option_that_leaves_some_plans_restricts_the_search"
            "[--dataloader-inter-document-masking --no-rope-fusion --micro-batch-size 1-refused2]"
        ),
        "simulator": _SIMULATED,
        "re-planning": _SWAPPED.format("documents"),
        "elastic": _SURVIVED.format("documents"),
        "checkpoints": _RESUMED.format("documents"),
    },
    "latent": {
        "domain": _OPTIONS.format("latent-groups"),
        "replicas": _UNEQUAL.format("latent"),
        **_in_stages(_OFFLOADED.format("latent"), _OFFLOADED.format("latent")),
        "interleaving": _OPTIONS.format("latent-interleaved-groups"),
        "planner": _PLANNED.format("2+2-free-latent"),
        "simulator": _REPLAYED.format("latent"),
        "re-planning": _SWAPPED.format("latent"),
        "elastic": _SURVIVED.format("latent"),
        "checkpoints": _RESUMED.format("latent"),
    },
    "experts": {
        "domain": _OPTIONS.format("experts-groups"),
        "replicas": _EXPERTS.format("replicas-all"),
        "stages": _EXPERTS.format("slices-all-moe"),
        "samples": _EXPERTS.format("samples-all-long"),
        "ministages": _EXPERTS.format("ministages-all-long"),
        "offload": _EXPERTS.format("offload-all-long"),
        "interleaving": _OPTIONS.format("experts-interleaved-groups"),
        "planner": f"{_U}/planner/test_experts.py::test_faster_gpus_hold_more_experts",
        "simulator": _KINDS_REPLAYED.format("experts"),
        "re-planning": _MOVED.format("experts"),
        "elastic": _LASTING.format("experts"),
        "checkpoints": (
            f"{_M}stages_experts.py::test_any_layout_goes_on_from_any_other[samples-to-slices-fp32]"
        ),
    },
    "prediction": {
        "domain": _OPTIONS.format("multi-token-groups"),
        "replicas": _REPLICAS.format("multi-token"),
        "stages": _HEADS.format("replicas"),
        "samples": _HEADS.format("samples"),
        "ministages": _HEADS.format("ministages"),
        "offload": _HEADS.format("dealt"),
        "planner": _PLANNED.format("1+1-pipeline_parallel=2-further"),
        "simulator": f"{_U}/cost/test_prediction.py::test_the_simulator_takes_as_long_as_the_cost_model",
        "re-planning": _MOVED.format("prediction"),
        "elastic": _LASTING.format("prediction"),
        "checkpoints": _RESUMED.format("prediction"),
    },
    "hybrid": {
        "domain": _OPTIONS.format("hybrid-model-groups"),
        "replicas": _UNEQUAL.format("hybrid"),
        **_HYBRID,
        "planner": _STATES_PLANNED.format("hybrid"),
        "simulator": _STATES_REPLAYED,
        "re-planning": _MOVED.format("mamba"),
        "elastic": _LASTING.format("mamba"),
        "checkpoints": _RESUMED.format("hybrid"),
    },
    "mamba": {
        "domain": _STATES + "training_is_that_of_one_rank[mamba-uneven-heads]",
        "replicas": _STATES + "training_is_that_of_one_rank[mamba-unequal-replicas]",
        **_HYBRID,
        "planner": _STATES_PLANNED.format("mamba"),
        "simulator": _STATES_REPLAYED,
        "re-planning": _MOVED.format("mamba"),
        "elastic": _LASTING.format("mamba"),
        "checkpoints": _STATES + "a_checkpoint_goes_on_under_another_plan[mamba]",
    },
    "convolution": {
        "domain": _STATES + "training_is_that_of_one_rank[convolution-recomputed]",
        "replicas": _STATES + "training_is_that_of_one_rank[convolution-unequal-replicas]",
        "stages": _STATES_STAGED.format("convolution-depths"),
        "samples": _STATES_STAGED.format("convolution-samples"),
        **dict.fromkeys(("ministages", "offload"), _STATES_STAGED.format("convolution-ministages")),
        "planner": _PLANNED.format("2+1-pipeline_parallel=2-convolution"),
        "simulator": _STATES_REPLAYED,
        "re-planning": _MOVED.format("convolution"),
        "elastic": _LASTING.format("convolution"),
        "checkpoints": _CHAIN.format("convolutions-fp32"),
    },
    "delta": {
        "domain": _STATES + "training_is_that_of_one_rank[delta-uneven-heads]",
        "replicas": _STATES + "training_is_that_of_one_rank[delta-unequal-replicas]",
        **_HYBRID,
        "planner": _STATES_PLANNED.format("delta"),
        "simulator": _STATES_REPLAYED,
        "re-planning": _MOVED.format("experts"),
        "elastic": _LASTING.format("delta"),
        "checkpoints": _STATES + "a_checkpoint_goes_on_under_another_plan[delta]",
    },
    "images": {
        "domain": _IMAGES.format("vision3e"),
        "replicas": _IMAGES.format("vision"),
        "stages": _IMAGES.format("vision-stages"),
        "samples": _IMAGES.format("vision-samples"),
        "ministages": _IMAGES.format("vision-sole-turns"),
        "offload": _IMAGES.format("vision-turns"),
        "interleaving": _IMAGES.format("vision-chunks"),
        "planner": f"{_U}/planner/test_images.py::test_plans_divide_images_and_are_faster_for_it",
        "simulator": f"{_U}/cost/test_encoder.py::test_the_simulator_encodes_as_long",
        "checkpoints": _IMAGES.format("vision-on"),
    },
}

#: Combinations that will never work; all others that are refused do not work yet.
IMPOSSIBLE: Final = {("documents", "samples")}

#: What readers must know of a combination that works.
NOTES: Final[Mapping[tuple[str, str], str]] = {
    ("documents", "planner"): "for whole sequences; `--batch-shares` deals documents batch by batch",
    ("documents", "simulator"): "as whole sequences",
    ("documents", "re-planning"): "times are compared with the median rank's, batch by batch",
    ("mamba", "domain"): "of one group",
    ("delta", "domain"): "of one group",
    ("experts", "replicas"): "with `layers` in each stage",
    ("experts", "elastic"): "with `layers` in each stage",
}
