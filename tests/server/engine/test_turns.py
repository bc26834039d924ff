"""Whoever holds least is next, and an owner's own come in their order."""

from __future__ import annotations

from collections import Counter

from tinsmith.server.engine.turns import Turns


def turns_of(*items: str) -> Turns[str]:
    turns = Turns[str](lambda item: item[0])
    for item in items:
        turns.add(item)
    return turns


def test_of_one_owner_who_came_first_is_first() -> None:
    assert [*turns_of("a1", "a2", "a3").in_turn(Counter(b=7))] == ["a1", "a2", "a3"]


def test_owners_who_hold_as_much_take_turns() -> None:
    turns = turns_of("a1", "a2", "b1", "a3", "b2", "c1")
    assert [*turns.in_turn(Counter())] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert len(turns) == 6


def test_who_holds_less_catches_up_first() -> None:
    held = Counter(a=2)
    assert [*turns_of("a1", "a2", "b1", "b2", "b3", "b4").in_turn(held)] == ["b1", "b2", "a1", "b3", "a2", "b4"]
    assert held == Counter(a=4, b=4)


def test_what_was_seen_may_be_removed_meanwhile() -> None:
    turns = turns_of("a1", "a2", "b1", "b2")
    for item in turns.in_turn(Counter()):
        if item != "a2":
            turns.remove(item)
    assert [*turns] == ["a2"]
    assert [*turns.owners] == ["a"]


def test_of_equals_who_was_served_is_last() -> None:
    turns = turns_of("a1", "a2", "a3", "b1", "b2")
    served = []
    while turns:
        served.append(next(turns.in_turn(Counter())))
        turns.remove(served[-1])
    assert served == ["a1", "b1", "a2", "b2", "a3"]
