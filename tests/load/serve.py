"""`tinsmith` as it is, except that it keeps for seconds what it would keep for days: so many as `KEEP_SECONDS` says.

The cache of the sampler is small enough to be full after a few minutes: until then memory grows, as it should.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from tinsmith.cli import main
from tinsmith.server import keeper
from tinsmith.server import main as server
from tinsmith.server.config import ServerConfig

KV_TOKENS = 8192
_SERVE = server.serve


def _serve_briefly(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    seconds = int(os.environ["KEEP_SECONDS"])
    kept = {"result_ttl_seconds": seconds, "idle_seconds": seconds, "audit_days": 0}
    brief = msgspec.structs.replace(config, kv_tokens=KV_TOKENS, **kept)
    _SERVE(brief, on_ready)


if __name__ == "__main__":
    server.serve = _serve_briefly
    keeper.WORKER_MODULE = "tests.load.worker"
    main()
