"""Ports for what a test starts."""

import random
import socket


def free_port() -> int:
    """One that nobody gets who asks for none: the kernel's own choice, from 32768 up, another test's connection may hold a moment later."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
