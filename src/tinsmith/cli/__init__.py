"""The command line."""

from __future__ import annotations

INTERRUPTED = 130
"""What shells report for a program that Ctrl-C ended."""


def main() -> None:
    """The entry point, which also works where the command line's own packages are missing: it says so."""
    try:
        from tinsmith.cli.main import run

        code = run()
    except KeyboardInterrupt:  # while modules are loaded, or an error is being shown
        code = INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        raise SystemExit(
            "The tinsmith command needs the package 'click': pip install 'tinsmith[cli]' "
            "(from a checkout: pip install '.[cli]')."
        ) from None
    raise SystemExit(code)
