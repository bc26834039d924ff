"""Schemathesis against the server's own description of itself: `python -m tests.fuzz.openapi SCHEMATHESIS`."""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.over_http import real_server
from tests.fuzz.world import KEY

CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.openapi", description=__doc__)
    parser.add_argument("schemathesis", type=Path, help="the program")
    parser.add_argument("--examples", type=int, default=100, help="how many for each endpoint (default 100)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="at random by default")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, real_server(Path(folder)) as server:
        workers = server.workers()
        ended = subprocess.run(
            [
                asked.schemathesis.absolute(),
                "run",
                f"{server.url}/openapi.json",
                f"--header=X-API-Key: {KEY}",
                f"--checks={CHECKS}",
                f"--max-examples={asked.examples}",
                f"--seed={asked.seed}",
                "--continue-on-failure",
                "--request-timeout=60",
                "--exclude-operation-id=revoke_apikey_me",  # the key is needed afterwards
            ],
            cwd=folder,
            check=False,
        )
        survived = server.workers() == workers and "Traceback" not in server.log()
        sys.stdout.write(f"seed {asked.seed}; the server {'lives' if survived else 'had a fault:' + server.log()}\n")
    return ended.returncode or not survived


if __name__ == "__main__":
    sys.exit(main())
