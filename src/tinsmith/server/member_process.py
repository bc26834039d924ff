"""The process that a member of a training group lives in.

It reads one line of settings, loads the base model, meets its leader and computes shares of batches until the leader
lets it go. It says nothing but its log, and ends with its leader.
"""

from __future__ import annotations

import logging
import signal
import sys
from functools import partial

import msgspec

from tinsmith.server import logs
from tinsmith.server.engine.channels import Channel, Group, LostPeerError, find_meeting
from tinsmith.server.engine.engine import Engine, choose_threads
from tinsmith.server.engine.group_member import serve
from tinsmith.server.messages import MemberSettings
from tinsmith.server.priority import give_way
from tinsmith.server.soundness import check_engine, try_engine

log = logging.getLogger("tinsmith.server.member_process")  # which has another name when it is started

LEADER = 0


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # both may reach the whole group, and the leader decides
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=MemberSettings)
    logs.configure(settings.log_format, settings.log_level, base_model=settings.base_model)
    logs.log_what_ends_us()
    try:
        run(settings)
    except LostPeerError as lost:
        log.warning("%s", lost)
        sys.exit(1)


def run(settings: MemberSettings) -> None:
    meeting = find_meeting(settings.meeting_host, settings.meeting_port, seconds=settings.start_seconds)
    give_way(settings.device)
    engine = Engine.open(
        settings.folder,
        device=settings.device,
        dtype=settings.dtype,
        train_token_budget=settings.train_token_budget,
        deterministic=settings.deterministic,
    )
    choose_threads(engine.model, settings.size)
    try_engine(engine)
    group = Group(
        meeting, settings.rank, settings.size, settings.host, settings.backend, seconds=settings.start_seconds
    )
    serve(engine, Channel(group, LEADER), partial(check_engine, engine))


if __name__ == "__main__":
    main()
