"""The bridge to Ray as it is, to workers in which certain tokens are deadly."""

from __future__ import annotations

import os

from tests.server.fragile_actor import FragileActor
from tests.server.fragile_worker import HUNG
from tinsmith.server.on_ray import bridge

if __name__ == "__main__":
    bridge.WorkerActor = FragileActor  # type: ignore[misc]
    bridge.WORKER_ENVIRONMENT.update({name: os.environ[name] for name in [HUNG] if name in os.environ})
    bridge.main()
