"""The worker on Ray as it is, but half of the time may go into snapshots."""

from __future__ import annotations

from tinsmith.server.on_ray.actor import WorkerActor


class OftenWritingActor(WorkerActor):
    def _work(self) -> None:
        from tinsmith.server import live_models

        live_models.WRITING_SHARE = 0.5
        super()._work()
