"""What is listed and shown: columns for people, keys for programs, and no more requests than that takes."""

from __future__ import annotations

import os
import pty
import re
import termios
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import tinsmith
from tests.cli.conftest import Stock
from tests.cli.program import KEY, SECONDS, InProcess, Program
from tests.support.server import FakeServer, Reply
from tinsmith.cli import shown

RUN_KEYS = {
    "training_run_id",
    "base_model",
    "model_owner",
    "is_lora",
    "corrupted",
    "lora_rank",
    "last_request_time",
    "last_checkpoint",
    "last_sampler_checkpoint",
    "user_metadata",
}
CHECKPOINT_KEYS = {
    "checkpoint_id",
    "checkpoint_type",
    "time",
    "tinker_path",
    "size_bytes",
    "public",
    "user_metadata",
    "expires_at",
}


def asked(server: FakeServer) -> list[str]:
    """The requests after the one that asks for the server's flags."""
    first, *others = [f"{request.method} {request.endpoint}" for request in server.requests]
    assert first == "POST client/config"
    return others


def headings(table: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith("┃"))
    return [cell.strip() for cell in line.strip("┃").split("┃")]


def a_run(number: int) -> dict[str, Any]:
    return {
        "training_run_id": f"run-{number}",
        "base_model": "tiny/model-1",
        "model_owner": "me",
        "is_lora": True,
        "lora_rank": 8,
        "last_request_time": "2030-01-01T00:00:00Z",
    }


def a_page(first: int, count: int, total: int) -> Reply:
    cursor = {"offset": first, "limit": count, "total_count": total}
    return Reply(json={"training_runs": [a_run(first + number) for number in range(count)], "cursor": cursor})


# Runs


def test_runs_are_a_table_for_people(cli: InProcess, stock: Stock, server: FakeServer) -> None:
    done = cli("run", "list")
    assert done.code == 0
    assert headings(done.out) == ["Run ID", "Base Model", "LoRA", "Last Update", "Status"]
    assert [cell.strip() for cell in done.out.splitlines()[4].strip("│").split("│")] == [
        stock.run_id,
        "tiny/model-1",
        "Rank 8",
        "2030-01-01",
        "OK",
    ]
    assert asked(server) == ["GET training_runs"]


def test_runs_are_json_for_programs(cli: InProcess, stock: Stock) -> None:
    document = cli("--format", "json", "run", "list").json()
    (run,) = document.pop("runs")
    assert document == {"total": 1, "shown": 1}
    assert run.keys() == RUN_KEYS
    assert run["last_request_time"].startswith("2030-01-01T")
    assert run["last_request_time"].endswith("Z")
    assert run["last_checkpoint"].keys() == CHECKPOINT_KEYS


def test_columns_can_be_chosen(cli: InProcess, stock: Stock) -> None:
    names = "id,owner,status,checkpoint,checkpoint_time"
    assert headings(cli("run", "list", "-c", names).out) == [
        "Run ID",
        "Owner",
        "Status",
        "Last Checkpoint",
        "Checkpoint Time",
    ]


@pytest.mark.parametrize("columns", ["id,colour", ","])
def test_a_column_that_does_not_exist_is_wrong_usage(cli: InProcess, server: FakeServer, columns: str) -> None:
    done = cli("run", "list", "--columns", columns)
    assert done.code == 2
    assert "The columns are: id, model, owner, lora" in done.err
    assert server.requests == []


@pytest.mark.parametrize(
    ("limit", "pages"),
    [
        ("5", [(0, 5)]),
        ("100", [(0, 100)]),
        ("150", [(0, 100), (100, 50)]),
        ("0", [(0, 100), (100, 100), (200, 100)]),
    ],
)
def test_a_listing_asks_for_what_it_shows_and_no_more(
    cli: InProcess, server: FakeServer, limit: str, pages: list[tuple[int, int]]
) -> None:
    server.script("training_runs", *(a_page(first, min(size, 250 - first), 250) for first, size in pages))
    document = cli("-f", "json", "run", "list", "--limit", limit).json()
    wanted = int(limit) or 250
    assert [run["training_run_id"] for run in document["runs"]] == [f"run-{number}" for number in range(wanted)]
    assert (document["total"], document["shown"]) == (250, wanted)
    queries = [request.query for request in server.received("training_runs")]
    assert [(int(query["offset"]), int(query["limit"])) for query in queries] == pages


