"""Find a free port for the rendezvous of a job's ranks."""

from __future__ import annotations

import random
import socket

#: Below those that Linux hands out to whoever asks for any (`ip_local_port_range`, from 32768): between
#: choosing a port and listening at it, sockets of other jobs cannot take one of these.
_PORTS = range(20000, 32768)


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    choose = random.SystemRandom()  # seeds of a test or a job must not give two jobs the same
    while True:
        port = choose.choice(_PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
