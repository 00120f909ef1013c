"""Images of a micro-batch on the ranks of a domain: the features of a rank's rows reach it in their order."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron import encoder
from megatron_hexi.megatron.encoder import ImageShares
from megatron_hexi.plan import Domain, Group, Member
from megatron_hexi.runtime import feature_exchange

LENGTH, MERGE = 40, 2
#: Two groups in a zigzag; the second member encodes nothing, the last holds no rows.
DOMAIN = Domain(
    (
        Group(((0, 12), (25, 40)), (Member((0,), 20, (0, 1), patches=3), Member((1,), 7, (1, 2), patches=0))),
        Group(((12, 25),), (Member((2,), 13, (0, 1), patches=1), Member((3,), 0, (1, 2), patches=2))),
    )
)
#: Images by sequence, as pairs of frames, height and width; the second is a video.
GRIDS = [[[1, 4, 4], [2, 2, 4]], [[1, 2, 2]], [], [[1, 6, 4], [1, 2, 4]]]


def images_of(
    rank: int,
    domain: Domain,
    grids: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    samples: slice = slice(None),
) -> ImageShares:
    for module in (encoder, feature_exchange):
        monkeypatch.setattr(module.dist, "get_rank", lambda group: rank)
        monkeypatch.setattr(module.dist, "get_world_size", lambda group: len(domain.members))
    sizes = torch.tensor([*itertools.chain(*grids)], dtype=torch.int64).view(-1, 3)
    return ImageShares.of(session(domain, samples), sizes, MERGE, seen(grids), None)


def session(domain: Domain, samples: slice = slice(None)) -> Any:
    """Return a rank's session as far as `ImageShares` asks it."""
    given = SimpleNamespace(plan=SimpleNamespace(rates=None))
    attention = SimpleNamespace(domain_group=None)
    return SimpleNamespace(
        domain=domain, attention=attention, seq_length=LENGTH, samples=samples, given=given
    )


def seen(grids: list[Any]) -> Tensor:
    """Return which tokens stand for features: an image begins three tokens behind the one before."""
    marks = torch.zeros(len(grids), LENGTH, dtype=torch.bool)
    for row, images in zip(marks, grids, strict=True):
        place = 0
        for frames, height, width in images:
            count = frames * height * width // MERGE**2
            row[place + 3 : place + 3 + count] = True
            place += 3 + count
    return marks


def encode(pixels: Tensor, grids: Tensor) -> Tensor:
    """Return for each four patches their mean and their frame's, so features tell if frames are whole."""
    frames = grids.repeat_interleave(grids[:, 0], 0)[:, 1:].prod(-1).tolist()
    means = [frame.mean().expand(len(frame) // MERGE**2) for frame in pixels.split(frames)]
    return torch.stack([pixels.view(-1, MERGE**2, 1).mean(1)[:, 0], torch.cat(means)], 1)


@pytest.mark.parametrize("grids", [GRIDS, [[]], [[[1, 2, 2]]]])
def test_the_features_of_its_rows_reach_each_rank(grids: list[Any], monkeypatch: pytest.MonkeyPatch):
    images = [images_of(rank, DOMAIN, grids, monkeypatch) for rank in range(4)]
    count = sum(frames * height * width for image in grids for frames, height, width in image)
    pixels = torch.randn(count, 1, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([*itertools.chain(*grids)], dtype=torch.int64).view(-1, 3)
    true = encode(pixels, sizes) if count else torch.zeros(0, 2)
    sent: dict[tuple[int, int], Tensor] = {}
    for rank, own in enumerate(images):
        exchange = own.exchange
        assert exchange is not None

        def leave(rows: Tensor, rank: int = rank, exchange: Any = exchange) -> Tensor:
            parts = rows.index_select(0, exchange.sent).split(exchange.sends)
            sent.update({(rank, peer): part for peer, part in enumerate(parts)})
            return rows

        monkeypatch.setattr(
            feature_exchange.FeatureExchange, "__call__", lambda self, rows, to=leave: to(rows)
        )
        own.encode(encode, pixels)
    places = seen(grids).nonzero()[:, 1]
    for rank, own in enumerate(images):
        exchange = own.exchange
        assert exchange is not None
        assert [len(sent[peer, rank]) for peer in range(4)] == exchange.receives
        arrived = torch.cat([sent[peer, rank] for peer in range(4)])
        rows = torch.empty_like(arrived).index_copy_(0, exchange.received, arrived)
        torch.testing.assert_close(own.whole(rows)[own.held], true[own.held])
        assert places[own.held].tolist() == [place for place in places.tolist() if holder(place) == rank]
    assert not images[1].own


def holder(place: int) -> int:
    """Return the rank with the row of a position."""
    return 2 if 12 <= place < 25 else 0 if place < 12 or place < 33 else 1


def test_images_that_texts_do_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(PlanError, match="have 4 features, and its sequences tokens for 1; give sequences"):
        ImageShares.of(session(DOMAIN), torch.tensor([[1, 4, 4]]), MERGE, seen([[[1, 2, 2]]]), None)


@pytest.mark.parametrize("patches", [None, 1])
@pytest.mark.parametrize("first", range(5))
def test_domains_with_samples_of_their_own_encode_the_images_of_these(
    first: int, patches: int | None, monkeypatch: pytest.MonkeyPatch
):
    domain = Domain((Group(((0, LENGTH),), (Member((0,), LENGTH, (0, 2), patches=patches),)),))
    taken = slice(first, first + 2)
    own = images_of(0, domain, GRIDS, monkeypatch, taken)
    sizes = torch.tensor([*itertools.chain(*GRIDS)])
    pixels = torch.randn(int(sizes.prod(-1).sum()), 1)
    true, rows = encode(pixels, sizes), seen(GRIDS).nonzero()[:, 0]
    true[(rows < taken.start) | (rows >= taken.stop)] = 0
    monkeypatch.setattr(feature_exchange.FeatureExchange, "__call__", lambda self, rows: rows)
    torch.testing.assert_close(own.whole(own.encode(encode, pixels)), true)