def test_the_title_tells_how_many_are_not_shown(cli: InProcess, server: FakeServer) -> None:
    server.script("training_runs", a_page(0, 20, 57))
    assert cli("run", "list").out.startswith("20 training runs of 57 (--limit 0 shows all)\n")


def test_a_listing_that_shrinks_while_it_is_read_comes_to_an_end(cli: InProcess, server: FakeServer) -> None:
    server.script("training_runs", a_page(0, 100, 150), a_page(100, 0, 100))
    assert cli("-f", "json", "run", "list", "--limit", "0").json()["shown"] == 100


def test_a_listing_of_several_pages_shows_a_person_how_far_it_is(program: Program, server: FakeServer) -> None:
    server.script("training_runs", a_page(0, 100, 150), a_page(100, 50, 150))
    with program.at_a_terminal("-f", "json", "run", "list", "--limit", "0") as terminal:
        done = terminal.end()
    assert "Fetching training runs" in done.err
    assert done.json()["shown"] == 150, "the bar is not part of the output"


def test_one_run_is_shown_with_its_checkpoints_and_metadata(cli: InProcess, stock: Stock) -> None:
    table = cli("run", "info", stock.run_id).out
    for text in ("Yes (Rank 8)", stock.training, stock.sampler, "note", "first"):
        assert text in table
    assert cli("-f", "json", "run", "info", stock.run_id).json().keys() == RUN_KEYS


# Checkpoints


def test_checkpoints_are_listed_for_people_and_programs(cli: InProcess, stock: Stock, server: FakeServer) -> None:
    table = cli("checkpoint", "list").out
    assert headings(table) == ["Checkpoint ID", "Type", "Size", "Public", "Created", "Expires", "Path"]
    assert "Never" in table
    assert "64.0 KiB" in table
    document = cli("-f", "json", "checkpoint", "list", "--limit", "2").json()
    assert [one["tinker_path"] for one in document["checkpoints"]] == [stock.exported, stock.sampler]
    assert (document["total"], document["shown"]) == (3, 2)
    assert document["checkpoints"][0].keys() == CHECKPOINT_KEYS


def test_the_checkpoints_of_a_run_are_all_shown_unless_a_limit_is_given(cli: InProcess, stock: Stock) -> None:
    document = cli("-f", "json", "checkpoint", "list", "--run-id", stock.run_id).json()
    assert document["run_id"] == stock.run_id
    assert (document["total"], document["shown"]) == (3, 3)
    cut = cli("-f", "json", "checkpoint", "list", "--run-id", stock.run_id, "--limit", "1").json()
    assert (cut["total"], cut["shown"], len(cut["checkpoints"])) == (3, 1, 1)


def test_one_checkpoint_is_shown_with_what_is_known_of_its_run(
    cli: InProcess, stock: Stock, server: FakeServer
) -> None:
    document = cli("-f", "json", "checkpoint", "info", stock.training).json()
    assert document.keys() == {*CHECKPOINT_KEYS, "is_lora", "lora_rank"}
    assert sorted(asked(server)) == [
        f"GET training_runs/{stock.run_id}",
        f"GET training_runs/{stock.run_id}/checkpoints",
    ]
    assert "Training Run ID" in cli("checkpoint", "info", stock.training).out


def test_a_checkpoint_that_is_not_there_is_an_error_with_the_next_step(
    cli: InProcess, stock: Stock, server: FakeServer
) -> None:
    done = cli("checkpoint", "info", f"tinker://{stock.run_id}/weights/nix")
    assert done.code == 1
    assert done.err.startswith("Error: Resource not found\n")
    assert f"tinsmith checkpoint list --run-id {stock.run_id}" in done.err
    done = cli("--base-url", server.url, "checkpoint", "info", f"tinker://{stock.run_id}/weights/nix")
    assert f"tinsmith --base-url {server.url} checkpoint list --run-id {stock.run_id}" in done.err


def test_a_text_that_is_no_checkpoint_path_is_wrong_usage(cli: InProcess, server: FakeServer) -> None:
    done = cli("checkpoint", "info", "somewhere/else")
    assert done.code == 2
    assert "tinker://<run>/<kind>/<name>" in done.err
    assert server.requests == []


# Models


