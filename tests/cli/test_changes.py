"""What changes something: publishing, expiry, and deleting, which asks first and tells the truth afterwards."""

from __future__ import annotations

import io
import signal

import pytest

from tests.cli.conftest import Stock
from tests.cli.program import InProcess, Program
from tests.support.server import FOREVER, FakeServer, Hang, Reply


class Person(io.StringIO):
    """Standard input with somebody who answers."""

    def isatty(self) -> bool:
        return True


def remaining(cli: InProcess) -> set[str]:
    return {one["tinker_path"] for one in cli("-f", "json", "checkpoint", "list").json()["checkpoints"]}


def test_publishing_and_expiry_are_silent_when_they_work(cli: InProcess, stock: Stock) -> None:
    for arguments in (
        ("publish", stock.training),
        ("set-ttl", stock.training, "--ttl", "7200"),
        ("unpublish", stock.training),
        ("set-ttl", stock.sampler, "--remove"),
    ):
        assert cli("checkpoint", *arguments) == (0, "", "")
    training, sampler = (
        cli("-f", "json", "checkpoint", "info", path).json() for path in (stock.training, stock.sampler)
    )
    assert (training["public"], sampler["expires_at"]) == (False, None)
    assert training["expires_at"].startswith("2030-01-01T02:")


@pytest.mark.parametrize("arguments", [(), ("--ttl", "7200", "--remove")])
def test_an_expiry_is_set_or_removed(cli: InProcess, stock: Stock, arguments: tuple[str, ...]) -> None:
    done = cli("checkpoint", "set-ttl", stock.training, *arguments)
    assert done.code == 2
    assert "either --ttl SECONDS or --remove" in done.err


def test_publishing_what_is_public_says_how_things_stand(cli: InProcess, stock: Stock, server: FakeServer) -> None:
    cli("checkpoint", "publish", stock.training)
    done = cli("checkpoint", "publish", stock.training)
    assert done.code == 1
    assert done.err.startswith("Error: API error (status 409)\n")
    assert "is already public" in done.err
    assert len(server.received("publish")) == 2, "a conflict is not tried again"


# Deleting


def test_checkpoints_are_deleted_by_their_paths(cli: InProcess, stock: Stock) -> None:
    done = cli("checkpoint", "delete", stock.training, stock.sampler, stock.training, "--yes")
    assert done == (0, "Deleted 2 checkpoints.\n", "")
    assert remaining(cli) == {stock.exported}


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ((), set()),
        (("--type", "weights"), {"sampler", "exported"}),
        (("--type", "sampler"), {"training", "exported"}),
        (("--before", "2030-01-01"), {"training", "sampler", "exported"}),
        (("--after", "2030-01-01", "--before", "2030-01-01T00:00:05Z"), {"sampler", "exported"}),
    ],
)
def test_of_a_run_those_are_deleted_that_the_filters_choose(
    cli: InProcess, stock: Stock, filters: tuple[str, ...], kept: set[str]
) -> None:
    document = cli("-f", "json", "checkpoint", "delete", "--run-id", stock.run_id, *filters, "-y").json()
    assert document == {"deleted_count": 3 - len(kept), "failed": []}
    assert remaining(cli) == {getattr(stock, name) for name in kept}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "either the paths of checkpoints or --run-id"),
        (("tinker://r/weights/a", "--run-id", "r"), "either the paths of checkpoints or --run-id"),
        (("tinker://r/weights/a", "--type", "weights"), "give --run-id"),
        (("--run-id", "r", "--before", "yesterday"), "2026-01-31T08:00:00Z"),
    ],
)
def test_contradictory_ways_to_choose_are_wrong_usage(
    cli: InProcess, server: FakeServer, arguments: tuple[str, ...], complaint: str
) -> None:
    done = cli("checkpoint", "delete", *arguments, "--yes")
    assert done.code == 2
    assert complaint in done.err
    assert server.requests == []


def test_without_a_terminal_nothing_is_deleted_unless_yes_is_said(
    program: Program, stock: Stock, server: FakeServer
) -> None:
    done = program("checkpoint", "delete", stock.training)
    assert done.code == 2
    assert "add --yes" in done.err
    assert server.requests == []


def test_a_person_is_told_what_goes_and_asked(
    cli: InProcess, stock: Stock, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Person("n\n"))
    refused = cli("checkpoint", "delete", stock.training, stock.exported)
    assert refused.code == 1
    assert refused.out == "", "the question is not part of the output"
    assert f"2 checkpoints (64.8 KiB) will be deleted:\n  {stock.training}\n  {stock.exported}\n" in refused.err
    assert "Nothing was done" in refused.err
    monkeypatch.setattr("sys.stdin", Person("y\n"))
    assert cli("checkpoint", "delete", stock.training).code == 0
    assert remaining(cli) == {stock.sampler, stock.exported}


def test_what_could_not_be_deleted_is_named_and_the_exit_code_says_so(
    cli: InProcess, stock: Stock, server: FakeServer
) -> None:
    server.script(
        lambda request: request.method == "DELETE" and "one" in request.path, Reply(403, json={"detail": "no"})
    )
    done = cli("-f", "json", "checkpoint", "delete", "--run-id", stock.run_id, "--yes")
    assert done.code == 1
    assert '"deleted_count": 2' in done.out
    assert f'"tinker_path": "{stock.training}"' in done.out
    assert "Error: 1 checkpoint could not be deleted\n" in done.err
    assert "Permission denied" in done.err


def test_an_interrupted_deletion_tells_how_far_it_came(program: Program, stock: Stock, server: FakeServer) -> None:
    server.script(lambda request: request.method == "DELETE" and "one" in request.path, Hang(), times=FOREVER)
    with program.start("checkpoint", "delete", stock.exported, stock.training, "--yes") as process:
        server.wait_for(lambda request: request.method == "DELETE", 2, timeout=60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "of 2 checkpoints were deleted" in err


def test_ctrl_c_at_the_question_deletes_nothing(program: Program, stock: Stock, server: FakeServer) -> None:
    with program.at_a_terminal("checkpoint", "delete", stock.training) as terminal:
        terminal.wait_for("Delete for ever?")
        terminal.interrupt()
        done = terminal.end()
    assert done.code == 130
    assert server.received(lambda request: request.method == "DELETE") == []
