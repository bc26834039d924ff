"""Processes die at the worst moments; whoever waits sees a delay and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.compat.runner import Runner
from tests.end_to_end.scripts import sentence
from tests.end_to_end.serving import KEY, ServerProcess, wait_until

MODEL = "tiny/model-1"
STEPS = range(40)
RESULT_SECONDS = 90.0
STEP = tinsmith.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def frail(tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]) -> Iterator[ServerProcess]:
    """A server of our own to hurt."""
    with ServerProcess(tmp_path_factory.mktemp("frail"), {MODEL: models[MODEL]}) as running:
        yield running


@pytest.fixture
def client(frail: ServerProcess) -> Iterator[tinsmith.ServiceClient]:
    with tinsmith.ServiceClient(base_url=frail.url, api_key=KEY) as opened:
        yield opened


def submit(model: Any) -> list[Any]:
    """Forty steps, all submitted before any result is awaited."""
    futures = []
    for step in STEPS:
        futures.append(model.forward_backward([sentence(tinsmith, step)], "cross_entropy"))
        model.optim_step(tinsmith.AdamParams(learning_rate=1e-2))
    return futures


def losses(futures: Sequence[Any]) -> list[float]:
    return [future.result(timeout=RESULT_SECONDS).metrics["loss:sum"] for future in futures]


def new_model(client: tinsmith.ServiceClient) -> Any:
    return client.create_lora_training_client(MODEL, rank=4, seed=1)


@pytest.fixture(scope="module")
def undisturbed(frail: ServerProcess) -> list[float]:
    with tinsmith.ServiceClient(base_url=frail.url, api_key=KEY) as opened:
        return losses(submit(new_model(opened)))


def test_a_worker_killed_in_training_costs_only_time(
    frail: ServerProcess, client: tinsmith.ServiceClient, undisturbed: list[float]
) -> None:
    model = new_model(client)
    futures = submit(model)
    futures[2].result(timeout=RESULT_SECONDS)
    killed = frail.kill_worker()
    assert not futures[-1].done(), "killed too late to show anything"
    assert losses(futures) == pytest.approx(undisturbed, rel=1e-5)
    assert killed not in frail.workers()


def test_a_worker_killed_in_sampling_draws_the_same_samples_again(
    frail: ServerProcess, client: tinsmith.ServiceClient
) -> None:
    model = new_model(client)
    losses(submit(model)[:5])
    sampler = model.save_weights_and_get_sampling_client()
    params = tinsmith.SamplingParams(max_tokens=400, seed=7, stop=[])
    prompt = tinsmith.ModelInput.from_ints([1, 2, 3])

    def drawn() -> list[Any]:
        return [sampler.sample(prompt, 4, params) for _ in range(3)]

    def tokens(futures: Sequence[Any]) -> list[Any]:
        return [[one.tokens for one in future.result(timeout=RESULT_SECONDS).sequences] for future in futures]

    before = tokens(drawn())
    interrupted = drawn()
    wait_until(lambda: _running(frail, "sample") > 0, 30, "no sample was begun")
    frail.kill_worker("sample")
    assert not any(future.done() for future in interrupted)
    assert tokens(interrupted) == before


def test_a_killed_api_process_costs_only_time(
    frail: ServerProcess, client: tinsmith.ServiceClient, undisturbed: list[float]
) -> None:
    futures = submit(new_model(client))
    futures[2].result(timeout=RESULT_SECONDS)
    frail.kill()
    assert not futures[-1].done(), "killed too late to show anything"
    frail.start()
    assert losses(futures) == pytest.approx(undisturbed, rel=1e-5)


def test_the_official_client_sees_only_a_delay_too(frail: ServerProcess, official_runner: Runner) -> None:
    calm = official_runner.run("pipelined_training", frail.url)
    finished = _count(frail, "optim_step")
    with ThreadPoolExecutor(1) as thread:
        disturbed = thread.submit(official_runner.run, "pipelined_training", frail.url)
        wait_until(lambda: _count(frail, "optim_step") > finished, 30, "no step was submitted")
        frail.kill()
        assert not disturbed.done()
        frail.start()
        assert disturbed.result(RESULT_SECONDS) == pytest.approx(calm, rel=1e-5)


def test_a_stopped_server_goes_on_where_it_was(
    frail: ServerProcess, client: tinsmith.ServiceClient, undisturbed: list[float]
) -> None:
    """SIGTERM: what was accepted and not begun is done by the next server."""
    futures = submit(new_model(client))
    futures[2].result(timeout=RESULT_SECONDS)
    assert frail.terminate() == 0
    frail.start()
    assert losses(futures) == pytest.approx(undisturbed, rel=1e-5)


def half(model: Any) -> list[float]:
    """Three steps, and a gradient that no step has used; one at a time, so that nothing depends on what met whom."""
    found = [_trained(model, step) for step in range(3)]
    model.optim_step(STEP)
    return found + [_trained(model, step) for step in range(3, 5)]


def rest(model: Any) -> str:
    """Uses the gradient and all that the optimizer knows; the path of what comes out."""
    model.optim_step(STEP)
    _trained(model, 9)
    model.optim_step(STEP)
    path: str = model.save_state("end").result(timeout=RESULT_SECONDS).path
    return path


def _trained(model: Any, number: int) -> float:
    (loss,) = losses([model.forward_backward([sentence(tinsmith, number)], "cross_entropy")])
    return loss


def saved_bytes(server: ServerProcess, path: str) -> dict[str, bytes]:
    """Weights and optimizer of a checkpoint."""
    return {name: content for name, content in server.downloaded(path).items() if name.endswith(".safetensors")}


def replayed(server: ServerProcess, model_id: str) -> list[int]:
    """How many operations were done again each time that a model was built again."""
    return [
        int(count) for count in re.findall(rf"Rebuilt {model_id} in \S+ s: replayed (\d+) operations", server.log())
    ]


def test_a_stopped_server_has_nothing_to_do_again_and_goes_on_to_the_last_bit(
    frail: ServerProcess, client: tinsmith.ServiceClient
) -> None:
    whole, cut = new_model(client), new_model(client)
    assert half(whole) == half(cut)
    expected = saved_bytes(frail, rest(whole))
    assert frail.terminate() == 0
    frail.start()
    found = saved_bytes(frail, rest(cut))
    assert found == expected
    assert expected.keys() == {"adapter_model.safetensors", "optimizer.safetensors"}
    assert replayed(frail, cut.model_id) == []


@pytest.mark.one_machine("the snapshots are not on a disk")
def test_damage_on_the_disk_costs_time_if_a_snapshot_is_whole_and_else_one_model(
    frail: ServerProcess, client: tinsmith.ServiceClient
) -> None:
    whole, hurt, lost = (new_model(client) for _ in range(3))
    for model in (whole, hurt, lost):
        half(model)
    expected = saved_bytes(frail, rest(whole))
    assert frail.terminate() == 0
    frail.start()
    kept = lost.save_state("kept").result(timeout=RESULT_SECONDS).path
    half(lost)
    assert frail.terminate() == 0
    (snapshot,) = snapshots(frail, hurt)
    flip_a_bit(snapshot)
    for snapshot in snapshots(frail, lost):
        flip_a_bit(snapshot)
    frail.start()
    with pytest.raises(tinsmith.RequestFailedError, match=f"from its last checkpoint, {kept}"):
        lost.optim_step(STEP).result(timeout=RESULT_SECONDS)
    assert saved_bytes(frail, rest(hurt)) == expected
    assert replayed(frail, hurt.model_id) == [6]
    runs = {run.training_run_id: run.corrupted for run in client.rest.iter_training_runs()}
    assert [runs[model.model_id] for model in (whole, hurt, lost)] == [False, False, True]
    losses([new_model(client).forward_backward([sentence(tinsmith, 1)], "cross_entropy")])


def snapshots(server: ServerProcess, model: Any) -> list[Path]:
    folder = server.state / "snapshots" / model.model_id.replace(":", "_") / "weights"
    return [each for each in folder.iterdir() if each.name.isdigit()]


def flip_a_bit(folder: Path) -> None:
    file = folder / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def _running(server: ServerProcess, kind: str) -> int:
    """How many jobs of a kind the worker has claimed."""
    return _metric(server, "tinsmith_jobs{", f'operation="{kind}"', 'state="running"')


def _count(server: ServerProcess, endpoint: str) -> int:
    """How many requests this endpoint has taken."""
    return _metric(server, "tinsmith_requests_total{", f"/{endpoint}")


def _metric(server: ServerProcess, *parts: str) -> int:
    lines = server.call("GET", "/metrics").body.decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if all(part in line for part in parts))
