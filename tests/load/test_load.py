"""A small load: everybody is served, and neither training nor sampling waits for the other to end."""

from __future__ import annotations

import pytest

from tests.load.campaign import Group, Load, Seen
from tests.load.figures import Figures, jain, percentile
from tests.load.records import Record

GROUPS = {
    "http": Group("http", samplers=30),
    "http-models": Group("http", models=4),
    "tinsmith": Group("tinsmith", samplers=10),
    "tinsmith-models": Group("tinsmith", models=2),
}
SAMPLES = 10


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    load = Load(tmp_path_factory.mktemp("load"), GROUPS, samples=SAMPLES, keys=4)
    return load.run(alone_seconds=1.0)


def done(seen: Seen, *, samples: bool) -> list[Record]:
    found = [record for record in seen.crowd if record.kind == "done" and (record.what == "sample") == samples]
    return sorted(found, key=lambda record: record.time)


def test_every_client_gets_every_result(seen: Seen) -> None:
    assert seen.complaints == []
    assert len(done(seen, samples=True)) == SAMPLES * sum(group.samplers for group in GROUPS.values())
    assert seen.state["rows of sessions"] == sum(sum(group[1:3]) for group in GROUPS.values()) + 4


def test_training_goes_on_while_samples_wait_and_samples_while_models_train(seen: Seen) -> None:
    samples, steps = done(seen, samples=True), done(seen, samples=False)
    in_between = [step for step in steps if samples[0].time < step.time < samples[-1].time]
    assert {step.what for step in in_between} == {step.what for step in steps}
    assert len({step.what for step in steps}) == sum(group.models for group in GROUPS.values())
    assert steps[0].time < samples[len(samples) // 2].time < steps[-1].time


def test_keys_are_served_alike(seen: Seen) -> None:
    samples = done(seen, samples=True)
    first_half = [record.owner for record in samples[: len(samples) // 2]]
    assert jain([first_half.count(owner) for owner in {record.owner for record in samples}]) > 0.8


def test_nothing_that_clients_held_is_left(seen: Seen) -> None:
    assert max(vitals["API: sockets nobody closes"] for _, vitals in seen.looks) <= sum(
        group.samplers + group.models for group in GROUPS.values()
    )
    assert {vitals["API: processes"] for _, vitals in seen.looks} == {1}


def test_figures_say_which_bound_is_broken() -> None:
    alone = [Record("acknowledged", "a", "asample", 0.0, 0.01)] * 100
    slow = [Record("acknowledged", "a", "asample", 20.0, 0.2)] * 100
    crowd = [Record("queued", "a", "samples", 10.0, 0.0)]
    crowd += [Record("done", owner, "sample", 11.0 + 2 * number, 0.0) for number, owner in enumerate("aabbaabbaa")]
    crowd += [Record("done", "a", model, 12.0 + number, 0.0) for number, model in enumerate(["m1"] * 9 + ["m2"])]
    looks = [
        (0.0, {"API: memory": 80.0, "worker: memory": 300.0}),
        (1.0, {"API: memory": 900.0, "worker: memory": 310.0}),
    ]
    seen = Seen(alone=alone, probe=slow, crowd=crowd, looks=looks)
    broken = {figure.name for figure in Figures(seen, samples=11, models=3).all() if not figure.is_kept}
    assert broken == {
        "samples done",
        "p99 under load, times alone",
        "fairness among models (Jain)",
        "operations of the slowest model, times the fastest's",
        "longest time of a model between two results, s",
        "memory of the API, MiB: idle, most, end",
    }


def test_percentiles_and_fairness() -> None:
    assert percentile(range(100), 0.99) == 99
    assert percentile([], 0.5) == 0.0
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([3, 0, 0]) == pytest.approx(1 / 3)
