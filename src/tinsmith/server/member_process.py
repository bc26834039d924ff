"""The process that a member of a training group lives in.

It is told the id of its leader's process, reads one line of settings, loads the base model, meets its leader and
computes shares of batches until the leader lets it go. It says nothing but its log, and ends with its leader.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from functools import partial

import msgspec

from tinsmith.server import logs
from tinsmith.server.engine.channels import Channel, Group, LostPeerError, find_meeting
from tinsmith.server.engine.engine import Engine, choose_threads
from tinsmith.server.engine.group_member import serve
from tinsmith.server.engine.shard_group import Seat, shards_for
from tinsmith.server.messages import MemberSettings
from tinsmith.server.priority import give_way
from tinsmith.server.soundness import check_engine, try_engine

log = logging.getLogger("tinsmith.server.member_process")  # which has another name when it is started

LEADER = 0
LOOK_AGAIN_SECONDS = 1


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # both may reach the whole group, and the leader decides
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=MemberSettings)
    logs.configure(settings.log_format, settings.log_level, base_model=settings.base_model)
    logs.log_what_ends_us()
    _end_with(int(sys.argv[1]))
    try:
        run(settings)
    except LostPeerError as lost:
        log.warning("%s", lost)
        sys.exit(1)


def _end_with(parent: int) -> None:
    """Where GPUs gather shards nobody hears of a lost process, and all wait for it.

    The parent may be gone already: loading torch takes seconds.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_AGAIN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def run(settings: MemberSettings) -> None:
    meeting = find_meeting(settings.meeting_host, settings.meeting_port, seconds=settings.start_seconds)
    give_way(settings.device)
    shards = shards_for(
        settings.shard_base,
        Seat(meeting, settings.rank, settings.size, settings.host, settings.backend),
        settings.folder,
        settings.device,
        settings.dtype,
        train_tokens=settings.train_token_budget,
        kv_tokens=0,  # the leader samples
        seconds=settings.stall_seconds,
    )
    engine = Engine.open(
        settings.folder,
        device=settings.device,
        dtype=settings.dtype,
        train_token_budget=settings.train_token_budget,
        deterministic=settings.deterministic,
        shards=shards,
    )
    choose_threads(engine.model, settings.sharers)
    try_engine(engine)
    group = Group(
        meeting, settings.rank, settings.size, settings.host, settings.backend, seconds=settings.start_seconds
    )
    # With shards no process can try its engine alone; one that is lost shows when it is asked for its shards.
    serve(engine, Channel(group, LEADER), partial(check_engine, engine) if shards is None else lambda: None)


if __name__ == "__main__":
    main()
