"""A leader whose member was lost ends as the member did, though it sees a closed connection first."""

from __future__ import annotations

import signal
import threading

import pytest

from tinsmith.server import members as members_module
from tinsmith.server.member_lives import Begun, Ending, MemberLife, MemberLives
from tinsmith.server.members import Members
from tinsmith.server.messages import MemberSettings, WorkerSettings

KILLED = Ending(-signal.SIGKILL)
SETTINGS = WorkerSettings(base_model="m", folder="", database="", state="", device="cpu", train_workers=2)
SECONDS = 30.0


class Scripted(MemberLife, MemberLives):
    """A member that ends when the test says so."""

    host, are_here = "127.0.0.1", True

    def __init__(self) -> None:
        self.is_dead = threading.Event()

    def begin(self, settings: MemberSettings) -> MemberLife:
        return self

    def begun(self) -> Begun:
        return Begun("", 1)

    def ended(self) -> Ending:
        self.is_dead.wait()
        return KILLED

    def kill(self) -> None:
        self.is_dead.set()


class Heard:
    def __init__(self) -> None:
        self.began: list[tuple[int, Begun]] = []
        self.lost: list[tuple[int, Ending]] = []
        self.is_lost = threading.Event()

    def hear_begun(self, rank: int, begun: Begun) -> None:
        self.began.append((rank, begun))

    def hear_lost(self, rank: int, ending: Ending) -> None:
        self.lost.append((rank, ending))
        self.is_lost.set()


def test_after_an_error_the_ending_of_a_lost_member_has_the_last_word() -> None:
    life, heard = Scripted(), Heard()
    members = Members(SETTINGS, life, heard.hear_begun, heard.hear_lost)
    failing = threading.Thread(target=members.await_loss, daemon=True)
    failing.start()
    life.is_dead.set()
    assert heard.is_lost.wait(SECONDS)
    assert heard.lost == [(1, KILLED)]
    assert heard.began == [(1, Begun("", 1))]
    failing.join(0.2)
    assert failing.is_alive(), "the leader would end in its own way, and jobs be judged by that"


def test_an_error_that_no_member_is_part_of_goes_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "LOSS_SECONDS", 0.01)
    life, heard = Scripted(), Heard()
    Members(SETTINGS, life, heard.hear_begun, heard.hear_lost).await_loss()
    assert heard.lost == []
