"""`tinsmith` as it is, with workers in which certain tokens are deadly."""

from __future__ import annotations

from tinsmith.cli import main
from tinsmith.server import keeper

if __name__ == "__main__":
    keeper.WORKER_MODULE = "tests.server.fragile_worker"
    main()
