"""The worker as it is, but half of the time may go into snapshots."""

from __future__ import annotations

from tinsmith.server import live_models, worker_process

if __name__ == "__main__":
    live_models.WRITING_SHARE = 0.5
    worker_process.main()
