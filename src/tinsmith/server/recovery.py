"""What a dead worker had claimed goes back into the queue, in its old place; what was tried too often is given up."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tinsmith.server import audit
from tinsmith.server.store import Store
from tinsmith.server.store.records import Failed
from tinsmith.server.suspects import epitaph, max_attempts


class Recovered(NamedTuple):
    over: list[str]
    """Jobs that are finished by it: those nobody wants any more, and those that were given up."""
    num_given_up: int


def put_back(
    store: Store, base_model: str, status: int | None, *, place: str = "", forgiven: Collection[str] = ()
) -> Recovered:
    """`status` is how the worker ended, `place` which of the base model's workers it was; see `Jobs.requeue`."""
    over = store.jobs.requeue(
        base_model, max_attempts=max_attempts(status), error=epitaph(status), forgiven=forgiven, place=place
    )
    known = store.results.statuses(over).values()
    given_up = [each for each in known if isinstance(each.outcome, Failed)]
    for event in filter(None, map(audit.given_up, given_up)):
        store.audit.record(event)
    return Recovered(over, len(given_up))
