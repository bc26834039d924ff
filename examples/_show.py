"""What the examples print, and their common command line. Nothing here knows about training."""

import argparse
import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Curve:
    """One line for each step of a run, with a bar as long as the figure is large."""

    def __init__(self, label: str, steps: int, full: float | None = None) -> None:
        self.values: list[float] = []
        self._label, self._steps, self._full = label, steps, full
        self._started = time.monotonic()

    def add(self, value: float) -> None:
        """Without a `full` scale, the first value is given two thirds of the width."""
        self.values.append(value)
        self._full = self._full or 1.5 * value
        done, seconds = len(self.values), time.monotonic() - self._started
        left = seconds / done * (self._steps - done)
        row = f"{done:3}/{self._steps}  {self._label} {value:6.2f} {bar(value / self._full)} "
        print(f"{row}{seconds:4.0f} s, {left:.0f} s left", flush=True)


def bar(share: float, width: int = 40) -> str:
    """A share of the width, an eighth of a character fine."""
    whole, eighths = divmod(round(min(max(share, 0.0), 1.0) * width * 8), 8)
    return ("█" * whole + " ▏▎▍▌▋▊▉"[eighths] * (eighths > 0)).ljust(width)


def table(*rows: Sequence[str]) -> None:
    """The first row is the header; the first column is flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["─" * width for width in widths]
    print()
    for first, *others in [rows[0], rule, *rows[1:]]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))


def command(name: str) -> str:
    """How to call what is installed beside this Python: by its path, unless the shell finds it by its name."""
    path = Path(sys.executable).with_name(name)
    return name if shutil.which(name) == str(path) else os.path.relpath(path)


def run(main: Callable[..., Any]) -> None:
    """Call `main` with what the command line says: an option for each of its keyword parameters."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    for name, parameter in inspect.signature(main).parameters.items():
        default = parameter.default
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, help="default: %(default)r"
        )
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
