"""Downloads: whole or not at all under their own name, and after any interruption they go on where they stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Stock
from tests.cli.program import InProcess, Program
from tests.support.server import FOREVER, Drop, FakeServer, HalfBody, Hang, Reply

MODEL = "adapter_model.safetensors"
CONTENT = bytes(range(256)) * 256
CUT = HalfBody(CONTENT[:30_000], announced=len(CONTENT))


def folder_of(path: str, home: Path) -> Path:
    return home / path.removeprefix("tinker://").replace("/", "_")


def ranges(server: FakeServer) -> list[str | None]:
    return [request.headers.get("range") for request in server.received(MODEL)]


def test_an_export_is_fetched_into_a_folder_named_after_it(cli: InProcess, stock: Stock, home: Path) -> None:
    document = cli("-f", "json", "checkpoint", "download", stock.exported, "-o", home / "models").json()
    folder = folder_of(stock.exported, home / "models")
    assert document == {
        "checkpoint_path": stock.exported,
        "destination": str(folder),
        "file_size_bytes": len(CONTENT) + len(b'{"peft_type": "LORA"}'),
    }
    assert (folder / MODEL).read_bytes() == CONTENT
    assert [path.name for path in (home / "models").iterdir()] == [folder.name], "nothing is left of the way there"


def test_a_training_checkpoint_is_exported_for_the_time_of_the_download(
    cli: InProcess, stock: Stock, server: FakeServer, home: Path
) -> None:
    done = cli("checkpoint", "download", stock.training)
    assert done.code == 0
    assert "64.0 KiB" in done.out
    assert (folder_of(stock.training, home) / MODEL).read_bytes() == CONTENT
    assert len(server.received("external_weights/download")) == 1, "the export was not deleted"


def test_sampler_weights_cannot_be_fetched(cli: InProcess, stock: Stock, home: Path) -> None:
    done = cli("checkpoint", "download", stock.sampler)
    assert done.code == 1
    assert "Download a training checkpoint" in done.err
    assert list(home.iterdir()) == []


def test_a_folder_that_is_there_stays_as_it_is_unless_force_is_used(cli: InProcess, stock: Stock, home: Path) -> None:
    folder = folder_of(stock.exported, home)
    folder.mkdir()
    (folder / "precious").touch()
    done = cli("checkpoint", "download", stock.exported)
    assert done.code == 1
    assert "Use --force" in done.err
    assert cli("checkpoint", "download", stock.exported, "--force").code == 0
    assert not (folder / "precious").exists()
    assert (folder / MODEL).read_bytes() == CONTENT


def test_force_keeps_the_old_folder_until_the_new_one_is_complete(
    cli: InProcess, stock: Stock, server: FakeServer, home: Path
) -> None:
    folder = folder_of(stock.exported, home)
    folder.mkdir()
    (folder / "precious").touch()
    server.script(MODEL, Reply(404, body=b"gone"))
    assert cli("checkpoint", "download", stock.exported, "--force").code == 1
    assert (folder / "precious").exists()


@pytest.mark.parametrize("fault", [Drop(), Reply(503, body=b"slow down"), CUT], ids=["dropped", "busy", "cut"])
def test_a_fault_on_the_way_is_made_good_for(
    cli: InProcess, stock: Stock, server: FakeServer, home: Path, fault: Reply
) -> None:
    server.script(MODEL, fault)
    assert cli("checkpoint", "download", stock.exported).code == 0
    assert (folder_of(stock.exported, home) / MODEL).read_bytes() == CONTENT


def test_after_ctrl_c_the_same_command_goes_on_where_it_stopped(
    program: Program, stock: Stock, server: FakeServer, home: Path
) -> None:
    server.script(MODEL, CUT, Hang())
    with program.start("checkpoint", "download", stock.exported) as process:
        server.wait_for(MODEL, 2, timeout=60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "the same command goes on from there" in err
    assert "Traceback" not in err
    folder = folder_of(stock.exported, home)
    assert not folder.exists(), "what has its own name is whole"
    done = program("checkpoint", "download", stock.exported)
    assert done.code == 0
    assert "Going on with what is in" in done.err
    assert ranges(server) == [None, "bytes=30000-", "bytes=30000-"]
    assert (folder / MODEL).read_bytes() == CONTENT


def test_a_full_disk_is_told_and_can_be_made_good_for(cli: InProcess, stock: Stock, home: Path) -> None:
    folder = folder_of(stock.exported, home)
    begun = folder.with_name(folder.name + ".part")
    begun.mkdir()
    (begun / ".tinker_path").write_text(stock.exported)
    os.symlink("/dev/full", begun / f"{MODEL}.part")
    done = cli("checkpoint", "download", stock.exported)
    assert done.code == 1
    assert "Error: No space left on device" in done.err
    assert "Make room and run the command again." in done.err
    (begun / f"{MODEL}.part").unlink()
    assert cli("checkpoint", "download", stock.exported).code == 0
    assert (folder / MODEL).read_bytes() == CONTENT


def test_a_bar_is_shown_at_a_terminal_and_nowhere_else(program: Program, stock: Stock, server: FakeServer) -> None:
    server.script(MODEL, CUT, Hang(), times=FOREVER)
    with program.at_a_terminal("--format", "json", "checkpoint", "download", stock.exported) as terminal:
        terminal.wait_for(f"{MODEL} (2 of 2)")
        server.clear_script()
        server.cut_connections()
        done = terminal.end()
    assert done.json()["checkpoint_path"] == stock.exported
    quiet = program("checkpoint", "download", stock.exported, "--force")
    assert (quiet.code, quiet.err) == (0, "")


# Traces


def test_the_trace_of_a_session_becomes_a_file(cli: InProcess, stock: Stock, server: FakeServer, home: Path) -> None:
    done = cli("-f", "json", "session", "export-trace", stock.session_id)
    file = home / f"{stock.session_id}.pftrace"
    assert done.json() == {"session_id": stock.session_id, "destination": file.name, "file_size_bytes": 21}
    assert file.read_text() == f"trace of {stock.session_id}"
    assert len(server.received("trace_export")) == 1
    assert "Saved to" in cli("session", "export-trace", stock.session_id, "--output", file).out
    assert [path.name for path in home.iterdir()] == [file.name]


def test_a_trace_that_cannot_be_fetched_leaves_the_old_file_alone(
    cli: InProcess, stock: Stock, server: FakeServer, home: Path
) -> None:
    (home / "mine").write_text("old")
    server.script(f"trace/{stock.session_id}", Reply(404, body=b"gone"))
    assert cli("session", "export-trace", stock.session_id, "-o", "mine").code == 1
    assert (home / "mine").read_text() == "old"


def test_the_link_alone_is_printed_if_so_wanted(cli: InProcess, stock: Stock, server: FakeServer) -> None:
    link = f"{server.url}/files/trace/{stock.session_id}"
    assert cli("session", "export-trace", stock.session_id, "--url-only").out == f"{link}\n"
    document = cli("-f", "json", "session", "export-trace", stock.session_id, "--url-only").json()
    assert document == {"session_id": stock.session_id, "url": link}
