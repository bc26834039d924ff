"""The worker as it is, on a disk that takes no adapter as long as there is a certain file."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from tinsmith.server import worker_process
from tinsmith.server.engine import adapter_files

IS_FULL = "TINSMITH_TEST_DISK_IS_FULL"


def main() -> None:
    real = adapter_files.write_adapter

    def write(folder: Path, *rest: Any) -> None:
        if Path(os.environ[IS_FULL]).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(folder, *rest)

    adapter_files.write_adapter = write
    worker_process.main()


if __name__ == "__main__":
    main()
