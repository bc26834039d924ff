"""The log of a server on Ray has one form, whatever Ray itself has to say."""

from __future__ import annotations

import json
import subprocess
import sys

TALKATIVE = """
import logging
from tinsmith.server import logs
from tinsmith.server.on_ray.bridge import let_ray_log
logs.configure("json")
let_ray_log()
print("\\x1b[33m(raylet)\\x1b[0m The node is dead.\\n    [state-dump] NodeManager")
logging.getLogger("ray._private.worker").warning("A worker was killed.")
logging.getLogger("ray._private.worker").info("Connecting to the cluster.")
"""


def test_what_ray_prints_and_logs_are_lines_for_programs() -> None:
    done = subprocess.run([sys.executable, "-c", TALKATIVE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["level"], line["message"]) for line in said] == [
        ("warning", "Ray says: (raylet) The node is dead. [state-dump] NodeManager"),
        ("warning", "A worker was killed."),
    ]
