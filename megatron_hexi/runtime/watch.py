"""A watch in every rank: it names a rank that is gone, and ends ranks that can no longer go on.

A collective says that a peer is gone, not which rank that was, or nothing at all until its time-out. The
watch asks the roll (`roll`) instead. It has two threads, because a request to the store may never return: one
keeps the roll, the other looks at what was heard and ends the process where that is due. Nobody has to reach
the main thread for that, which may be stuck in a collective.

* A rank that fails tells the others; each prints the message and ends with the same exit code.
* A rank whose peer is gone fails in a collective, at once or at the job's time-out. Before it ends it says
  who is silent, and what it waited for since when.
* A launcher that saw a rank die ends the others by SIGTERM, often before their collectives fail. They say
  who is silent, and end.
* NCCL's own watchdog ends a process without asking. So a long silence is told before that, as a warning.
"""

from __future__ import annotations

import atexit
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import datetime
from types import FrameType, TracebackType

import torch.distributed as dist

from megatron_hexi.errors import HexiError, set_fault_listener
from megatron_hexi.runtime.roll import Fault, Roll
from megatron_hexi.runtime.waiting import waits_begun

#: Exit code of a rank that ends because another is gone.
_LOST_PEER = 1
#: How many beats a rank that fails looks for another that failed before it. Silence shows after about six.
_SEARCH_BEATS = 8
#: Without an answer for so many beats, the store counts as gone.
_STORE_BEATS = 5
#: Seconds that a rank has to find by itself what another one has told.
_GRACE_S = 1.0
#: A silence of so many seconds is told even where nothing has failed yet.
_WARN_S = 10.0
#: They wait on behalf of their callers.
_CARRIERS = ("megatron_hexi.runtime.wire", "megatron_hexi.runtime.waiting")
#: Seconds between two looks of the guard.
_LOOK_S = 0.25


