"""What our training script finds elsewhere in each version of megatron-core: a module for each, of one shape.

NVIDIA's scripts are of their version already. When a version is supported no longer, its module goes.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Protocol, cast

from megatron.core.package_info import __version__
from packaging.version import Version
from torch import Tensor

#: Tensors by name; ``None`` for what this rank does not need.
type Batch = dict[str, Tensor | None]


class Megatron(Protocol):
    """The shape of these modules."""

    def train(
        self,
        build_datasets: Callable[..., Any],
        forward_step: Callable[..., Any],
        embedding_ranks: Callable[[list[int]], list[int]],
    ) -> None:
        """Parse the command line, build the model and train it.

        Args:
            build_datasets: gives the training, validation and test sets.
            forward_step: runs the model on a micro-batch.
            embedding_ranks: the ranks of a pipeline that hold the word embedding.
        """

    def broadcast_batch(self, batch: Batch, is_packed: bool, **sizes: Any) -> Batch:
        """A micro-batch of whole sequences on every tensor-parallel rank.

        Args:
            batch: it, on the first of them; empty on others.
            is_packed: whether it says where documents end.
            sizes: what else Megatron 0.19's `get_batch_on_this_tp_rank` takes.
        """

    def cut_batch(self, batch: Batch, per_sequence: bool) -> Batch:
        """This context-parallel rank's part of a micro-batch.

        Args:
            batch: whole sequences.
            per_sequence: whether sequences are cut as wholes, where they say where documents end.
        """

    def predicts_further_tokens(self, args: Namespace, vp_stage: int | None) -> bool:
        """Whether heads of multi-token prediction are on this stage."""


def installed() -> Megatron:
    """The module of the installed version; the patches have refused all that have none."""
    major, minor = Version(__version__).release[:2]
    return cast(Megatron, importlib.import_module(f"{__name__}.v{major}_{minor}"))
