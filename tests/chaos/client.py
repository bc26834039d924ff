"""A process full of clients: `python -m tests.chaos.client PACKAGE URL FOLDER ROUNDS PROGRAM...`

Each program runs in a thread and with a client of its own, round after round: so many of them, or with 0 until there is
a file `FOLDER/stop`. The package `http` is none at all, for the program `by_hand`. Nothing in here knows that the
server may die.
"""

from __future__ import annotations

import importlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from tests.chaos.by_hand import by_hand
from tests.chaos.ledger import Ledger
from tests.chaos.programs import PROGRAMS, Run
from tests.end_to_end.scripts import opened

OneRound = Callable[[Ledger], None]
STOP = "stop"


@contextmanager
def prepared(package: str, url: str, program: str) -> Iterator[OneRound]:
    if package == "http":
        yield partial(by_hand, url)
        return
    tinker = importlib.import_module(package)
    with opened(tinker, url) as client:
        yield lambda ledger: PROGRAMS[program](Run(tinker, client, ledger))


def repeat(package: str, url: str, folder: Path, rounds: int, program: str) -> None:
    ledger = Ledger(folder / f"{program}.{package}.ledger")
    ledger.note("round", number=1)
    try:
        with prepared(package, url, program) as one_round:
            for number in count(2):
                one_round(ledger)
                ledger.note("over")
                if number > rounds > 0 or (folder / STOP).exists():
                    break
                ledger.note("round", number=number)
    except Exception:  # noqa: BLE001 - the verdict reports it
        ledger.note("failed", error=traceback.format_exc())
    ledger.close()


def main(package: str, url: str, folder: str, rounds: str, *programs: str) -> None:
    warnings.simplefilter("ignore")
    threads = [
        threading.Thread(target=repeat, args=(package, url, Path(folder), int(rounds), program)) for program in programs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