class Watch:
    """What one rank knows of the others, and does about it.

    Args:
        store: the job's store.
        rank: this rank's number in the job.
        world_size: ranks of the job.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._roll = Roll(store.clone(), rank, world_size)
        self._search_s = _SEARCH_BEATS * self._roll.beat_s
        self._store_silent_s = _STORE_BEATS * self._roll.beat_s
        self._process = os.getpid()
        self._outbox: queue.SimpleQueue[Fault | None] = queue.SimpleQueue()
        self._posted = threading.Event()
        self._closed = threading.Event()
        #: Held by the thread that says why this rank ends, until the process has ended.
        self._last_words = threading.Lock()
        self._answered, self._answered_at = time.monotonic(), _clock_time()
        self._store_failed = False
        self._fault_seen: float | None = None
        self._terminated: float | None = None
        self._warned: set[int] = set()
        self._wait_key: tuple[int, int, int] | None = None
        self._wait_place, self._wait_since = "set-up", _clock_time()
        self._wakeup, self._signals = socket.socketpair()
        self._messenger = threading.Thread(target=self._converse, name="hexi-roll", daemon=True)
        self._guard = threading.Thread(target=self._look, name="hexi-watch", daemon=True)
        self._previous_hook = sys.excepthook

    def start(self) -> None:
        """Begin to be heard of, and to watch."""
        sys.excepthook = self._on_uncaught
        set_fault_listener(self.tell)
        self._take_signals()
        self._messenger.start()
        self._guard.start()

    def close(self) -> None:
        """End without being missed."""
        if self._closed.is_set() or os.getpid() != self._process:
            return
        self._leave()
        sys.excepthook = self._previous_hook
        set_fault_listener(None)
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)

    def tell(self, message: str, code: int) -> None:
        """Tell all ranks why this one ends, and stay until they have heard it.

        Args:
            message: one line.
            code: the exit code.
        """
        if os.getpid() != self._process or self._closed.is_set():
            return
        self._claim()
        self._send(Fault(self._roll.rank, self._roll.host, message, code))

    def find_fault(self) -> Fault | None:
        """What another rank told, or who is gone; waits until that is known, at most some seconds."""
        deadline = time.monotonic() + self._search_s
        while True:
            fault = self._known_fault()
            if fault is not None or time.monotonic() > deadline:
                return fault
            time.sleep(0.1)

    def _known_fault(self) -> Fault | None:
        fault = self._roll.fault
        if fault is not None and fault.rank != self._roll.rank:
            return fault
        silent = list(self._roll.silent.values())
        if silent:
            first = silent[0]
            named = "; ".join(f"rank {one.rank} on {one.place}, since {one.since}" for one in silent[:8])
            named += f"; and {len(silent) - 8} more" if len(silent) > 8 else ""
            return Fault(first.rank, first.place, _gone(named, f"rank {first.rank}"), _LOST_PEER)
        if self._store_failed or time.monotonic() - self._answered > self._store_silent_s:
            return self._store_fault()
        return None

    def _store_fault(self) -> Fault:
        """The store is gone, and with it the rank or the agent that keeps it."""
        keeper = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        host = os.environ.get("MASTER_ADDR", "its host")
        named = f"{keeper} on host {host}, which keeps the job's store, since {self._answered_at}"
        return Fault(0, host, _gone(named, keeper), _LOST_PEER)

    # The messenger

    def _converse(self) -> None:
        """Keep the roll until the watch is closed or the store is gone."""
        try:
            self._roll.enter()
            while not self._closed.is_set():
                self._roll.beat()
                self._answered, self._answered_at = time.monotonic(), _clock_time()
                try:
                    fault = self._outbox.get(timeout=self._roll.beat_s)
                except queue.Empty:
                    continue
                if fault is not None:
                    self._roll.post(fault)
                    self._posted.set()
            self._roll.leave()
        except RuntimeError:  # torch.distributed's errors; the main thread meets them too, and says more
            self._store_failed = True

    def _leave(self) -> None:
        self._closed.set()
        self._outbox.put(None)
        self._messenger.join(timeout=self._store_silent_s)

    def _send(self, fault: Fault) -> None:
        """Post a fault, and stay until the others have heard it."""
        self._outbox.put(fault)
        if not self._store_failed:
            self._posted.wait(self._store_silent_s)
            # The store may end with this rank. The others ask it once in a beat.
            time.sleep(2 * self._roll.beat_s)

    # The guard

    def _look(self) -> None:
        """Look at what was heard, until the process ends."""
        while not self._closed.is_set():
            self._receive_signal()
            if self._last_words.locked():
                continue
            self._note_wait()
            fault, now = self._roll.fault, time.monotonic()
            if fault is not None:
                self._fault_seen = self._fault_seen or now
                if now - self._fault_seen > _GRACE_S:
                    self._end(fault, fault.code)
            if self._terminated is not None:
                known = self._known_fault()
                if known is not None:
                    self._end(known, known.code if known.code != _LOST_PEER else 128 + signal.SIGTERM)
                if now - self._terminated > self._search_s:  # nobody is missing: the job was ended
                    self._leave()
                    self._exit(128 + signal.SIGTERM)
            self._warn()

    def _receive_signal(self) -> None:
        """Wait for the next look, or for a signal."""
        ready, _, _ = select.select([self._signals], [], [], _LOOK_S)
        if ready and signal.SIGTERM in self._signals.recv(64) and self._owns_sigterm():
            self._terminated = self._terminated or time.monotonic()

    def _warn(self) -> None:
        """Tell of long silences, once each."""
        silent = {entry.rank: entry for entry in self._roll.silent.values() if entry.seconds > _WARN_S}
        for rank in silent.keys() - self._warned:
            entry = silent[rank]
            self._print("warning", f"rank {rank} on {entry.place} has not been heard of since {entry.since}")
        for rank in self._warned - self._roll.silent.keys():
            self._print("warning", f"rank {rank} is heard of again")
        self._warned = (self._warned & self._roll.silent.keys()) | silent.keys()

    def _note_wait(self) -> None:
        """Note where the main thread is, and since when it has not moved on."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return
        key = (id(frame), frame.f_lasti, waits_begun())
        if key != self._wait_key:
            self._wait_key, self._wait_since = key, _clock_time()
            self._wait_place = _place(frame)

    def _end(self, fault: Fault, code: int) -> None:
        """End the process for what happened on another rank."""
        if self._last_words.acquire(blocking=False):
            self._print("error", self._words(fault))
            self._send(fault)
            self._exit(code)

    def _words(self, fault: Fault) -> str:
        if fault.code != _LOST_PEER:  # a mistake of the user's: where the others were does not matter
            return f"rank {fault.rank} on host {fault.host}: {fault.message}"
        return f"{fault.message}. This rank was in {self._wait_place} since {self._wait_since}"

    def _print(self, kind: str, message: str) -> None:
        print(f"hexi: {kind}: [rank {self._roll.rank}] {message}", file=sys.stderr, flush=True)

    # What ends the main thread

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """`sys.excepthook`: say why, tell the others, and end with the exit code of all ranks."""
        if os.getpid() != self._process or not issubclass(kind, Exception):
            self._previous_hook(kind, error, trace)
            return
        if isinstance(error, HexiError):
            self._print("error", str(error))
            self.tell(str(error), error.exit_code)
            self._exit(error.exit_code)
        self._claim()
        fault = None
        if isinstance(error, RuntimeError):  # what torch.distributed raises where a peer is gone
            place = _place(next(frame for frame, _ in reversed(list(traceback.walk_tb(trace)))))
            if place != self._wait_place:
                self._wait_place, self._wait_since = place, _clock_time()
            fault = self.find_fault()
        if fault is None or fault.code == _LOST_PEER:
            self._previous_hook(kind, error, trace)
        if fault is None:
            rank, host = self._roll.rank, self._roll.host
            summary = f"{kind.__name__}: {(str(error).splitlines() or [''])[0][:300]}"
            fault = Fault(rank, host, f"rank {rank} on host {host} ended by {summary}", _LOST_PEER)
        else:
            self._print("error", self._words(fault))
        self._send(fault)
        self._exit(fault.code)

    def _claim(self) -> None:
        """Be the one that says why this rank ends; where the guard does already, wait for that end."""
        self._last_words.acquire()

    def _exit(self, code: int) -> None:
        """End at once: what runs at exit would wait for ranks that are gone."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _take_signals(self) -> None:
        """Hear of SIGTERM also while the main thread is in a collective, unless somebody else handles it."""
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
        os.register_at_fork(after_in_child=self._forget_signals)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """The guard acts on it: it is told by the wake-up socket before this runs."""

    def _owns_sigterm(self) -> bool:
        # Megatron's --exit-signal-handler takes it over: then a checkpoint is being saved.
        return signal.getsignal(signal.SIGTERM) == self._on_sigterm

    def _forget_signals(self) -> None:
        if self._owns_sigterm():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _clock_time() -> str:
    return datetime.now().strftime("%H:%M:%S")


def _gone(named: str, first: str) -> str:
    return (
        f"no longer heard of: {named}. Ended without a word, stopped, or cut off: look at the end of the log "
        f"of {first}, and whether its host runs and is reached"
    )


def _place(frame: FrameType | None) -> str:
    """Who in Megatron or here waits, by the innermost frame: torch and what merely calls it say little."""
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
    """Watch from now on until the process ends; a watch that is under way ends."""
    global _watch
    stop_watch()
    atexit.unregister(stop_watch)
    atexit.register(stop_watch)
    _watch = Watch(store, rank, world_size)
    _watch.start()


def stop_watch() -> None:
    """Watch no longer, and be missed by nobody."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None
