"""Log lines: whole, one for each event, and nothing in them that could be taken for another line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.log_lines import logged
from tinsmith.errors import InvalidInputError
from tinsmith.server import logs

NASTY = "a\nb\r\nc\x1b[31m\x00\x7f\u2028d\u202ee\x85f\ud800"
FORGED = "x\n2026-01-01T00:00:00.000Z tinsmith.server CRITICAL all is lost owner=root"
log = logging.getLogger("tinsmith.server.test")

Written = Callable[[], list[str]]


@pytest.fixture(params=["text", "json"])
def written(request: pytest.FixtureRequest) -> Iterator[Written]:
    """The lines so far, in one format and then in the other."""
    with logged(request.param) as stream:
        yield lambda: stream.getvalue().splitlines()


def as_json(act: Callable[[], None], **constants: str) -> dict[str, Any]:
    with logged("json", **constants) as stream:
        act()
    (line,) = stream.getvalue().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(
    "text", [NASTY, FORGED, "%s %d", "\n" * 1_000_000], ids=["nasty", "forged", "percent", "very long"]
)
@pytest.mark.parametrize("style", ["text", "json"])
def test_no_text_from_outside_makes_a_second_line(style: logs.LogFormat, text: str) -> None:
    """Within the test, since pytest would listen otherwise, and cannot pass on what is no text."""
    with logged(style) as stream, logs.one_request():
        logs.about(model_id=text, owner=text)
        log.info("from outside: %s", text, extra={"request_id": text})
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert len(line) < 50_000


def test_values_of_fields_are_told_apart_from_fields() -> None:
    with logged("text") as stream:
        log.info("done", extra={"model_id": 'a" owner=root', "session_id": "s:1", "seconds": 0.5, "status": 200})
    assert stream.getvalue().endswith(' INFO done model_id="a\\" owner=root" session_id=s:1 seconds=0.5\n')


def test_a_line_for_programs_has_all_that_is_known() -> None:
    def act() -> None:
        with logs.one_request():
            logs.about(session_id="s", owner="ann", key_id=3)
            log.warning("slow: %d", 7, extra={"method": "GET", "seconds": 1.23456789})

    line = as_json(act, base_model="tiny")
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "tinsmith.server.test",
        "message": "slow: 7",
        "session_id": "s",
        "base_model": "tiny",
        "owner": "ann",
        "key_id": 3,
        "method": "GET",
        "seconds": 1.234568,
    }


def test_what_a_request_is_about_ends_with_it() -> None:
    with logs.one_request():
        logs.about(owner="ann")
    logs.about(owner="nobody asks")
    assert "owner" not in as_json(lambda: log.info("later"))


@pytest.mark.parametrize(
    "error",
    [InvalidInputError(FORGED, value=FORGED), KeyError(FORGED), UnicodeDecodeError("utf-8", b"x", 0, 1, FORGED)],
)
def test_errors_that_quote_what_they_met_are_named_without_it(written: Written, error: Exception) -> None:
    try:
        try:
            raise error
        except Exception as first:
            raise RuntimeError("the disk\nis gone") from first
    except RuntimeError:
        log.exception("failed")
    text = "\n".join(written())
    assert "all is lost" not in text
    assert type(error).__name__ in text
    assert "RuntimeError: the disk\\" in text
    assert "test_logs.py" in text
    assert text.count("Traceback") == 2, "those who look for faults look for this word"


def test_the_lines_of_a_traceback_are_marked() -> None:
    with logged("text") as stream:
        log.error("failed", exc_info=RuntimeError(FORGED))
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("ERROR failed")
    assert rest
    assert all(line.startswith("    | ") for line in rest)


def test_libraries_speak_of_trouble_only(written: Written) -> None:
    logging.getLogger("sqlalchemy.engine").info("SELECT 1")
    logging.getLogger("asyncio").debug("slow")
    assert written() == []


def test_a_process_that_ends_with_an_error_says_so_in_a_line_of_the_format() -> None:
    code = "from tinsmith.server import logs; logs.configure('json'); logs.log_what_ends_us(); 1 / 0"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["traceback"][-1] == "ZeroDivisionError: division by zero"
