"""The worker on Ray as it is, with an engine in which certain tokens are deadly."""

from __future__ import annotations

from tests.server.fragile_worker import make_fragile
from tinsmith.server import suspects
from tinsmith.server.on_ray.actor import WorkerActor


class FragileActor(WorkerActor):
    def _work(self) -> None:
        make_fragile()
        suspects.MAX_KILLS = suspects.MAX_CRASHES  # as in the server, `tests/end_to_end/fragile.py`
        super()._work()
