"""`tinsmith` as it is, with workers that write snapshots often (`worker.py`)."""

from __future__ import annotations

from tinsmith.cli import main
from tinsmith.server import keeper

if __name__ == "__main__":
    keeper.WORKER_MODULE = "tests.chaos.worker"
    main()