def test_models_are_listed_and_filtered_without_regard_to_case(cli: InProcess, server: FakeServer) -> None:
    assert headings(cli("model", "list").out) == ["Model", "Max Context", "Trainable", "Sampleable"]
    found = cli("-f", "json", "model", "list", "qWEN").json()["models"]
    assert [model["model_name"] for model in found] == ["Qwen/Qwen3-8B"]
    assert found[0].keys() == {"model_name", "max_context_length", "trainable", "sampleable"}


def test_no_model_found_is_an_error_that_names_those_there_are(cli: InProcess) -> None:
    done = cli("model", "list", "zebra")
    assert done.code == 1
    assert "'zebra'" in done.err
    assert "There are: tiny/model-1, tiny/model-2, Qwen/Qwen3-8B" in done.err


# Values


def test_what_others_have_named_cannot_steer_the_terminal(cli: InProcess, server: FakeServer) -> None:
    named = {**a_run(1), "base_model": "evil\x1b[2J\rname"}
    server.script("training_runs/run-1", Reply(json=named), Reply(404, json={"detail": "evil\x1b[2J\rname"}))
    table, complaint = cli("run", "info", "run-1").out, cli("run", "info", "run-1").err
    for text in (table, complaint):
        assert "evil" in text
        assert not {"\x1b", "\r"} & set(text)


NOW = datetime(2030, 6, 15, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("ahead", "text"),
    [
        (timedelta(0), "just now"),
        (timedelta(seconds=-59), "just now"),
        (timedelta(seconds=-60), "1 minute ago"),
        (timedelta(hours=-2, minutes=-59), "2 hours ago"),
        (timedelta(days=3), "in 3 days"),
        (timedelta(seconds=30), "in a moment"),
        (timedelta(days=-30), "2030-05-16"),
    ],
)
def test_times_are_told_in_words_as_long_as_they_are_near(ahead: timedelta, text: str) -> None:
    assert shown.when(NOW + ahead, NOW) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "N/A"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 1024**3, "5.0 GiB"), (1 << 52, "4096.0 TiB")],
)
def test_sizes_are_told_in_units_of_1024(num_bytes: int | None, text: str) -> None:
    assert shown.size(num_bytes) == text


# A narrow terminal


def on_columns(width: int, program: Program, *arguments: str) -> list[str]:
    """The lines that a command prints there."""
    ours, theirs = pty.openpty()
    try:
        termios.tcsetwinsize(theirs, (24, width))
        with program.start(*arguments, stdout=theirs) as process:
            os.close(theirs)
            seen = b""
            with suppress(OSError):  # how Linux says that nobody is at the other end
                while piece := os.read(ours, 65536):
                    seen += piece
            assert process.wait(SECONDS) == 0
    finally:
        os.close(ours)
    return re.sub(r"\x1b\[[\d;]*m", "", seen.decode()).splitlines()


def test_a_path_is_not_folded_on_a_narrow_terminal(program: Program, stock: Stock, server: FakeServer) -> None:
    with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client("tiny/model-1")
        path = trainer.save_state("the-one-that-we-shall-want-to-find-again").result().path
    listed = on_columns(80, program, "checkpoint", "list")
    assert {line.split()[-1] for line in listed if line.startswith("Path")} == {
        stock.training,
        stock.sampler,
        stock.exported,
        path,
    }
    assert any(line.endswith(f" {path}") for line in on_columns(80, program, "checkpoint", "info", path))


@pytest.mark.parametrize("width", [60, 30])
def test_a_table_that_does_not_fit_is_told_in_lines(program: Program, stock: Stock, width: int) -> None:
    assert on_columns(width, program, "run", "list") == [
        "1 training run",
        f"Run ID       {stock.run_id}",
        "Base Model   tiny/model-1",
        "LoRA         Rank 8",
        "Last Update  2030-01-01",
        "Status       OK",
    ]
    assert headings("\n".join(on_columns(120, program, "run", "list")))[0] == "Run ID"


def test_the_lines_of_several_rows_are_kept_apart(program: Program, server: FakeServer) -> None:
    server.script("training_runs", a_page(0, 2, 2))
    lines = on_columns(30, program, "run", "list")[1:]
    assert lines.index("") == len(lines) // 2
    assert lines[lines.index("") + 1] == "Run ID       run-1"
