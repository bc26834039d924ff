"""The whole way on PostgreSQL: train, save, sample, lose every process in turn, and go on; then lose the database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.end_to_end.scripts import sentence, submitted
from tests.end_to_end.serving import KEY, ServerProcess, failed_start, wait_until
from tests.server.postgres import Postgres

MODEL = "tiny/model-1"
PROMPT = tinsmith.ModelInput.from_ints([1, 2, 3])
SEEDED = tinsmith.SamplingParams(max_tokens=8, seed=5, stop=[])
RESULT_SECONDS = 90.0


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as database:
        yield database


@pytest.fixture(scope="module")
def database(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path], database: str
) -> Iterator[ServerProcess]:
    state = tmp_path_factory.mktemp("on-postgres")
    with ServerProcess(state, {MODEL: models[MODEL]}, f"--database={database}") as running:
        yield running
        assert not (state / "tinsmith.db").exists()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[tinsmith.ServiceClient]:
    with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as opened:
        yield opened


def submit(model: Any, steps: Sequence[int]) -> list[Any]:
    return submitted(tinsmith, model, steps)


def losses(futures: Sequence[Any]) -> list[float]:
    return [future.result(timeout=RESULT_SECONDS).metrics["loss:sum"] for future in futures]


def drawn(sampler: Any) -> list[list[int]]:
    return [one.tokens for one in sampler.sample(PROMPT, 2, SEEDED).result(timeout=RESULT_SECONDS).sequences]


def test_a_run_outlives_every_process_and_is_resumed(server: ServerProcess, client: tinsmith.ServiceClient) -> None:
    calm = client.create_lora_training_client(MODEL, rank=4, seed=1)
    expected = losses(submit(calm, range(30)))

    model = client.create_lora_training_client(MODEL, rank=4, seed=1)
    futures = submit(model, range(10))
    futures[1].result(timeout=RESULT_SECONDS)
    server.kill_worker()
    futures += submit(model, range(10, 20))
    futures[11].result(timeout=RESULT_SECONDS)
    saved = model.save_state("half").result(timeout=RESULT_SECONDS).path
    sampler = model.save_weights_and_get_sampling_client()
    before = drawn(sampler)
    rest = submit(model, range(20, 30))
    server.kill()
    server.start()
    assert losses([*futures, *rest]) == pytest.approx(expected, rel=1e-5)
    assert drawn(sampler) == before

    resumed = client.create_training_client_from_state_with_optimizer(saved)
    assert losses(submit(resumed, range(20, 30))) == pytest.approx(expected[20:], rel=1e-5)


def test_a_wrong_database_or_folder_is_refused_and_nothing_is_lost(
    server: ServerProcess,
    client: tinsmith.ServiceClient,
    postgres: Postgres,
    database: str,
    models: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    served = f"--model={MODEL}={models[MODEL]}"
    model = client.create_lora_training_client(MODEL, rank=4, seed=1)
    expected = losses(submit(model, range(3)))
    told = failed_start(tmp_path / "other", served, f"--database={database}")
    assert "Another server uses this database" in told
    assert f"with the state folder {server.state}" in told
    server.terminate()
    for other in ([], [f"--database={postgres.new_database()}"]):
        assert "belongs to another database" in failed_start(server.state, served, *other)
    assert not (server.state / "tinsmith.db").exists()
    server.start()
    assert losses(submit(model, [0]))[0] < expected[0], "what it had learned is there"


def test_a_restart_of_the_database_costs_only_time(
    server: ServerProcess, client: tinsmith.ServiceClient, postgres: Postgres
) -> None:
    model = client.create_lora_training_client(MODEL, rank=4, seed=1)
    first = losses(submit(model, range(3)))
    worker = server.workers()
    postgres.stop()
    waiting = model.forward([sentence(tinsmith, 0)], "cross_entropy")
    wait_until(lambda: "worker_run ERROR The database is out of reach" in server.log(), 60, "it was not noticed")
    postgres.start()
    assert losses([waiting])[0] < first[0]
    assert losses(submit(model, [3]))
    assert server.workers() == worker, "the base model was loaded again"
