"""Scans of the CPU platform against the recurrences that define them, token by token in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_hexi.platform import cpu_scans
from megatron_hexi.platform.cpu_layers import (
    causal_conv1d,
    chunk_gated_delta_rule,
    mamba_split_conv1d_scan_combined,
)
from tests.support.plans import examples

LIMIT = 1e-10


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@st.composite
def scans(draw: st.DrawFn) -> tuple[tuple[int, ...], Tensor | None, int]:
    """Batch, tokens, groups, heads of each, key and value size; documents; a seed."""
    shape = [draw(st.integers(1, top)) for top in (2, 90, 3, 3, 5, 5)]
    lengths = draw(st.none() | st.lists(st.integers(1, 40), min_size=1, max_size=6))
    documents = None
    if lengths is not None:
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[: shape[1]]
        documents = torch.cat([numbers, torch.full((shape[1] - len(numbers),), len(lengths))])
        documents = documents.expand(shape[0], -1)
    return tuple(shape), documents, draw(st.integers(0, 2**20))


def starts(documents: Tensor | None, token: int) -> bool:
    return token == 0 or (documents is not None and bool(documents[0, token] != documents[0, token - 1]))


@examples(300)
@given(scans())
def test_state_space_scan_is_the_recurrence(case):
    (batch, length, groups, shared_by, keys, size), documents, seed = case
    heads = groups * shared_by
    x, dt = normal(seed, batch, length, heads, size), normal(seed + 1, batch, length, heads).exp()
    rates, b, c = -normal(seed + 2, heads).exp(), *normal(seed + 3, 2, batch, length, groups, keys)
    found = cpu_scans.state_space_scan(x, dt, rates, b, c, documents)
    group = torch.arange(heads) // shared_by
    state = torch.zeros(batch, heads, size, keys, dtype=torch.float64)
    for token in range(length):
        step = dt[:, token, :, None, None]
        kept = torch.exp(step * rates[:, None, None]) * state * (not starts(documents, token))
        state = kept + step * torch.einsum("bhp,bhn->bhpn", x[:, token], b[:, token, group])
        expected = torch.einsum("bhpn,bhn->bhp", state, c[:, token, group])
        assert (found[:, token] - expected).abs().max() < LIMIT


@examples(300)
@given(scans())
def test_delta_rule_scan_is_the_recurrence(case):
    (batch, length, _, heads, size, width), documents, seed = case
    q, k = normal(seed, 2, batch, length, heads, size)
    k = k / k.norm(dim=-1, keepdim=True)
    v = normal(seed + 1, batch, length, heads, width)
    g, beta = -normal(seed + 2, batch, length, heads).exp(), normal(seed + 3, batch, length, heads).sigmoid()
    found = cpu_scans.delta_rule_scan(q, k, v, g, beta, documents)
    state = torch.zeros(batch, heads, size, width, dtype=torch.float64)
    for token in range(length):
        state = g[:, token, :, None, None].exp() * state * (not starts(documents, token))
        error = v[:, token] - torch.einsum("bhn,bhnp->bhp", k[:, token], state)
        growth = beta[:, token, :, None] * error
        state = state + torch.einsum("bhn,bhp->bhnp", k[:, token], growth)
        expected = torch.einsum("bhn,bhnp->bhp", q[:, token], state)
        assert (found[:, token] - expected).abs().max() < LIMIT


@examples(50)
@given(scans())
def test_convolution_is_pytorchs_within_each_document(case):
    (batch, length, channels, taps, *_), documents, seed = case
    x, weight, bias = (
        normal(seed, batch, length, channels),
        normal(seed, channels, taps),
        normal(seed, channels),
    )
    found = cpu_scans.causal_convolution(x, weight, bias, documents)
    edges = [token for token in range(length) if starts(documents, token)]
    for first, stop in zip(edges, [*edges[1:], length], strict=True):
        expected = torch.nn.functional.conv1d(
            x[:, first:stop].transpose(1, 2), weight.unsqueeze(1), bias, padding=taps - 1, groups=channels
        )[..., : stop - first]
        assert torch.allclose(found[:, first:stop], expected.transpose(1, 2), atol=LIMIT)


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 20 + [1] * 30])])
def test_gradients_are_those_of_differences(documents: Tensor | None):
    length = 50
    decays = (-normal(2, 1, length, 2).exp()).requires_grad_()
    parts = [normal(seed, 1, length, 2, 2).requires_grad_() for seed in range(3)]
    rates = normal(3, 1, length, 2).sigmoid().requires_grad_()
    torch.autograd.gradcheck(
        lambda q, k, v, g, beta: cpu_scans.delta_rule_scan(q, k, v, g, beta, documents),
        [*parts, decays, rates],
        fast_mode=True,
    )
    steps, per_head = normal(4, 1, length, 2).exp().requires_grad_(), (-normal(5, 2).exp()).requires_grad_()
    torch.autograd.gradcheck(
        lambda x, b, c, dt, a: cpu_scans.state_space_scan(x, dt, a, b, c, documents),
        [*parts, steps, per_head],
        fast_mode=True,
    )


def test_packed_documents_are_as_if_each_were_alone():
    lengths, heads, size, groups, states = (7, 40, 13), 4, 3, 2, 5
    width = 2 * heads * size + 2 * groups * states + heads
    z, channels = normal(0, 1, sum(lengths), width), heads * size + 2 * groups * states
    weights = (
        normal(1, channels, 4),
        normal(2, channels),
        normal(3, heads),
        -normal(4, heads).exp(),
        normal(5, heads),
    )

    def scan(part: Tensor, documents: Tensor | None) -> Tensor:
        return mamba_split_conv1d_scan_combined(
            part, *weights, 16, seq_idx=documents, headdim=size, ngroups=groups
        )

    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    alone = torch.cat([scan(part, None) for part in z.split(lengths, 1)], 1)
    assert torch.allclose(scan(z, numbers), alone, atol=LIMIT)
    assert not torch.allclose(scan(z, None), alone, atol=1e-3)
    ends = torch.tensor([0, 7, 47, 60], dtype=torch.int32)
    q, k, v = (normal(seed, 1, 60, 2, 4) for seed in range(3))
    g, beta = -normal(3, 1, 60, 2).exp(), normal(4, 1, 60, 2).sigmoid()
    packed, _ = chunk_gated_delta_rule(q, k / 4, v, g=g, beta=beta, cu_seqlens=ends)
    pieces = zip(*(part.split(lengths, 1) for part in (q, k / 4, v, g, beta)), strict=True)
    alone = torch.cat([chunk_gated_delta_rule(*part)[0] for part in pieces], 1)
    assert torch.allclose(packed, alone, atol=LIMIT)
    convolved, _ = causal_conv1d(z, normal(6, width, 4), activation="silu", cu_seqlens=ends)
    taps = normal(6, width, 4)
    apart = [causal_conv1d(part, taps, activation="silu")[0] for part in z.split(lengths, 1)]
    assert torch.allclose(convolved, torch.cat(apart, 1), atol=LIMIT)
