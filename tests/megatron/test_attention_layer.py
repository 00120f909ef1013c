"""Our core attention stands in for Megatron's, whichever layer spec names it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron_hexi.errors import HexiError
from megatron_hexi.megatron.session import GivenPlan, Session, local_shard, set_active_session
from megatron_hexi.patching import PatchSet
from megatron_hexi.plan import Plan, Schedules, Workload, plan_digest, proportional_plan
from megatron_hexi.platform import select_platform
from megatron_hexi.runtime import DomainAttention

WORKLOAD = Workload(32, heads=4, kv_heads=2, head_dim=8)


class SomeTransformerEngineAttention:
    """Stands for TEDotProductAttention, which is a mock where Transformer Engine is not installed."""

    def __init__(self, *args, **kwargs):
        raise AssertionError("must have been replaced")


@pytest.fixture
def megatron(tmp_path):
    """Megatron's groups for one rank, and our patch of the attention layer."""
    from megatron.core import parallel_state

    from megatron_hexi.megatron.core_attention import ATTENTION_PATCHES

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    patches = PatchSet(ATTENTION_PATCHES)
    patches.install()
    yield parallel_state
    patches.remove()
    set_active_session(None)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def activate(plan: Plan) -> None:
    given = GivenPlan(plan, "plan.yaml", plan_digest(plan), "auto", row_multiple=1)
    schedules = Schedules(plan.workload, plan.replicas[0].domain, 0, plan.exchange.parts)
    alone = dist.group.WORLD
    assert alone is not None
    attention = DomainAttention(plan.workload, schedules, alone, alone)
    set_active_session(Session(given, attention, local_shard(schedules(), 1, torch.device("cpu"))))


def build_layer(core_attention, mask="causal", **changes):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        **changes,
    )
    submodules = get_gpt_layer_local_spec().submodules.self_attention.submodules
    if core_attention is not None:
        submodules = dataclasses.replace(submodules, core_attention=core_attention)
    return SelfAttention(config, submodules, layer_number=3, attn_mask_type=AttnMaskType[mask])


def test_without_a_plan_megatrons_own_is_built(megatron):
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    assert type(build_layer(None).core_attention) is DotProductAttention


@pytest.mark.parametrize("spec", ["local", "transformer engine"])
def test_under_a_plan_ours_is_built(spec, megatron, monkeypatch):
    import megatron.core.extensions.transformer_engine as extension

    from megatron_hexi.megatron.core_attention import HexiCoreAttention

    monkeypatch.setattr(extension, "TEDotProductAttention", SomeTransformerEngineAttention)
    activate(proportional_plan(WORKLOAD, [[[1]]]))
    layer = build_layer(SomeTransformerEngineAttention if spec == "transformer engine" else None)
    assert type(layer.core_attention) is HexiCoreAttention
    assert not list(layer.core_attention.parameters())


def test_a_core_attention_that_we_do_not_know_is_refused(megatron, capsys):
    activate(proportional_plan(WORKLOAD, [[[1]]]))
    with pytest.raises(SystemExit) as refused:
        build_layer(torch.nn.Identity)
    assert refused.value.code == 2
    assert "Identity" in capsys.readouterr().err


def test_a_mask_that_is_not_the_plans_is_refused(megatron, capsys):
    activate(proportional_plan(WORKLOAD, [[[1]]]))
    with pytest.raises(SystemExit):
        build_layer(None, mask="no_mask")
    assert "layer 3 has the mask no_mask, but the plan plan.yaml is causal" in capsys.readouterr().err


@pytest.fixture
def cpu():
    """Megatron's own attention asks for a CUDA device."""
    platform = select_platform("cpu")
    platform.install()
    yield
    platform.remove()


def both_layers(**changes):
    """Megatron's own layer and ours, with the same sinks."""
    set_active_session(None)
    stock = build_layer(None, **changes).core_attention
    activate(proportional_plan(WORKLOAD, [[[1]]]))
    ours = build_layer(None, **changes).core_attention
    # Dropout of the stock layer draws under Megatron's tracker, which only its set-up seeds.
    stock.attention_dropout = torch.nn.Identity()
    stock.config.sequence_parallel = True
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
            mine.copy_(theirs)
    return stock, ours


def test_the_layer_gives_what_megatrons_gives(cpu, megatron):
    """Also with scores divided by the layer's number, which are multiplied again before the softmax."""
    query = torch.randn(32, 2, 4, 8)
    key, value = torch.randn(2, 32, 2, 2, 8)
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
    for changes in ({}, {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}):
        stock, ours = both_layers(**changes)
        torch.testing.assert_close(ours(query, key, value, None), stock(query, key, value, mask))


