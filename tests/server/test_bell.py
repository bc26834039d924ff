"""What wakes a worker, and what tells it to stop."""

from __future__ import annotations

import os
import socket
import struct

from tinsmith.server.bell import Bell


def test_it_is_rung_from_outside_and_by_threads_of_the_worker() -> None:
    outside, ringing = os.pipe()
    inner, ringing_inside = os.pipe()
    bell = Bell(outside, inner)
    assert not bell.rang()
    for ring in (ringing, ringing_inside):
        os.write(ring, b"..")
        assert bell.rang(within_seconds=60)
        assert not bell.rang(), "several rings before it is asked are one"
    os.write(ringing_inside, b".")
    os.close(ringing)
    assert not bell.rang()
    assert bell.is_closed


def test_a_connection_that_breaks_is_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    with ours:
        bell = Bell(ours.fileno())
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no farewell
        theirs.close()
        assert not bell.rang(within_seconds=60)
        assert bell.is_closed
