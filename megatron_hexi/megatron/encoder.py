"""The images of a micro-batch on the ranks of a domain: which a rank encodes, and whose features it gets.

Units' weights in the plan deal the images, a video by pairs of frames: encoders attend inside one. Every rank
derives the whole deal from the images' sizes. Without weights each rank encodes all images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.errors import PlanError
from megatron_hexi.megatron.session import Session, without_session
from megatron_hexi.patching import Patch, patched
from megatron_hexi.plan.batch_balance import batch_domain
from megatron_hexi.plan.images import deal_images
from megatron_hexi.plan.layout import held_positions
from megatron_hexi.runtime.feature_exchange import FeatureExchange

#: A function of the patches, [N, P], and the grids, [I, 3], of some images that returns their features.
Encode = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ImageShares:
    """A rank's part in the images of a micro-batch.

    Args:
        grids: 1, height and width of each image in patches, [I, 3]; a pair of frames of a video is an image.
        merge: side of the square of patches of which one feature is made.
        own: numbers of the images that the rank encodes.
        features: number of features of all images (F).
        before: number of features in samples before those of the rank's domain.
        held: numbers, behind these, of the features whose rows the rank holds, ascending, [M].
        exchange: features sent and received; ``None``: each rank encodes all images of its domain's samples.
    """

    grids: Tensor
    merge: int
    own: list[int]
    features: int
    before: int
    held: Tensor
    exchange: FeatureExchange | None

    @classmethod
    def of(
        cls, session: Session, grids: Tensor, merge: int, seen: Tensor, documents: tuple[int, ...] | None
    ) -> ImageShares:
        """Return this rank's part.

        Args:
            grids: pairs of frames, height and width of each image in patches, [I, 3].
            merge: side of the square of patches of which one feature is made.
            seen: whether a token stands for a feature, [B, S]; features follow each other by sequence, then
                position.
            documents: lengths of the documents of the sequence; ``None``: it is not packed.

        Raises:
            PlanError: images and tokens do not have equally many features.
        """
        grids = grids.repeat_interleave(grids[:, 0], 0)
        grids[:, 0] = 1
        counts = grids.prod(-1).cpu() // merge**2
        features, tokens = int(counts.sum()), int(seen.sum())
        if features != tokens:
            raise PlanError(
                f"images of a micro-batch have {features} features, and its sequences tokens for {tokens}; "
                "give sequences that hold their images whole"
            )
        before = int(seen[: session.samples.start or 0].sum())
        places = seen[session.samples].cpu().nonzero()[:, 1]
        ends = counts.cumsum(0)
        images = ((ends > before) & (ends <= before + len(places))).nonzero()[:, 0]
        domain = batch_domain(session.domain, documents, session.given.plan.rates)
        group = session.attention.domain_group
        holder = torch.zeros(session.seq_length, dtype=torch.int64)
        for number, segments in enumerate(held_positions(domain)):
            for start, stop in segments:
                holder[start:stop] = number
        holders, rank = holder[places], dist.get_rank(group)
        held = (holders == rank).nonzero()[:, 0].to(seen.device)
        weights = [member.patches for member in domain.members]
        if None in weights:
            return cls(grids, merge, images.tolist(), features, before, held, None)
        owners = deal_images(counts[images].tolist(), [weight or 0 for weight in weights])
        encoders = torch.tensor(owners, dtype=torch.int64)
        exchange = FeatureExchange.of(encoders.repeat_interleave(counts[images]), holders, group, seen.device)
        return cls(grids, merge, images[encoders == rank].tolist(), features, before, held, exchange)

    def encode(self, encode: Encode, pixels: Tensor) -> Tensor:
        """Return the features of the rows that the rank holds, [M, H].

        Args:
            pixels: patches of all images, [N, P].
        """
        if not self.own:
            rows = encode_nothing(encode, self.merge, pixels)
        else:
            parts = pixels.split(self.grids.prod(-1).tolist())
            rows = encode(torch.cat([parts[image] for image in self.own]), self.grids[self.own])
        return rows.index_select(0, self.held) if self.exchange is None else self.exchange(rows)

    def whole(self, rows: Tensor) -> Tensor:
        """Return features of all images, [F, H], which are 0 outside the rank's rows, [M, H]."""
        return rows.new_zeros(self.features, rows.shape[1]).index_copy(0, self.before + self.held, rows)


def encode_nothing(encode: Encode, merge: int, like: Tensor) -> Tensor:
    """Return no features, [0, H], of an encoder that ran on one image of zeros.

    A rank without images computes so what the others compute: its encoder's gradients are zeros, they are
    ready in the order in which buckets are summed, and its unit's ranks meet in the encoder's collectives.

    Args:
        like: patches of any images, [N, P].
    """
    grids = torch.tensor([[1, merge, merge]], device=like.device)
    return encode(like.new_zeros(merge**2, like.shape[1]), grids)[:0]


def encoder_patch(encoder: str, **terms: Any) -> Patch:
    """Return the patch that builds a class of encoders as without a plan; `terms` are those of `patched`."""
    why = "an encoder's attention is its own: of whole images, without a mask"
    return patched(f"{encoder}.__init__", why=why, **terms)(_without_a_plan)


def _without_a_plan(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with without_session():
        original(*args, **kwargs)
