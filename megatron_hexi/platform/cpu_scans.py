"""Scans of state-space and delta-net layers in PyTorch, for a CPU, which has no kernels for them.

Both layers carry a state along the sequence. A chunk of tokens is computed at once: by products of all its
pairs, and from the state before it, which is all that the chunks before it leave. Every exponent is a sum of
logarithms of decays, so at most 0.

Shape letters: B batch, S tokens, H heads, P size of a head, N size of the state (of keys), W taps, C
channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

#: Tokens of a chunk.
CHUNK = 32


def causal_convolution(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None
) -> Tensor:
    """Return each channel convolved with the tokens before it in its document, [B, S, C].

    Args:
        inputs: channels of each token, [B, S, C].
        weight: taps of each channel, [C, W]; the last tap is the token itself.
        bias: bias of each channel, [C], or ``None``.
        documents: number of each token's document, [B, S], ascending; ``None``: one document.
    """
    length, taps = inputs.shape[1], weight.shape[1]
    total = inputs * weight[:, -1]
    for lag in range(1, min(taps, length)):
        earlier = functional.pad(inputs[:, :-lag], (0, 0, lag, 0))
        if documents is not None:
            same = documents[:, lag:] == documents[:, :-lag]
            earlier = earlier * functional.pad(same, (lag, 0)).unsqueeze(-1)
        total = total + earlier * weight[:, -1 - lag]
    return total if bias is None else total + bias


def state_space_scan(
    inputs: Tensor,
    steps: Tensor,
    rates: Tensor,
    keys: Tensor,
    queries: Tensor,
    documents: Tensor | None = None,
) -> Tensor:
    """Return the outputs of Mamba-2's recurrence, [B, S, H, P].

    At each token the state of a head, [N, P], is multiplied by ``exp(step x rate)``, then the outer product
    of key and step x input is added; the output is the query times the state. A document begins with a state
    of zeros.

    Args:
        inputs: input of each head (x), [B, S, H, P].
        steps: step of each head (dt), [B, S, H], positive.
        rates: decay rate of each head (A), [H], negative.
        keys: input projections (B in Mamba-2), [B, S, G, N]; each serves H / G consecutive heads.
        queries: output projections (C in Mamba-2), of the same shape.
        documents: number of each token's document, [B, S], ascending; ``None``: one document.
    """
    repeated = inputs.shape[2] // keys.shape[2]
    keys, queries = (part.repeat_interleave(repeated, 2) for part in (keys, queries))
    values, decays = inputs * steps.unsqueeze(-1), steps * rates
    state = inputs.new_zeros(inputs.shape[0], inputs.shape[2], keys.shape[3], inputs.shape[3])
    outputs = []
    for chunk in _Chunk.cut(decays, documents):
        query, key, value = (chunk.heads_first(part) for part in (queries, keys, values))
        outputs.append(chunk.read(query, state) + chunk.pairs(query, key) @ value)
        state = chunk.carry(state, key, value)
    return torch.cat(outputs, 2).transpose(1, 2)


def delta_rule_scan(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    rates: Tensor,
    documents: Tensor | None = None,
) -> Tensor:
    """Return the outputs of the gated delta rule, [B, S, H, P].

    At each token the state of a head, [N, P], is multiplied by ``exp(decay)``, then the outer product of key
    and rate x (value - key times the state) is added; the output is the query times the state. A document
    begins with a state of zeros.

    Args:
        queries: query of each token and head, [B, S, H, N].
        keys: key of each token and head, [B, S, H, N].
        values: value of each token and head, [B, S, H, P].
        decays: logarithm of the decay of each token and head, [B, S, H], at most 0.
        rates: rate at which each token and head writes to the state (beta), [B, S, H].
        documents: number of each token's document, [B, S], ascending; ``None``: one document.
    """
    state = values.new_zeros(values.shape[0], values.shape[2], keys.shape[3], values.shape[3])
    outputs = []
    for chunk in _Chunk.cut(decays, documents):
        query, key, value = (chunk.heads_first(part) for part in (queries, keys, values))
        rate = chunk.heads_first(rates.unsqueeze(-1))
        # Each token's growth depends on those before it in the chunk: (1 + L) growth = rate x (value - read).
        mixed = torch.tril(rate * chunk.pairs(key, key), -1)
        growth = torch.linalg.solve_triangular(
            mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device),
            rate * (value - chunk.read(key, state)),
            upper=False,
            unitriangular=True,
        )
        outputs.append(chunk.read(query, state) + chunk.pairs(query, key) @ growth)
        state = chunk.carry(state, key, growth)
    return torch.cat(outputs, 2).transpose(1, 2)


class _Chunk:
    """Tokens that are computed at once, and how far states decay between them."""

    def __init__(self, tokens: slice, decays: Tensor, documents: Tensor | None) -> None:
        self._tokens = tokens
        total = decays[:, tokens].transpose(1, 2).cumsum(2)  # [B, H, Q], up to and with each token
        length = total.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool, device=total.device).tril()
        from_before = torch.ones(1, 1, length, dtype=torch.bool, device=total.device)
        if documents is not None:
            inside = documents[:, tokens]
            seen = seen & (inside.unsqueeze(2) == inside.unsqueeze(1)).unsqueeze(1)
            before = documents[:, max(tokens.start - 1, 0), None]
            from_before = (inside == before).unsqueeze(1)
        between = total.unsqueeze(3) - total.unsqueeze(2)
        self._between = between.masked_fill(~seen, -math.inf).exp()  # [B, H, Q, Q]
        self._from_before = total.masked_fill(~from_before, -math.inf).exp().unsqueeze(3)  # [B, H, Q, 1]

    @classmethod
    def cut(cls, decays: Tensor, documents: Tensor | None) -> list[_Chunk]:
        """Return the chunks of a sequence with the logarithms of its decays, [B, S, H]."""
        length = decays.shape[1]
        return [cls(slice(n, min(n + CHUNK, length)), decays, documents) for n in range(0, length, CHUNK)]

    def heads_first(self, part: Tensor) -> Tensor:
        """Return the chunk's tokens of [B, S, H, D] as [B, H, Q, D]."""
        return part[:, self._tokens].transpose(1, 2)

    def pairs(self, readers: Tensor, keys: Tensor) -> Tensor:
        """Return the product of each reader with each key up to it in the chunk, decayed, [B, H, Q, Q]."""
        return (readers @ keys.transpose(2, 3)) * self._between

    def read(self, readers: Tensor, state: Tensor) -> Tensor:
        """Return the product of each reader with the state before the chunk, decayed, [B, H, Q, P]."""
        return (readers @ state) * self._from_before

    def carry(self, state: Tensor, keys: Tensor, growth: Tensor) -> Tensor:
        """Return the state after the chunk, [B, H, N, P]."""
        kept = self._from_before[:, :, -1:] * state
        return kept + keys.transpose(2, 3) @ (growth * self._between[:, :, -1].unsqueeze(3))
