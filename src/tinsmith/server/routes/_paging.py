"""Which part of a list is asked for."""

from __future__ import annotations

from typing import NamedTuple, TypeVar, get_args

from tinsmith.server.routes._call import Call, status_error
from tinsmith.server.store.records import AccessScope, Page
from tinsmith.types import Cursor

T = TypeVar("T")
MAX_LIMIT = 1000
_MAX_DIGITS = 20


class Asked(NamedTuple):
    limit: int
    offset: int

    def cursor(self, page: Page[T]) -> Cursor:
        return Cursor(offset=self.offset, limit=self.limit, total_count=page.total)


def page_of(call: Call, *, limit: int) -> Asked:
    return Asked(number_in(call, "limit", limit, 1, MAX_LIMIT), number_in(call, "offset", 0, 0, 2**62))


def scope_of(call: Call) -> AccessScope:
    scope = call.request.query_params.get("access_scope", "owned")
    if scope not in get_args(AccessScope):
        raise status_error(422, f"access_scope is {scope!r}; it must be one of {', '.join(get_args(AccessScope))}.")
    return "owned" if scope == "owned" else "accessible"


def number_in(call: Call, name: str, default: int, lowest: int, highest: int) -> int:
    text = call.request.query_params.get(name, str(default))
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else -1
    if not lowest <= number <= highest:
        raise status_error(422, f"{name} is {text[:40]!r}; it must be a whole number from {lowest} to {highest}.")
    return number
