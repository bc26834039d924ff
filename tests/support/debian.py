"""Programs that tests need and PyPI does not have, from Debian's packages."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

_LOCK = Path(tempfile.gettempdir()) / "tinsmith-tests-apt.lock"


def install(package: str) -> None:
    """One at a time: apt gives up where two test processes would install something."""
    with FileLock(_LOCK):
        subprocess.run(["apt-get", "update"], check=True, capture_output=True)
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", package], check=True)