def test_torch_compile_does_not_trace_into_the_layer(megatron):
    """What waits for other ranks is no part of a graph. (The CPU platform compiles nothing.)"""
    activate(proportional_plan(WORKLOAD, [[[1]]]))
    ours = build_layer(None).core_attention
    traced: list[object] = []

    def backend(graph, example_inputs):
        traced.extend(node.target for node in graph.graph.nodes if node.op.startswith("call_"))
        return graph.forward

    def around(query, key, value):
        return torch.sin(ours(torch.cos(query), key, value, None))

    tensors = torch.randn(32, 2, 4, 8, requires_grad=True), *torch.randn(2, 32, 2, 2, 8)
    torch.testing.assert_close(torch.compile(around, backend=backend)(*tensors), around(*tensors))
    assert traced == [torch.cos, torch.sin]


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("window", [None, (5, 0), (0, 0), (-1, 0)])
def test_windows_and_sinks_are_megatrons(softmax_type, window, cpu, megatron):
    stock, ours = both_layers(softmax_type=softmax_type, window_size=window)
    query, grad = torch.randn(32, 2, 4, 8, requires_grad=True), torch.randn(32, 2, 32)
    key, value = (torch.randn(32, 2, 2, 8, requires_grad=True) for _ in range(2))
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
    if window == (-1, 0):  # Megatron's own mask has no words for a window without end on one side
        stock.scale_mask_softmax.window_size = None
    for layer in (stock, ours):
        output = layer(query, key, value, mask if layer is stock else None)
        grads = torch.autograd.grad(output, [query, key, value, *layer.parameters()], grad)
        if layer is stock:
            expected = output, *grads
    for found, exact in zip((output, *grads), expected, strict=True):
        torch.testing.assert_close(found, exact, atol=2e-5, rtol=2e-5)


def test_a_layer_without_a_window_sees_all(cpu, megatron):
    """Layer 3 of every third is a full one."""
    _, ours = both_layers(window_size=(5, 0), window_attn_skip_freq=3)
    assert ours.window is None
    _, ours = both_layers(window_size=(5, 0), window_attn_skip_freq=2)
    assert ours.window == 5


def test_sinks_are_stored_as_megatron_stores_them(cpu, megatron):
    group = megatron.get_data_parallel_group(with_context_parallel=True)
    stored = [
        {key: (part.key, part.data.shape, part.global_shape, part.axis_fragmentations)}
        for layer in both_layers(softmax_type="learnable")
        for key, part in layer.sharded_state_dict("layer.", metadata={"dp_cp_group": group}).items()
    ]
    assert stored[0] == stored[1]
    _, ours = both_layers()
    assert ours.sharded_state_dict("layer.", metadata={"dp_cp_group": group}) == {}


def packed(ends: list[int]):
    from megatron.core.packed_seq_params import PackedSeqParams

    places = torch.tensor(ends, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=places, cu_seqlens_kv=places)


@pytest.mark.parametrize("window", [None, 5])
def test_documents_do_not_see_each_other(window, cpu, megatron):
    """Also beside a window, where Megatron's own layer would forget them: it is given one mask for both."""
    _, ours = both_layers(window_size=None if window is None else (window, 0), softmax_type="learnable")
    stock, _ = both_layers(softmax_type="learnable")
    with torch.no_grad():
        stock.softmax_offset.copy_(ours.softmax_offset)
    query, key, value = torch.randn(32, 1, 4, 8), torch.randn(32, 1, 2, 8), torch.randn(32, 1, 2, 8)
    document = torch.repeat_interleave(torch.tensor([3, 20, 0, 9]))
    mask = torch.ones(32, 32, dtype=torch.bool).triu(1) | (document[:, None] != document)
    if window is not None:
        mask |= torch.ones(32, 32, dtype=torch.bool).tril(-window - 1)
    found = ours(
        *(tensor.squeeze(1) for tensor in (query, key, value)),
        None,
        packed_seq_params=packed([0, 3, 23, 23, 32]),
    )
    torch.testing.assert_close(found, stock(query, key, value, mask[None, None]).squeeze(1))


@pytest.mark.parametrize("ends", [[0, 3, 31], [0, 20, 64], [1, 32], [0, 20, 10, 32]])
def test_documents_that_are_not_the_sequence_are_refused(ends, cpu, megatron):
    _, ours = both_layers()
    query, key, value = torch.randn(32, 4, 8), torch.randn(32, 2, 8), torch.randn(32, 2, 8)
    with pytest.raises(HexiError, match="was made for sequences of 32 tokens"):
        ours(query, key, value, None, packed_seq_params=packed(ends))


def test_arguments_that_a_plan_cannot_carry_out_are_refused(megatron):
    activate(proportional_plan(WORKLOAD, [[[1]]]))
    ours = build_layer(None).core_attention
    query, key, value = torch.randn(32, 2, 4, 8), torch.randn(32, 2, 2, 8), torch.randn(32, 2, 2, 8)
    from megatron.core.transformer.enums import AttnMaskType

    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    for named in (
        {"attention_mask": mask},
        {"attention_mask": None, "attention_bias": mask},
        {"attention_mask": None, "attn_mask_type": AttnMaskType.padding_causal},
    ):
        with pytest.raises(HexiError, match="train without it"):
            ours(query, key, value, **named)
