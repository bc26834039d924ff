"""`tinsmith` as it is, with workers in which certain tokens are deadly."""

from __future__ import annotations

from tinsmith.cli import main
from tinsmith.server import keeper, suspects
from tinsmith.server.on_ray import lives

if __name__ == "__main__":
    keeper.WORKER_MODULE = "tests.server.fragile_worker"
    lives.BRIDGE_MODULE = "tests.server.fragile_bridge"
    suspects.MAX_KILLS = suspects.MAX_CRASHES  # on a cluster any end may have been a kill, and ten take minutes
    main()
