"""The worker as it is, on a disk that has no room as long as there is a certain file."""

from __future__ import annotations

import os
from pathlib import Path

from tinsmith.server import worker_process
from tinsmith.server.store import reserve

IS_FULL = "TINSMITH_TEST_DISK_IS_FULL"


def main() -> None:
    real = reserve.free_bytes

    def free_bytes(folder: Path) -> int:
        return 0 if Path(os.environ[IS_FULL]).exists() else real(folder)

    reserve.free_bytes = free_bytes
    worker_process.main()


if __name__ == "__main__":
    main()
