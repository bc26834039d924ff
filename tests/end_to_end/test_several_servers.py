"""Several servers on one PostgreSQL and one bucket: all take requests, one of them runs the workers.

Whoever leads is killed, stopped, cut off or restarted in turn, and clients notice nothing but a delay.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psycopg
import pytest

import tinsmith
from tests.end_to_end.balancer import LoadBalancer
from tests.end_to_end.scripts import sentence, submitted
from tests.end_to_end.serving import KEY, ServerProcess, failed_start, is_running, wait_until
from tests.server.bucket import BUCKET, Bucket, running_bucket
from tests.server.postgres import Postgres

MODEL = "tiny/model-1"
PROMPT = tinsmith.ModelInput.from_ints([1, 2, 3])
SEEDED = tinsmith.SamplingParams(max_tokens=8, seed=5, stop=[])
STORAGE = f"s3://{BUCKET}/shared"
SECONDS = 120.0


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as running:
        yield running


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with running_bucket() as running:
        yield running


@pytest.fixture(scope="module")
def database(postgres: Postgres) -> str:
    return postgres.new_database()


class Pair:
    """Two servers with the same options, and a folder of its own for each."""

    def __init__(self, folder: Path, models: Mapping[str, Path], *options: str) -> None:
        self.servers = [ServerProcess(folder / name, {MODEL: models[MODEL]}, *options) for name in ("one", "two")]

    @property
    def leader(self) -> ServerProcess:
        (leading,) = [server for server in self.servers if server.is_up and server.workers()]
        return leading

    @property
    def follower(self) -> ServerProcess:
        (standing_by,) = [server for server in self.servers if server is not self.leader]
        return standing_by

    def wait_for_ready(self, server: ServerProcess) -> None:
        wait_until(lambda: server.call("GET", "/readyz").status == 200, SECONDS, "it is not ready")


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path], database: str, bucket: Bucket
) -> Iterator[Pair]:
    options = (f"--database={database}", f"--storage={STORAGE}", "--replay-bound=1")
    made = Pair(tmp_path_factory.mktemp("states"), models, *options)
    with ExitStack() as running:
        for server in made.servers:
            running.enter_context(server)
        yield made


@pytest.fixture
def balancer(pair: Pair) -> Iterator[LoadBalancer]:
    with LoadBalancer([server.url for server in pair.servers]) as running:
        yield running


@pytest.fixture
def client(balancer: LoadBalancer) -> Iterator[tinsmith.ServiceClient]:
    with tinsmith.ServiceClient(base_url=balancer.url, api_key=KEY) as opened:
        yield opened


def losses(futures: Sequence[Any]) -> list[float]:
    return [future.result(timeout=SECONDS).metrics["loss:sum"] for future in futures]


def drawn(sampler: Any) -> list[list[int]]:
    return [one.tokens for one in sampler.sample(PROMPT, 2, SEEDED).result(timeout=SECONDS).sequences]


def calm_losses(client: tinsmith.ServiceClient, steps: range) -> list[float]:
    return losses(submitted(tinsmith, client.create_lora_training_client(MODEL, rank=4, seed=1), steps))


# Both do everything


def new_session(server: ServerProcess) -> str:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", "type": "create_session"}
    return str(server.post("create_session", body).json()["session_id"])


def test_what_is_submitted_to_one_is_found_by_the_other_and_done_once(pair: Pair, database: str) -> None:
    leader, follower = pair.leader, pair.follower
    session_id = new_session(follower)
    for server in (leader, follower):
        assert server.post("session_heartbeat", {"session_id": session_id}).status == 200
    made = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4, "seed": 1}}
    answers = [server.post("create_model", {**made, "optimizer_config": {}}) for server in (follower, leader)]
    assert answers[0].json() == answers[1].json()
    model_id = leader.result(answers[0])["model_id"]

    step = {"model_id": model_id, "adam_params": {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}}
    numbers = range(1, 21)
    with ThreadPoolExecutor(8) as threads:
        sent = [
            threads.submit(server.post, "optim_step", {**step, "seq_id": number})
            for number in numbers
            for server in (leader, follower)
        ]
        acknowledged = [each.result() for each in sent]
    assert {answer.json()["request_id"] for answer in acknowledged} == {f"{model_id}:{number}" for number in numbers}
    for server, other, answer in zip([follower, leader] * 10, [leader, follower] * 10, acknowledged[::2], strict=True):
        assert server.result(answer) == other.result(answer)
    with psycopg.connect(database) as connection:
        query = "SELECT count(*), max(attempts), min(state) FROM jobs WHERE stream = %s AND kind = 'optim_step'"
        assert connection.execute(query, [model_id]).fetchone() == (20, 1, "done")


def test_a_sample_is_the_same_wherever_it_is_asked_for(pair: Pair, client: tinsmith.ServiceClient) -> None:
    model = client.create_lora_training_client(MODEL, rank=4, seed=1)
    losses(submitted(tinsmith, model, range(3)))
    path = model.save_weights_for_sampler("shared").result(timeout=SECONDS).path
    found = []
    for server in pair.servers:
        with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as direct:
            found.append(drawn(direct.create_sampling_client(model_path=path)))
    assert found[0] == found[1]


def test_a_stream_of_the_other_server_comes_while_it_is_drawn(pair: Pair) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 200, "stream": True, "seed": 1, "logit_bias": {}}
    texts = []
    for server in (pair.leader, pair.follower):
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            events = [line for line in response.read().decode().split("\n\n") if line.startswith("data: {")]
        chunks = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
        assert len([chunk for chunk in chunks if chunk]) > 1, "it came in one piece"
        texts.append("".join(chunks))
    assert texts[0] == texts[1]


def test_a_key_that_is_made_and_revoked_at_one_server_is_so_at_the_other_at_once(pair: Pair) -> None:
    for one, other in (pair.servers, pair.servers[::-1]):
        made = one.call("POST", "/dashboard/api/keys", {"name": f"of {one.state.name}"}).json()
        plain, key_id = made["plain"], made["key"]["key_id"]
        assert other.call("GET", "/api/v1/auth/apikey/me", key=plain).json()["key_id"] == key_id
        token = one.call("POST", "/api/v1/auth/token", key=plain).json()["jwt"]
        assert other.call("GET", "/api/v1/auth/apikey/me", key=token).status == 200
        assert one.call("DELETE", f"/dashboard/api/keys/{key_id}").status == 204
        assert other.call("GET", "/api/v1/auth/apikey/me", key=plain).status == 401
        assert other.call("GET", "/api/v1/auth/apikey/me", key=token).status == 401


def test_a_download_link_of_one_server_is_good_at_the_other_and_gives_the_same_bytes(
    pair: Pair, client: tinsmith.ServiceClient
) -> None:
    model = client.create_lora_training_client(MODEL, rank=4, seed=1)
    run, kind, name = model.save_state("kept").result(timeout=SECONDS).path.removeprefix("tinker://").split("/")
    place = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
    archives = []
    for one, other in (pair.servers, pair.servers[::-1]):
        link = one.call("GET", place).json()["url"].removeprefix(one.url)
        fetched = other.call("GET", link)
        assert fetched.status == 200
        archives.append(fetched.body)
    assert archives[0] == archives[1], "a download that is resumed at the other server would be torn"
    with tarfile.open(fileobj=io.BytesIO(archives[0])) as archive:
        assert "adapter_model.safetensors" in archive.getnames()


def test_a_checkpoint_is_deleted_by_one_server_while_the_other_ones_worker_saves_it(
    pair: Pair, client: tinsmith.ServiceClient
) -> None:
    """Whoever comes last, what is listed can be read."""
    model = client.create_lora_training_client(MODEL, rank=4, seed=1)
    path = model.save_state("again").result(timeout=SECONDS).path
    with tinsmith.ServiceClient(base_url=pair.follower.url, api_key=KEY) as direct:
        rest = direct.rest
        for _ in range(8):
            saving = model.save_state("again", overwrite=True)
            with suppress(tinsmith.NotFoundError):
                rest.delete_checkpoint_from_tinker_path(path).result(timeout=SECONDS)
            saving.result(timeout=SECONDS)
            listed = [each.tinker_path for each in rest.list_checkpoints(path.split("/")[2]).result().checkpoints]
            assert listed in ([], [path])
            if listed:
                client.create_training_client_from_state(path).result(10)


def test_both_show_the_same_workers(pair: Pair, client: tinsmith.ServiceClient) -> None:
    calm_losses(client, range(1))
    shown = []
    for server in pair.servers:
        pair.wait_for_ready(server)
        (model,) = server.call("GET", "/dashboard/api/overview").json()["models"]
        shown.append((model["is_ready"], [(each["name"], each["is_ready"]) for each in model["workers"]]))
    assert shown[0] == shown[1]
    is_ready, workers = shown[0]
    assert is_ready
    assert workers != []
    assert all(is_up for _, is_up in workers)

    def is_same() -> bool:
        pages = [server.call("GET", "/metrics").body.decode() for server in pair.servers]
        found = [re.findall(r"tinsmith_training_tokens_total\{.*\} [1-9].*", page) for page in pages]
        return found[0] == found[1] != []

    wait_until(is_same, SECONDS, "they show other figures")


# Whoever leads goes


@contextmanager
def never_two_crews(servers: Sequence[ServerProcess]) -> Iterator[None]:
    """Watches that no worker of one server lives while one of another does, orphans included."""
    over, crews, both = threading.Event(), [set[int]() for _ in servers], []

    def watch() -> None:
        while not over.wait(0.005):
            for crew, server in zip(crews, servers, strict=True):
                with suppress(OSError, HTTPException):  # it is not up, or was killed while it was asked
                    crew.update(server.workers())
            alive = [[pid for pid in crew if is_running(pid)] for crew in crews]
            if all(alive):
                both.append(alive)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert both == []


def test_the_leader_is_killed_in_the_middle_and_another_takes_its_place(
    pair: Pair, client: tinsmith.ServiceClient
) -> None:
    expected = calm_losses(client, range(30))
    model = client.create_lora_training_client(MODEL, rank=4, seed=1)
    with never_two_crews(pair.servers):
        for first in (0, 10):
            futures = submitted(tinsmith, model, range(first, first + 5))
            futures[0].result(timeout=SECONDS)
            victim = pair.leader
            victim.kill()
            futures += submitted(tinsmith, model, range(first + 5, first + 10))
            assert losses(futures) == pytest.approx(expected[first : first + 10], rel=1e-5)
            (other,) = [server for server in pair.servers if server is not victim]
            assert other.workers()
            victim.start()
            assert not victim.workers(), "it stands by"
        sampler = model.save_weights_and_get_sampling_client()
        before = drawn(sampler)
        victim = pair.leader
        victim.kill_all()
        assert drawn(sampler) == before
        assert losses(submitted(tinsmith, model, range(20, 30))) == pytest.approx(expected[20:], rel=1e-5)
        victim.start()


def test_every_server_is_restarted_in_turn_and_nothing_is_lost(pair: Pair, client: tinsmith.ServiceClient) -> None:
    expected = calm_losses(client, range(20))
    model = client.create_lora_training_client(MODEL, rank=4, seed=1)
    futures = []
    with never_two_crews(pair.servers):
        for number, server in enumerate([pair.leader, pair.follower]):
            futures += submitted(tinsmith, model, range(10 * number, 10 * number + 5))
            assert server.terminate() == 0
            futures += submitted(tinsmith, model, range(10 * number + 5, 10 * number + 10))
            server.start()
            pair.wait_for_ready(server)
        assert losses(futures) == pytest.approx(expected, rel=1e-5)


def test_a_leader_that_another_has_replaced_without_its_knowing_does_no_harm(
    pair: Pair, client: tinsmith.ServiceClient, database: str
) -> None:
    """It is stopped, as a machine that hangs, and loses its lock; its worker goes on, and then it wakes up."""
    expected = calm_losses(client, range(10))
    model = client.create_lora_training_client(MODEL, rank=4, seed=1)
    losses(submitted(tinsmith, model, range(5)))
    old, new = pair.leader, pair.follower
    with never_two_crews(pair.servers):
        os.kill(old.pid, signal.SIGSTOP)
        try:
            with psycopg.connect(database, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND "
                    "classid = x'74696e73'::int AND objid = x'6d697469'::bigint::oid AND mode = 'ExclusiveLock'"
                )
            wait_until(lambda: bool(new.workers()), SECONDS, "nobody took its place")
        finally:
            os.kill(old.pid, signal.SIGCONT)
        assert losses(submitted(tinsmith, model, range(5, 10))) == pytest.approx(expected[5:], rel=1e-5)
        wait_until(lambda: "so this one ends its workers and stands by" in old.log(), SECONDS, "it still leads")
    wait_until(lambda: not old.workers(), SECONDS, "it still has workers")
    pair.wait_for_ready(old)
    assert old.post("session_heartbeat", {"session_id": new_session(old)}).status == 200


def test_a_restart_of_the_database_changes_no_leader(
    pair: Pair, client: tinsmith.ServiceClient, postgres: Postgres
) -> None:
    model = client.create_lora_training_client(MODEL, rank=4, seed=1)
    losses(submitted(tinsmith, model, range(2)))
    leader, workers = pair.leader, pair.leader.workers()
    postgres.stop()
    waiting = model.forward([sentence(tinsmith, 0)], "cross_entropy")
    postgres.start()
    assert losses([waiting])
    time.sleep(7)  # whoever stands by waits so long before it tries for the lead
    assert pair.leader is leader
    assert leader.workers() == workers, "the base model was loaded again"


# Who may not join


@pytest.mark.one_machine("a server on a cluster has a storage")
def test_who_has_no_storage_is_refused(pair: Pair, database: str, models: Mapping[str, Path], tmp_path: Path) -> None:
    told = failed_start(tmp_path, f"--model={MODEL}={models[MODEL]}", f"--database={database}")
    assert "Another server uses this database" in told
    assert "give all of them the same --storage, to share it" in told


def test_who_would_not_find_the_files_is_refused(
    pair: Pair, database: str, models: Mapping[str, Path], tmp_path: Path
) -> None:
    served, shared = f"--model={MODEL}={models[MODEL]}", f"--database={database}"
    told = failed_start(tmp_path / "elsewhere", served, shared, f"--storage={STORAGE}/elsewhere")
    assert f"with its files in {STORAGE}:" in told
    assert "start all servers with the same --storage" in told
    told = failed_start(pair.follower.state, served, shared, f"--storage={STORAGE}")
    assert "Another server uses the state folder" in told
