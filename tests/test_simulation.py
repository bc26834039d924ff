"""The simulation of many GPUs keeps its books: nothing is lost or busier than it can be, and a seed says it all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "bench"
GPUS, TENANTS = 8, 24


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import simulate

    monkeypatch.setattr(simulate, "WARM_UP", 5.0)
    monkeypatch.setattr(simulate, "HORIZON", 40.0)
    return simulate


def setups(simulate: ModuleType) -> Iterator[tuple[object, float]]:
    """Each with little to do and with too much."""
    return itertools.product((simulate.ONE_SERVER, simulate.SPREAD), (0.5, 3.0))


def test_every_job_ends_exactly_once(simulate: ModuleType) -> None:
    for setup, load in setups(simulate):
        simulation = simulate.Simulation(GPUS, simulate.draw_tenants(TENANTS, 7), setup, 7, load)
        simulation.run()
        assert simulation.ended <= simulation.submitted
        assert len(simulation.open) == simulation.submitted - simulation.ended
        simulation.drain()
        assert simulation.submitted == simulation.ended > TENANTS
        assert simulation.open == set()
        for pool in simulation.pools.values():
            assert pool.underway == 0
            assert {load for router in pool.routers for load in router.loads.values()} == {0}


def test_nothing_is_busy_for_more_than_all_of_its_time(simulate: ModuleType) -> None:
    for setup, load in setups(simulate):
        simulation = simulate.Simulation(GPUS, simulate.draw_tenants(TENANTS, 7), setup, 7, load)
        simulation.run()
        simulation.drain()
        span = simulation.clock.horizon - simulation.clock.warm_up
        most = span * (1 + 1e-9)
        for pool in simulation.pools.values():
            for group in pool.groups:
                assert group.useful / group.gpus <= group.computing
                assert group.computing + group.asking <= most
            assert all(replica.busy <= most for replica in pool.replicas.values())
        for station in (simulation.api, simulation.database.station):
            assert station.busy <= station.servers * most


def test_the_same_seed_gives_the_same_figures_and_another_one_others(simulate: ModuleType) -> None:
    first, again, other = (simulate.simulated(GPUS, TENANTS, simulate.SPREAD, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_all_gpus_are_dealt_out_and_each_kind_has_one(simulate: ModuleType) -> None:
    for gpus in (4, 5, 64):
        simulation = simulate.Simulation(gpus, simulate.draw_tenants(TENANTS, 1), simulate.SPREAD, 1)
        sizes = [[*(group.gpus for group in pool.groups), len(pool.replicas)] for pool in simulation.pools.values()]
        assert sum(map(sum, sizes)) == gpus
        assert all(min(size) >= 1 for size in sizes)


def test_prompts_are_found_in_the_cache_more_often_with_the_router_than_at_random(simulate: ModuleType) -> None:
    """At a size with several samplers for each base model."""
    found = {
        policy: simulate.simulated(32, 160, simulate.SPREAD._replace(policy=policy), 1).found
        for policy in ("prefix, then load", "random")
    }
    assert found["prefix, then load"] > found["random"] + 0.1


def figures(page: str, row: str) -> list[float]:
    """Those in the row with this name."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    (cells,) = (line.removeprefix(f"| {row} |") for line in lines if line.startswith(f"| {row} |"))
    return [float(figure.replace(",", "")) for figure in re.findall(r"\d[\d,]*(?:\.\d+)?", cells)]


def test_what_things_cost_is_what_the_pages_say_was_measured(simulate: ModuleType) -> None:
    import _measured as measured

    def gpu(row: str) -> list[float]:
        return figures("explain/performance.md", row)

    def server(row: str) -> list[float]:
        return figures("reference/benchmarks.md", row)

    small, large = measured.SMALL, measured.LARGE
    assert gpu("train 1.7B, 8 x 2,048")[0] == small.train_tokens_per_second
    assert gpu("train 8B, 4 x 2,048")[0] == large.train_tokens_per_second
    assert gpu("decode 1.7B, batch 1")[0] == pytest.approx(1e3 * small.decode_step(1))
    assert gpu("decode 1.7B, batch 256, eight adapters")[0] == pytest.approx(256 / small.decode_step(256))
    decode, *_, reading = gpu("decode 8B, batch 64")[:3]
    assert [decode, reading] == pytest.approx([1e3 * large.decode_step(64), 1e3 * large.decode_step(1)])
    assert gpu("weights of a step to the sampler")[0] == pytest.approx(1e3 * measured.WEIGHTS_TO_SAMPLER_SECONDS)

    assert server("sample with a prompt of 120 tokens") == pytest.approx([1e3 * measured.API.sample])
    training = server("training operation, `forward_backward` and `optim_step` by turns, one at a time")
    assert training == pytest.approx([1e3 * measured.API.train])
    of = {"claimed": (" where 10 owners have work", " where 10,000 owners have work"), "submitted": ("", " at once")}
    asking = []
    for verb, name in (("submitted", "submit"), ("claimed", "claim"), ("begun", "begin"), ("completed", "complete")):
        few, many = of.get(verb, ("", ""))
        one, all_ = server(f"1 {verb}{few}"), server(f"64 {verb}{many}")
        asking.append(one[1])
        for store, column in ((measured.SQLITE, 0), (measured.POSTGRES, 2)):
            costs = getattr(store, name)
            assert [one[column], all_[column]] == pytest.approx([1e3 * costs.one, 1e3 * costs.many])
    assert sum(asking[1:]) == pytest.approx(1e3 * measured.POSTGRES.asking)
