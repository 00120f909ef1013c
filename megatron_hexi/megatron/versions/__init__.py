"""Differences between versions of megatron-core for our training script, a module for each version.

NVIDIA's scripts match their version already. When support for a version ends, its module is deleted.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Protocol, cast

from megatron.core.package_info import __version__
from packaging.version import Version
from torch import Tensor

#: Tensors by name; ``None`` for tensors that this rank does not need.
type Batch = dict[str, Tensor | None]


class Megatron(Protocol):
    """The functions that the module of each supported version of Megatron provides."""

    def train(
        self,
        build_datasets: Callable[..., Any],
        forward_step: Callable[..., Any],
        embedding_ranks: Callable[[list[int]], list[int]],
    ) -> None:
        """Parse the command line, build the model and train it.

        Args:
            build_datasets: returns the training, validation and test sets.
            embedding_ranks: returns the ranks of a pipeline that hold the word embedding.
        """

    def broadcast_batch(self, batch: Batch, is_packed: bool, **sizes: Any) -> Batch:
        """Return a micro-batch of whole sequences on every tensor-parallel rank.

        Args:
            batch: the micro-batch on the first rank; empty on others.
            sizes: other arguments of Megatron 0.19's `get_batch_on_this_tp_rank`.
        """

    def cut_batch(self, batch: Batch, per_sequence: bool) -> Batch:
        """Return this context-parallel rank's part of a micro-batch.

        Args:
            per_sequence: whether packed sequences are cut as a whole, not document by document.
        """

    def predicts_further_tokens(self, args: Namespace, vp_stage: int | None) -> bool:
        """Whether heads of multi-token prediction are on this stage."""


def installed() -> Megatron:
    """Return the module of the installed version; the patches have refused all other versions."""
    major, minor = Version(__version__).release[:2]
    return cast(Megatron, importlib.import_module(f"{__name__}.v{major}_{minor}"))
