"""JSON that can be wrong: trees of builtins in which a part may be raw text, or an object with a name twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple, TypeAlias

from tests.fuzz import values

Path: TypeAlias = tuple[str | int, ...]


class Raw(NamedTuple):
    """Written as it is."""

    text: str


class Twice(NamedTuple):
    """An object with one more pair, whose name it has already."""

    fields: dict[str, Any]
    name: str
    again: Any


def encode(tree: Any) -> bytes:
    return _text(tree).encode("utf-8", "surrogatepass")


def _text(tree: Any) -> str:
    match tree:
        case Raw(text):
            return text
        case Twice(fields, name, again):
            return f"{_text(fields)[:-1]},{_text(name)}:{_text(again)}}}"
        case dict():
            return "{" + ",".join(f"{_text(str(key))}:{_text(value)}" for key, value in tree.items()) + "}"
        case list():
            return "[" + ",".join(map(_text, tree)) + "]"
    return json.dumps(tree, ensure_ascii=False)


def paths(tree: Any, here: Path = ()) -> list[Path]:
    """Where every part of a tree is; a few of a long list stand for all."""
    found = [here]
    if isinstance(tree, dict):
        parts = list(tree.items())
    else:
        parts = list(enumerate(tree))[:4] if isinstance(tree, list) else []
    for name, part in parts:
        found += paths(part, (*here, name))
    return found


def changed(tree: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy with one part changed."""
    if not path:
        return change(tree)
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = changed(copy[path[0]], path[1:], change)
    return copy


def mutate(tree: Any, random: Random) -> Any:
    """A copy with one thing wrong, or at least unusual."""
    path = random.choice(paths(tree))
    return changed(tree, path, lambda part: _bent(part, random))


def _bent(part: Any, random: Random) -> Any:
    if isinstance(part, dict) and random.random() < 0.8:
        return _bent_object(part, random)
    if isinstance(part, list) and random.random() < 0.7:
        return _bent_list(part, random)
    if isinstance(part, str) and random.random() < 0.6:
        return values.text(random, part)
    if isinstance(part, int | float) and random.random() < 0.6:
        return Raw(values.number(random, part))
    return anything(random)


def _bent_object(fields: dict[str, Any], random: Random) -> Any:
    names = list(fields)
    match random.randrange(5):
        case 0 if names:
            return {name: fields[name] for name in names if name != random.choice(names)}
        case 1 if names:
            name = random.choice(names)
            return Twice(fields, name, random.choice([fields[name], anything(random)]))
        case 2 if names:
            old = random.choice(names)
            return {values.text(random, old) if name == old else name: value for name, value in fields.items()}
        case 3:
            return {**fields, values.text(random, "extra"): anything(random)}
    return {**fields, **{f"field{index}": index for index in range(random.choice([1, 50, 3000]))}}


def _bent_list(items: list[Any], random: Random) -> Any:
    match random.randrange(4):
        case 0:
            return []
        case 1:
            return items[: random.randrange(len(items) + 1)]
        case 2:
            return (items or [0]) * random.choice([2, 10, 300])
    return [*items, anything(random)]


def anything(random: Random) -> Any:
    """Any JSON value, mostly of the wrong kind."""
    match random.randrange(8):
        case 0:
            return None
        case 1:
            return random.choice([True, False])
        case 2 | 3:
            return Raw(values.number(random, 1))
        case 4 | 5:
            return values.text(random, "text")
        case 6:
            return random.choice([[], {}, [[]], {"": {}}, [None], {"type": "sample"}, [{"a": 1}] * 20])
    return nested(random.choice([10, 100, 900, 5000]), random)


def nested(depth: int, random: Random) -> Raw:
    opening, closing = random.choice([("[", "]"), ('{"a":', "}"), ('[{"type":', "}]")])
    return Raw(opening * depth + random.choice(["1", ""]) + closing * random.choice([depth, depth - 1]))
