"""A short soak: clients of every kind come and go, and then nothing of them is left."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from random import Random

import pytest

from tests.load.soak import Soak, bound_of
from tests.load.trend import Bound, Point, growth
from tests.load.vitals import of_process


def test_everything_that_clients_leave_behind_goes_away(tmp_path: Path) -> None:
    """A session may not end in silence while its client lives, who sends a heartbeat every ten seconds."""
    soak = Soak(tmp_path / "soak", keep_seconds=2, session_seconds=12)
    soak.run(minutes=0.15, pause=0.05)
    assert soak.complaints == []
    assert soak.looks[-1][1]["state: rows of sessions"] > 0


def noisy(slope: float, level: float = 100.0, spikes: int = 20) -> list[Point]:
    random = Random(1)
    points = [Point(second, level + slope * second + random.gauss(0, 3)) for second in range(400)]
    for place in random.sample(range(400), spikes):
        points[place] = Point(place, points[place].value + 500)
    return points


def test_growth_is_seen_through_noise_and_spikes() -> None:
    assert growth(noisy(0.05)) == pytest.approx(20, abs=2)
    assert growth(noisy(0.0)) == pytest.approx(0, abs=2)
    assert growth([Point(0.0, 1.0)]) == 0


def test_a_bound_is_a_number_or_a_share_whichever_is_more() -> None:
    assert Bound(8, 0.02).allows(growth=9.9, level=500)
    assert not Bound(8, 0.02).allows(growth=8.1, level=100)


def test_everything_of_ours_that_is_measured_has_a_bound() -> None:
    names = ["API: memory", "worker: threads", "client tinsmith: tasks", "state: rows of jobs", "state: database"]
    assert all(bound_of(name) is not None for name in names)
    assert bound_of("client tinker: memory") is None
    assert bound_of("state: rows of keys") is None
    with pytest.raises(KeyError):
        bound_of("API: something new")


def test_a_socket_whose_peer_has_gone_is_noticed() -> None:
    before = of_process(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        assert of_process(os.getpid())["sockets"] == before["sockets"] + 3
        far.close()
        assert near.recv(1) == b""
        assert of_process(os.getpid())["sockets nobody closes"] == before["sockets nobody closes"] + 1
        near.close()
    assert of_process(os.getpid())["sockets nobody closes"] == before["sockets nobody closes"]
