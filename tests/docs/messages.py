"""Every text in the package's source as a reader would meet it, with … for what is filled in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FILLED_IN = "…"
_LOGGED = re.compile(r"%(?:\.\d+)?[sdfr]")


def texts_of(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield _LOGGED.sub(FILLED_IN, node.value)
            elif isinstance(node, ast.JoinedStr):
                yield "".join(map(_part, node.values))


def _part(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else FILLED_IN
