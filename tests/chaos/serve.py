"""`tinsmith` as it is, but models are written down after half a second of work, so that kills meet snapshots too."""

from __future__ import annotations

import sys

from tinsmith.cli import main
from tinsmith.server import keeper
from tinsmith.server.on_ray import lives

if __name__ == "__main__":
    keeper.WORKER_MODULE = "tests.chaos.worker"
    lives.BRIDGE_MODULE = "tests.chaos.bridge"
    sys.argv.append("--replay-bound=0.5")
    main()
