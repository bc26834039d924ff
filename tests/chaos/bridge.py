"""The bridge to Ray as it is, to workers that write models down often."""

from __future__ import annotations

from tests.chaos.actor import OftenWritingActor
from tinsmith.server.on_ray import bridge

if __name__ == "__main__":
    bridge.WorkerActor = OftenWritingActor  # type: ignore[misc]
    bridge.main()
