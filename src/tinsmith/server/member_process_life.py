"""Members of a training group in processes below their leader's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from tinsmith.server.member_lives import Begun, Ending, MemberLife, MemberLives
from tinsmith.server.messages import MemberSettings

MEMBER_MODULE = "tinsmith.server.member_process"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class MembersHere(MemberLives):
    host = "127.0.0.1"
    are_here = True

    def begin(self, settings: MemberSettings) -> MemberLife:
        return ProcessMember(settings)


class ProcessMember(MemberLife):
    def __init__(self, settings: MemberSettings) -> None:
        # Standard output is the worker's own, on which it talks to the server.
        self._process = subprocess.Popen(
            [sys.executable, "-m", MEMBER_MODULE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env={**os.environ, **_gpu_of(settings)},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self._process.stdin.close()

    def begun(self) -> Begun:
        return Begun("", self._process.pid)

    def ended(self) -> Ending:
        return Ending(self._process.wait())

    def kill(self) -> None:
        self._process.kill()


def _gpu_of(settings: MemberSettings) -> Mapping[str, str]:
    """One of its own; the leader takes the first."""
    if settings.backend == "gloo":
        return {}
    visible = os.environ.get(_VISIBLE)
    return {_VISIBLE: visible.split(",")[settings.rank] if visible else str(settings.rank)}
