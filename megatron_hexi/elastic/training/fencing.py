"""Ranks ask the fence before they write what outlives their round, and end where it is closed."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_hexi.elastic import say
from megatron_hexi.elastic.store import ROUND_VARIABLE, START_AGAIN, Fence, in_round, whole_store
from megatron_hexi.patching import patched
from megatron_hexi.runtime import stop_watch


def end_to_start_again(reason: str) -> NoReturn:
    """Print why this rank ends, and end it; its agent starts it again in the next round."""
    if reason:
        say(reason)
    stop_watch()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(START_AGAIN)


@functools.cache
def _fence() -> Fence:
    return Fence(whole_store(), os.environ[ROUND_VARIABLE])


def ask_fence() -> None:
    """End this rank if its round is over; does nothing in a job that is not elastic.

    Raises:
        RuntimeError: the store does not answer.
    """
    if in_round() and (reason := _fence().why_closed()):
        end_to_start_again(f"rank {os.environ['RANK']}: {reason}")


@patched(
    "megatron.training.checkpointing:save_checkpoint",
    why="ranks of a round that is over save nothing, under megatron_hexi.elastic",
)
def _save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    ask_fence()
    return original(*args, **kwargs)


@patched(
    "megatron.core.dist_checkpointing.core:save_config",
    why="no checkpoint of a round that is over becomes complete, under megatron_hexi.elastic",
)
def _complete(original: Callable[..., Any], config: Any, checkpoint_dir: str) -> Any:
    ask_fence()
    return original(config, checkpoint_dir)


FENCE_PATCHES = (_save, _complete)
