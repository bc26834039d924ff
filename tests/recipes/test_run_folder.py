"""The folder of a run: what it says after every kind of end."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tinsmith.errors import ConfigError, InvalidInputError
from tinsmith.recipes.run_folder import RunFolder, RunState

SETTINGS = {"rank": 8, "model": "tiny"}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    return folder


def saved(folder: RunFolder, step: int) -> RunState:
    state = folder.open(SETTINGS, restart=False)
    for number in range(1, step + 3):
        folder.add_metrics({"step": number, "loss": 1 / number})
    state = msgspec.structs.replace(state, step=step, state_path=f"tinker://r/weights/{step}")
    folder.write(state)
    return state


def steps(folder: RunFolder) -> list[int]:
    return [record["step"] for record in folder.recorded()]


def test_a_run_goes_on_at_its_last_saved_step_without_what_was_measured_later(folder: RunFolder) -> None:
    state = saved(folder, step=3)
    with folder.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    assert steps(folder) == [1, 2, 3, 4, 5], "half a line is none"
    assert folder.open(SETTINGS, restart=False) == state
    assert steps(folder) == [1, 2, 3]
    folder.add_metrics({"step": 4})
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_run_that_saved_nothing_begins_anew_with_any_settings(folder: RunFolder) -> None:
    first = saved(folder, step=0)
    again = folder.open({"rank": 16}, restart=False)
    assert again.settings == {"rank": 16}
    assert again.run_id != first.run_id
    assert steps(folder) == []


def test_other_settings_are_refused_with_what_differs(folder: RunFolder) -> None:
    saved(folder, step=3)
    with pytest.raises(InvalidInputError) as refused:
        folder.open({"rank": 16, "model": "tiny"}, restart=False)
    assert "  rank: 8 then, 16 now\n" in str(refused.value)
    assert "model" not in str(refused.value)
    assert "--restart, or choose another --output" in str(refused.value)
    assert steps(folder) == [1, 2, 3, 4, 5], "what is refused changes nothing"
    assert folder.open({"rank": 16}, restart=True).step == 0
    assert steps(folder) == []


def test_a_folder_of_others_is_left_alone(folder: RunFolder) -> None:
    folder.metrics.write_text("theirs\n")
    with pytest.raises(ConfigError, match="no run of ours"):
        folder.open(SETTINGS, restart=False)
    assert folder.metrics.read_text() == "theirs\n"


def test_a_damaged_state_is_told(folder: RunFolder) -> None:
    saved(folder, step=3)
    (folder.path / "state.json").write_text('{"settings": ')
    with pytest.raises(ConfigError, match=r"state\.json cannot be read .* Begin anew with --restart"):
        folder.open(SETTINGS, restart=False)


def test_one_process_at_a_time(folder: RunFolder) -> None:
    other = RunFolder(folder.path)
    with folder.held(), pytest.raises(ConfigError, match="Another process trains into"), other.held():
        pass
    with other.held():
        pass
