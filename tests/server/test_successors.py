"""A worker that was given up and is alive, and its successor: only one of them works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.workbench import Workbench, hold_up


def test_a_worker_whose_bell_is_gone_takes_nothing_new_after_its_step(
    tmp_path: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor is at work already: on a cluster a process may be taken for dead that is only stopped."""
    alone = Workbench(tmp_path_factory.mktemp("alone"), tiny_folder)
    with alone.worker():
        model = alone.create("s:train:0")
        expected = alone.losses(alone.train(model, range(1, 8)))

    old, new = Workbench(tmp_path, tiny_folder), Workbench(tmp_path, tiny_folder)
    with old.worker() as end:
        model = old.create("s:train:0")
        done = old.train(model, range(1, 5))
        old.result(f"{model}:4")
        reached, go_on = hold_up(monkeypatch, old.engine, "forward_backward")
        fifth = old.data(model, 5, first=5)
        assert reached.wait(60)
        end()
        with new.worker():
            new.result(fifth)
            sixth = old.step(model, 6)  # nobody is rung for
            go_on.set()
            new.result(sixth)
            seventh = new.data(model, 7, first=7)
            found = new.losses([*done, fifth, seventh])
    assert found == pytest.approx(expected, abs=1e-5)


def test_two_who_train_in_one_place_never_work_at_once(
    tmp_path: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ray takes a node for dead that is out of its reach alone: the worker there hears nothing, and works on."""
    alone = Workbench(tmp_path_factory.mktemp("alone"), tiny_folder)
    with alone.worker():
        expected = alone.losses(alone.train(alone.create("s:train:0"), range(1, 8)))
    old, new = Workbench(tmp_path, tiny_folder), Workbench(tmp_path, tiny_folder)
    with old.worker():
        model = old.create("s:train:0")
        jobs = old.train(model, range(1, 5))
        old.result(f"{model}:4")
        with new.worker():
            jobs.append(new.data(model, 5, first=5))
            new.result(jobs[-1])
            old.result(old.step(model, 6))  # which rings for the old one alone
            jobs.append(new.data(model, 7, first=7))
            new.result(jobs[-1])
    assert new.losses(jobs) == pytest.approx(expected, abs=1e-5)
