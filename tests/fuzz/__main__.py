"""The full campaign. `--seed` and `--only` repeat one input of it."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.fuzz import full
from tests.fuzz.campaign import Campaign
from tests.server.postgres import Postgres


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many without a network (default 100,000)")
    parser.add_argument("--real", type=int, default=10_000, help="how many to a real server (default 10,000)")
    parser.add_argument("--torn", type=int, default=1_000, help="how many that are not even HTTP (default 1,000)")
    parser.add_argument("--postgres", action="store_true", help="with PostgreSQL behind the app in this process")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="at random by default")
    parser.add_argument("--only", type=int, help="the number of one input to try alone")
    return parser.parse_args()


def _chosen(asked: argparse.Namespace, count: int) -> range:
    return range(count) if asked.only is None else range(asked.only, asked.only + 1)


def _report(title: str, running: Coroutine[Any, Any, Campaign]) -> bool:
    campaign = asyncio.run(running)
    sys.stdout.write(f"{title}: {campaign.report()}\n")
    return campaign.is_clean


def main() -> int:
    asked = _arguments()
    sys.stdout.write(f"seed {asked.seed}\n")
    clean = True
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if asked.inputs:
            database = stack.enter_context(Postgres()).new_database() if asked.postgres else ""
            inputs = _chosen(asked, asked.inputs)
            clean &= _report("in this process", full.direct(folder / "direct", asked.seed, inputs, database))
        if asked.real:
            inputs = _chosen(asked, asked.real)
            clean &= _report("over HTTP", full.real(folder / "real", asked.seed, inputs, asked.torn))
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
