"""`python -m tests.chaos --kills N --seed S [--database postgres | --ray]`: the campaign, and its figures."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from random import Random

from tests.chaos.campaign import Campaign

ALONE_SHARE = 0.25


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-chaos-"))
    say = partial(print, flush=True)
    campaign = Campaign(folder, Random(options.seed), say)
    campaign.prepare()
    if options.ray:
        parts = [campaign.on_ray(options.kills, options.trainers)]
    elif options.database == "postgres":
        parts = [campaign.company(options.kills, on_postgres=True)]
    else:
        alone = round(options.kills * ALONE_SHARE)
        parts = [campaign.alone(alone), campaign.company(options.kills - alone)]
    if any(part.complaints for part in parts):
        say(f"The ledgers and the servers' logs are in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many processes or groups of them are killed")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments; other things are random too")
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster, with PostgreSQL and a bucket")
    parser.add_argument("--trainers", type=int, default=1, help="processes that share the training, with --ray")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
