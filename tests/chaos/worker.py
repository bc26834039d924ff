"""The worker as it is, but a model is written down after half a second of work, so that kills meet snapshots too."""

from __future__ import annotations

from tinsmith.server import live_models, worker_process

if __name__ == "__main__":
    live_models.SNAPSHOT_SECONDS = 0.5
    live_models.WRITING_SHARE = 0.5
    worker_process.main()
