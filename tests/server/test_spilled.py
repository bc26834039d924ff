"""Files of sampler weights: whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from tinsmith.server.spilled import SpilledWeights

SAMPLER = "0b7c0d0e-1111-2222-3333-444455556666:sample:3"


def test_a_file_is_found_by_its_sampler_and_removed(tmp_path: Path) -> None:
    spilled = SpilledWeights(tmp_path / "samplers")
    assert spilled.sampler_ids() == []
    with spilled.writing(SAMPLER) as file:
        file.write_bytes(b"weights")
    assert spilled.path(SAMPLER).read_bytes() == b"weights"
    assert spilled.sampler_ids() == [SAMPLER]
    spilled.remove(SAMPLER)
    spilled.remove(SAMPLER)
    assert spilled.sampler_ids() == []


def test_a_file_has_its_name_on_the_disk_before_anybody_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled, real, flushed = SpilledWeights(tmp_path), os.fsync, []

    def fsync(descriptor: int) -> None:
        real(descriptor)
        flushed.append((os.fstat(descriptor).st_ino, spilled.path(SAMPLER).exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with spilled.writing(SAMPLER) as file:
        file.write_bytes(b"weights")
    assert flushed == [(spilled.path(SAMPLER).stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_a_file_that_was_not_finished_is_never_found(tmp_path: Path) -> None:
    spilled = SpilledWeights(tmp_path)
    with suppress(RuntimeError), spilled.writing(SAMPLER) as file:
        file.write_bytes(b"hal")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f".unfinished-{spilled.path(SAMPLER).name}").write_bytes(b"hal")  # as a killed process leaves it
    assert spilled.sampler_ids() == []
    spilled.tidy()
    assert list(tmp_path.iterdir()) == []
