"""A leader whose member was lost ends as the member did, though it sees a closed connection first.

A member ends with its leader, also if that is gone before they have met.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.end_to_end.serving import wait_until
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


def test_a_member_ends_with_a_leader_that_dies_before_they_meet() -> None:
    leader = """
import os, signal
from tinsmith.server.member_process_life import MembersHere
from tinsmith.server.messages import MemberSettings

life = MembersHere().begin(MemberSettings(
    base_model="m", folder="", device="cpu", dtype="float32", rank=1, size=2, host="127.0.0.1",
    meeting_host="127.0.0.1", meeting_port=1,
))
print(life.begun().process, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", leader], stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    assert ended.returncode == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{int(ended.stdout)}").exists(), SECONDS, "the member is left")
