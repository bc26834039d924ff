"""A server whose files lie in a bucket: killed, robbed of its local copies, cut off, and none the worse for it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.end_to_end.grounds import OnRay, ground
from tests.end_to_end.scripts import sentence
from tests.end_to_end.serving import COMMAND, KEY, ServerProcess, failed_start, wait_until
from tests.server.bucket import BUCKET, SECRET, Bucket, running_bucket

MODEL = "tiny/model-1"
URL = f"s3://{BUCKET}/team/files"
SECONDS = 90.0
STEP = tinsmith.AdamParams(learning_rate=1e-2)
PARAMS = tinsmith.SamplingParams(max_tokens=8, seed=3, stop=[])
PROMPT = tinsmith.ModelInput.from_ints([1, 2, 3])


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    """The one that workers elsewhere know, if there are such."""
    standing = ground()
    with nullcontext(standing.bucket) if isinstance(standing, OnRay) else running_bucket() as running:
        yield running


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path], bucket: Bucket
) -> Iterator[ServerProcess]:
    state = tmp_path_factory.mktemp("state")
    with ServerProcess(state, {MODEL: models[MODEL]}, f"--storage={URL}", "--replay-bound=0") as running:
        yield running
    assert SECRET not in running.log()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[tinsmith.ServiceClient]:
    with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as opened:
        yield opened


def new_model(client: tinsmith.ServiceClient) -> Any:
    return client.create_lora_training_client(MODEL, rank=4, seed=1)


def train(model: Any, steps: range) -> None:
    """One step at a time, so that nothing depends on what met whom."""
    for step in steps:
        model.forward_backward([sentence(tinsmith, step)], "cross_entropy").result(timeout=SECONDS)
        model.optim_step(STEP).result(timeout=SECONDS)


def weights(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.endswith(".safetensors")}


def test_a_server_that_lost_all_but_bucket_and_database_goes_on_to_the_last_bit(
    server: ServerProcess, client: tinsmith.ServiceClient, bucket: Bucket
) -> None:
    whole, cut = new_model(client), new_model(client)
    for model in (whole, cut):
        train(model, range(4))
    saved = cut.save_state("half").result(timeout=SECONDS).path
    before = server.downloaded(saved)
    sampler = cut.save_weights_and_get_sampling_client()
    drawn = sampler.sample(PROMPT, 1, PARAMS).result(timeout=SECONDS).sequences[0].tokens

    server.kill_all()
    shutil.rmtree(server.state / "cache")
    server.start()

    assert server.downloaded(saved) == before
    assert set(before) == {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "tinsmith.json"}
    assert sampler.sample(PROMPT, 1, PARAMS).result(timeout=SECONDS).sequences[0].tokens == drawn
    for model in (whole, cut):
        train(model, range(4, 7))
    ends = [model.save_state("end").result(timeout=SECONDS).path for model in (whole, cut)]
    assert weights(server.downloaded(ends[0])) == weights(server.downloaded(ends[1]))
    assert not [*server.state.glob("checkpoints/*"), *server.state.glob("snapshots/*")]

    copy = client.create_training_client_from_state_with_optimizer(saved)
    train(copy, range(4, 7))
    again = copy.save_state("end").result(timeout=SECONDS).path
    assert weights(server.downloaded(again)) == weights(server.downloaded(ends[1]))

    prefix = f"team/files/checkpoints/{saved.removeprefix('tinker://').replace(':', '_')}/"
    assert len(bucket.objects(prefix)) == 5
    client.rest.delete_checkpoint_from_tinker_path(saved).result(timeout=SECONDS)
    assert bucket.objects(prefix) == []


def test_checkpoints_are_copied_exported_and_imported(
    server: ServerProcess, client: tinsmith.ServiceClient, bucket: Bucket, tmp_path: Path
) -> None:
    model = new_model(client)
    train(model, range(2))
    saved = model.save_state("kept").result(timeout=SECONDS).path
    copy = client.rest.copy_weights(saved, "project").result(timeout=SECONDS)
    client.rest.delete_checkpoint_from_tinker_path(saved).result(timeout=SECONDS)
    client.rest.export_checkpoint(copy, tmp_path / "adapter").result(timeout=SECONDS)
    imported = client.rest.import_adapter(tmp_path / "adapter", MODEL).result(timeout=SECONDS)
    assert bucket.objects(f"team/files/checkpoints/{imported.removeprefix('tinker://')}/")
    assert loss(client.create_training_client_from_state(imported)) == pytest.approx(loss(model), rel=1e-5)


def loss(model: Any) -> float:
    found: float = model.forward([sentence(tinsmith, 5)], "cross_entropy").result(timeout=SECONDS).metrics["loss:sum"]
    return found


def test_a_backup_says_what_to_copy_instead(server: ServerProcess, tmp_path: Path) -> None:
    command = [COMMAND, "backup", tmp_path / "copy", "--state", server.state]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert f"lie in {URL}" in " ".join(refused.stderr.split())
    assert not (tmp_path / "copy").exists()


def test_a_save_waits_for_a_bucket_that_went_away_and_is_done_when_it_is_back(
    server: ServerProcess, client: tinsmith.ServiceClient, bucket: Bucket
) -> None:
    model, other = new_model(client), new_model(client)
    train(model, range(2))
    bucket.go_away()
    saving = model.save_state("late")
    wait_until(lambda: "and what needs its files waits" in server.log(), SECONDS, "it did not wait")
    train(other, range(2))
    assert not saving.done()
    refused = server.call("DELETE", f"/api/v1/training_runs/{model.model_id}/checkpoints/weights/late")
    assert (refused.status, "out of reach. Send the request again" in refused.json()["detail"]) == (503, True)
    assert "storage" in server.call("GET", "/readyz").json()["detail"]
    bucket.come_back()
    path = saving.result(timeout=SECONDS).path
    wait_until(lambda: server.call("GET", "/readyz").status == 200, SECONDS, "it is not ready again")
    assert server.downloaded(path)["adapter_model.safetensors"]


def test_a_start_without_its_bucket_is_refused_with_what_to_change(
    tmp_path: Path, models: Mapping[str, Path], bucket: Bucket
) -> None:
    said = failed_start(tmp_path, f"--model={MODEL}={models[MODEL]}", "--storage=s3://not-there/x")
    assert "bucket does not exist" in said
    assert "AWS_ENDPOINT_URL" in said
