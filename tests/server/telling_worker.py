"""A worker that only talks: it is ready, says how far a replay is, and goes on with that when it is woken."""

from __future__ import annotations

import sys

import msgspec

from tinsmith.server.messages import Message, Replay

TOTAL = 7


def tell(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    sys.stdin.buffer.readline()
    tell(Message(ready=True))
    for replayed in range(3, TOTAL + 1, 2):
        tell(Message(replay=Replay(model_id="m", replayed=replayed, total=TOTAL)))
        sys.stdin.buffer.read(1)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
