"""The worker as it is, but models that nobody uses leave its memory after `KEEP_SECONDS` instead of ten minutes."""

from __future__ import annotations

import os

from tinsmith.server import live_models, worker_process

if __name__ == "__main__":
    live_models.IDLE_SECONDS = float(os.environ["KEEP_SECONDS"])
    worker_process.main()
