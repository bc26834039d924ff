"""A job that kills its worker is found and given up, without harm to its neighbours.

Jobs are counted when they are begun (`store.jobs.begin`), so whoever has a count was running when a worker died. Such
suspects run first and in ever smaller company, in the end each alone. Who was only a neighbour finishes then; the cause
is alone when it kills once more, and is not tried again.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Iterable

from tinsmith.server.store.records import Job

COMPANY = (sys.maxsize, 16, 1)
"""How many may run together, by how often they were begun before; later tries are as the last one."""

HELD_UP = 75
"""In place of an exit status: the database was out of reach or the disk full, and no job is to blame."""

UNSEEN = 76
"""In place of an exit status: the worker was on another machine, and nobody there could tell how it ended."""

_UNLIMITED = 2**31 - 1  # the largest number that every database compares with a count

MAX_CRASHES = 3
MAX_KILLS = 10
"""SIGKILL may come from anybody and be no job's fault, but it is also what a job gets that fills the memory."""


def together(waiting: Iterable[Job], running: Collection[Job] = ()) -> list[Job]:
    """Those of the waiting jobs that may run now, beside those that do: the most suspected ones, and all alike.

    Of each stream the earliest are taken, so that a model's jobs stay in order.
    """
    ordered = sorted(waiting, key=lambda job: (-_suspicion(job), job.model_id or "", job.seq_id))
    if not ordered:
        return []
    suspicion = _suspicion(ordered[0])
    if any(_suspicion(job) != suspicion for job in running):
        return []
    alike = [job for job in ordered if _suspicion(job) == suspicion]
    return alike[: max(0, COMPANY[suspicion] - len(running))]


def max_attempts(status: int | None) -> int:
    """How often a job may be begun when the last worker ended with this status; `None` if nobody saw it end."""
    if status == HELD_UP:
        return _UNLIMITED
    return MAX_KILLS if status in (None, UNSEEN, -signal.SIGKILL) else MAX_CRASHES


def epitaph(status: int | None) -> str:
    """What the client of a job that was given up is told."""
    return (
        f"This operation was given up: each of the {max_attempts(status)} times or more that it was run, the worker "
        f"process died, the last time {ending(status)}. Other operations are not affected. Send less at once (fewer or "
        "shorter examples), or see the server's log for the cause."
    )


def ending(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "together with the server"
    if status == UNSEEN:
        return "unseen, on the cluster; its memory may have run out, or its machine be gone"
    if status >= 0:
        return f"with exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else "unknown"
    hint = ", as the system does when memory runs out" if status == -signal.SIGKILL else ""
    return f"by signal {-status} ({name}){hint}"


def _suspicion(job: Job) -> int:
    return min(job.attempts, len(COMPANY) - 1)
