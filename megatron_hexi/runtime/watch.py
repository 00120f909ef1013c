"""A watch in every rank, which ends the rank if the job cannot go on, and names the rank at fault.

A failing collective reports that a peer is gone, but not which rank, or reports nothing until its time-out.
The class `Liveness` knows more about the other ranks. A separate thread, the guard, reads it and ends the
process, since the main thread may be stuck in a collective.

* A rank that fails posts a fault; all other ranks print its message and end with the same exit code.
* A rank whose peer is gone fails in a collective, at once or at the job's time-out. Before it ends it prints
  which ranks have no heartbeat, and where and since when it waited.
* A launcher that saw a rank die ends the others by SIGTERM, often before their collectives fail. These ranks
  print the same message, and end. The agents of `megatron_hexi.elastic` also say which rank has died.
* NCCL's own watchdog ends a process without notice. A long silence is therefore printed before, as a warning.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType

import torch.distributed as dist

from megatron_hexi.elastic.store import lost_after_s
from megatron_hexi.errors import HexiError, set_fault_listener
from megatron_hexi.runtime.liveness import FAILED, Fault, Liveness, clock_time
from megatron_hexi.runtime.waiting import waits_begun
from megatron_hexi.speaker import ENDED_S, say_error, under_torchrun

#: Seconds in which a rank may end by itself after another rank posted a fault.
_GRACE_S = 1.0
#: Seconds of silence after which a warning is printed even where nothing has failed yet.
_WARN_S = 10.0
#: Modules that wait on behalf of their callers; messages name the caller's place instead.
_CARRIERS = ("megatron_hexi.runtime.wire", "megatron_hexi.runtime.waiting")
#: Seconds between two looks of the guard.
_LOOK_S = 0.25


class Watch:
    """The watch of one rank, which ends the rank's process, with a message, if the job cannot go on.

    Args:
        lost_after_s: seconds of silence of another rank after which this rank ends; ``None``: this rank ends
            when a wait times out.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, lost_after_s: float | None = None
    ) -> None:
        self._rank = rank
        self._lost_after_s = math.inf if lost_after_s is None else lost_after_s
        self._others = Liveness(store, rank, world_size)
        self._process = os.getpid()
        self._closed = threading.Event()
        #: Held by the thread that prints why this rank ends, until the process has ended.
        self._last_words = threading.Lock()
        self._told_at: float | None = None
        self._terminated_at: float | None = None
        self._warned: set[int] = set()
        self._wait_key: tuple[int, int, int] | None = None
        self._wait_place, self._wait_since = "set-up", clock_time()
        self._wakeup, self._signals = socket.socketpair()
        self._guard = threading.Thread(target=self._look, name="hexi-watch", daemon=True)
        self._previous_hook = sys.excepthook

    def start(self) -> None:
        """Begin to send heartbeats, and to watch the other ranks."""
        sys.excepthook = self._on_uncaught
        set_fault_listener(self.tell)
        self._take_signals()
        self._others.start()
        self._guard.start()

    def close(self) -> None:
        """End the watch, and let the rank leave the job."""
        if self._closed.is_set() or os.getpid() != self._process:
            return
        self._closed.set()
        self._others.leave()
        sys.excepthook = self._previous_hook
        set_fault_listener(None)
        self._give_signals_back()

    def tell(self, message: str, code: int) -> None:
        """Post the reason why this rank ends, and wait until all ranks have read it."""
        if os.getpid() == self._process and not self._closed.is_set():
            self._claim()
            self._others.tell(self._others.own_fault(message, code))

    # The guard

    def _look(self) -> None:
        """Check the state of the other ranks repeatedly, until the process ends."""
        while not self._closed.is_set():
            self._receive_signal()
            if self._last_words.locked():
                continue
            self._note_wait()
            if self._others.ended and (known := self._others.fault) is not None:
                self._end(known, known.code)
            posted, now = self._others.told, time.monotonic()
            if posted is not None:
                self._told_at = self._told_at or now
                if now - self._told_at > _GRACE_S:
                    self._end(posted, posted.code)
            if self._terminated_at is not None:
                known = self._others.fault
                if known is not None:
                    self._end(known, known.code if known.code != FAILED else 128 + signal.SIGTERM)
                if now - self._terminated_at > self._others.search_s:  # all are there: the job was ended
                    self._others.leave()
                    self._exit(128 + signal.SIGTERM)
            self._warn()
            longest = max((entry.seconds for entry in self._others.silent.values()), default=0.0)
            known = self._others.fault
            if longest > self._lost_after_s and known is not None:
                self._end(known, known.code)

    def _warn(self) -> None:
        """Print a warning about each rank that has been silent for long, once per silence."""
        silent = self._others.silent
        long = {rank: entry for rank, entry in silent.items() if entry.seconds > _WARN_S}
        for rank in long.keys() - self._warned:
            self._print(
                "warning", f"rank {rank} on {long[rank].place}: no heartbeat since {long[rank].since}"
            )
        for rank in self._warned - silent.keys():
            self._print("warning", f"rank {rank} has heartbeats again")
        self._warned = (self._warned & silent.keys()) | long.keys()

    def _note_wait(self) -> None:
        """Record the place in the code at which the main thread waits, and since when."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return
        key = (id(frame), frame.f_lasti, waits_begun())
        if key != self._wait_key:
            self._wait_key, self._wait_since = key, clock_time()
            self._wait_place = _place(frame)

    # The end

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print the error, post it, and end with the exit code of all ranks (`sys.excepthook`)."""
        if os.getpid() != self._process or not issubclass(kind, Exception):
            self._previous_hook(kind, error, trace)
            return
        # torch keeps the output of hooks until they return, which this hook does not.
        sys.stderr = sys.__stderr__ or sys.stderr
        if isinstance(error, HexiError):
            say_error(f"hexi: error: [rank {self._rank}] {error}")
            self.tell(str(error), error.exit_code)
            self._exit(error.exit_code)
        self._claim()
        fault, in_collective = None, False
        if isinstance(error, RuntimeError):  # what torch.distributed raises where a peer is gone
            frame = next(frame for frame, _ in reversed(list(traceback.walk_tb(trace))))
            module, place = frame.f_globals.get("__name__", ""), _place(frame)
            in_collective = module in _CARRIERS or module.startswith("torch.distributed.")
            if place != self._wait_place:
                self._wait_place, self._wait_since = place, clock_time()
            fault = self._others.find_fault()
        if fault is None or (fault.code == FAILED and not in_collective):
            self._previous_hook(kind, error, trace)
        if fault is None:
            summary = f"{kind.__name__}: {(str(error).splitlines() or [''])[0][:300]}"
            fault = self._others.own_fault(f"ended by {summary}", FAILED)
        else:
            self._print("error", self._words(fault))
        self._others.tell(fault)
        self._exit(fault.code)

    def _end(self, fault: Fault, code: int) -> None:
        """End the process because of a fault of another rank."""
        if self._last_words.acquire(blocking=False):
            if fault.code == FAILED:  # the place of each rank shows what it waited for
                self._print("error", self._words(fault))
                self._others.tell(fault)
            else:
                speaks = say_error(f"hexi: error: [rank {self._rank}] {self._words(fault)}")
                self._others.tell(fault)
                if not speaks and under_torchrun() and self._is_ended():
                    code = 0  # else torchrun would name it beside the rank at fault
            self._exit(code)

    def _is_ended(self) -> bool:
        """Wait for torchrun to end this rank, as `speaker.await_end` does; return whether this happened."""
        until = time.monotonic() + ENDED_S
        while self._terminated_at is None and time.monotonic() < until:
            self._receive_signal()
        return self._terminated_at is not None

    def _words(self, fault: Fault) -> str:
        if fault.code != FAILED:  # a mistake of the user: the place of this rank does not matter
            return fault.message
        return f"{fault.message}. This rank was in {self._wait_place} since {self._wait_since}"

    def _print(self, kind: str, message: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the guard, which ends the process
            print(f"hexi: {kind}: [rank {self._rank}] {message}", file=sys.stderr, flush=True)

    def _claim(self) -> None:
        """Take the right to print why this rank ends; if the guard has it, wait for the process's end."""
        self._last_words.acquire()

    def _exit(self, code: int) -> None:
        """End the process at once, without exit handlers, which would wait for ranks that are lost."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)

    # SIGTERM

    def _take_signals(self) -> None:
        """Let the guard receive SIGTERM while the main thread is in a collective, unless a handler is set."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return
        self._wakeup.setblocking(False)
        previous = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            return
        signal.signal(signal.SIGTERM, self._on_sigterm)
        # A forked worker of a data loader must neither wake this guard nor outlive a SIGTERM of its own.
        os.register_at_fork(after_in_child=self._give_signals_back)

    def _give_signals_back(self) -> None:
        if self._owns_sigterm():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _owns_sigterm(self) -> bool:
        # Megatron's --exit-signal-handler takes it over: then a checkpoint is being saved.
        return signal.getsignal(signal.SIGTERM) == self._on_sigterm

    def _receive_signal(self) -> None:
        """Wait for the time of the next check, or for a signal."""
        if self._terminated_at is not None:
            self._others.look()
        look_s = _LOOK_S if self._terminated_at is None else _LOOK_S / 5
        ready, _, _ = select.select([self._signals], [], [], look_s)
        if ready and signal.SIGTERM in self._signals.recv(64) and self._owns_sigterm():
            self._terminated_at = self._terminated_at or time.monotonic()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: the guard gets the signal by the wake-up socket before this runs."""


def _place(frame: FrameType | None) -> str:
    """Return where a rank waits: module, function and line of the innermost frame in Megatron or here.

    Frames of `_CARRIERS` are skipped. If no frame is left, the innermost frame of all is returned.
    """
    innermost = frame
    while frame is not None and not _tells(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    frame = frame or innermost
    assert frame is not None
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name} (line {frame.f_lineno})"


def _tells(module: str) -> bool:
    return module.startswith("megatron") and module not in _CARRIERS


_watch: Watch | None = None


def start_watch(store: dist.Store, rank: int, world_size: int) -> None:
    """Start the watch of this rank until the process ends, in place of a running watch."""
    global _watch
    stop_watch()
    atexit.unregister(stop_watch)
    atexit.register(stop_watch)
    _watch = Watch(store, rank, world_size, lost_after_s())
    _watch.start()


def stop_watch() -> None:
    """End the watch of this rank, and let the rank leave the job."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None
