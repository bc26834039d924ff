"""The command line."""

from __future__ import annotations


def main() -> None:
    """The entry point, which also works where the command line's own packages are missing: it says so."""
    try:
        from tinsmith.cli.main import main as group
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        raise SystemExit("The tinsmith command needs the package 'click': pip install 'tinsmith[cli]'.") from None
    group()
