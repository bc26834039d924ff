"""Programs a user could have written, each for whichever package is passed in as `tinker`.

A script drives the public API of the package against the server at `url` and returns, as plain values, what the
user gets back. What the server must be set to for a script is in `cases.py`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import threading
import time
import urllib.request
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import Any

from tests.compat.plain import failure, loss_output, plain, sampled, tensor

KEY = "tml-compat"
MODEL = "tiny/model-1"
SCRIPTS: dict[str, Callable[[Any, str], Any]] = {}


def script(function: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    SCRIPTS[function.__name__] = function
    return function


def async_script(function: Callable[[Any, str], Awaitable[Any]]) -> Callable[[Any, str], Awaitable[Any]]:
    SCRIPTS[function.__name__] = lambda tinker, url: asyncio.run(function(tinker, url))  # type: ignore[arg-type]
    return function


def service(tinker: Any, url: str, **options: Any) -> Any:
    return tinker.ServiceClient(base_url=url, api_key=KEY, **options)


def ready(client: Any) -> Any:
    """Waited for; official releases before 0.38 return a client only when it is ready."""
    return client.result() if hasattr(client, "result") else client


def trainer(client: Any) -> Any:
    return ready(client.create_lora_training_client(MODEL, rank=8, seed=1))


def datum(tinker: Any, first: int = 1, length: int = 4) -> Any:
    tokens = list(range(first, first + length))
    inputs = {"target_tokens": [token + 1 for token in tokens], "weights": [0.0] + [1.0] * (length - 1)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def text(tinker: Any, *tokens: int) -> Any:
    return tinker.ModelInput.from_ints(list(tokens or (5, 6, 7)))


def raised(tinker: Any, action: Callable[[], Any]) -> Any:
    """What an action that should fail raises."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever a user would see
        return failure(tinker, error)
    return "(no error)"


@contextmanager
def deprecated() -> Iterator[list[str]]:
    """The kinds of warnings about future changes that the block gives."""
    kinds: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield kinds
    # Others, such as a socket found unclosed, come at any time and from anywhere.
    kinds.extend(sorted({found.category.__name__ for found in caught if issubclass(found.category, FutureWarning)}))


# Training


@script
def supervised_loop(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        training = client.create_lora_training_client(
            MODEL, rank=16, seed=7, train_unembed=False, user_metadata={"purpose": "compat"}
        )
        steps = []
        for step in range(3):
            forward = training.forward_backward([datum(tinker, step), datum(tinker, step + 5)], "cross_entropy")
            optim = training.optim_step(tinker.AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0))
            steps.append((forward, optim))
        results = [[loss_output(forward.result()), plain(optim.result())] for forward, optim in steps]
        return [results, plain(training.get_info()), client.get_console_url(), training.get_console_url()]


@async_script
async def async_supervised_loop(tinker: Any, url: str) -> Any:
    client = service(tinker, url)
    training = await client.create_lora_training_client_async(MODEL, rank=4)
    results = []
    for step in range(2):
        forward = await training.forward_backward_async([datum(tinker, step)], "cross_entropy")
        optim = await training.optim_step_async(adam_params=tinker.AdamParams())
        results.append([loss_output(await forward), plain(await optim.result_async(timeout=30))])
    info = plain(await training.get_info_async())
    await client.close("success")
    return [results, info]


@script
def chunked_batch(tinker: Any, url: str) -> Any:
    """Five data, cut by count or by size as the server's flags say, and an operation after them."""
    with service(tinker, url) as client:
        training = trainer(client)
        forward = training.forward_backward([datum(tinker, step, 3 + step) for step in range(5)], "cross_entropy")
        optim = training.optim_step(tinker.AdamParams())
        return [loss_output(forward.result()), plain(optim.result())]


@script
def forward_only(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        training = trainer(client)
        forward = training.forward([datum(tinker)], "cross_entropy")
        optim = training.optim_step(tinker.AdamParams())
        return [loss_output(forward.result()), plain(optim.result())]


@script
def every_loss(tinker: Any, url: str) -> Any:
    config: dict[str, dict[str, Any] | None] = {
        "importance_sampling": None,
        "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        "cispo": {"clip_low_threshold": 0, "clip_high_threshold": 3.5},
        "dro": {"beta": 0.1},
        "gspo": {"clip_low_threshold": 0.7},
        "stable_reinforce": {"kl_coeff": 0.2},
        "custom": {"loss_id": "loss-1", "scale": 2},
    }
    inputs = {
        "target_tokens": [2, 3, 4],
        "logprobs": [-1.0, -1.25, -1.5],
        "advantages": [1.0, -0.5, 0.25],
        "sequence_ratio_mask": [0.0, 1.0, 1.0],
    }
    one = tinker.Datum(model_input=text(tinker, 1, 2, 3), loss_fn_inputs=inputs)
    with service(tinker, url) as client:
        training = trainer(client)
        futures = [training.forward_backward([one], loss, settings) for loss, settings in config.items()]
        return [loss_output(future.result()) for future in futures]


@script
def every_tensor(tinker: Any, url: str) -> Any:
    """Loss inputs as lists, numpy arrays, torch tensors and tensor data; one and two dimensions; dense and sparse."""
    import numpy as np
    import torch

    targets_2d = torch.zeros(3, 40, dtype=torch.int64)
    targets_2d[0, 3] = targets_2d[2, 7] = 9
    weights_2d = torch.zeros(3, 40)
    weights_2d[0, 3] = weights_2d[2, 7] = 0.5
    forms = [
        {"target_tokens": np.array([2, 3, 4], np.int32), "weights": np.array([0, 0.5, 1], np.float64)},
        {"target_tokens": torch.tensor([2, 3, 4]), "weights": torch.tensor([0, 0.5, 1], dtype=torch.bfloat16)},
        {
            "target_tokens": tinker.TensorData(data=[2, 3, 4], dtype="int64"),
            "weights": tinker.TensorData(data=[0.0, 0.5, 1.0], dtype="float32", shape=[3]),
        },
        {"target_tokens": np.arange(6).reshape(3, 2), "weights": np.ones((3, 2), np.float32)},
        {"target_tokens": torch.arange(6).reshape(3, 2), "weights": torch.ones(3, 2)},
        {"target_tokens": targets_2d, "weights": weights_2d},
        {"target_tokens": [2, 3, 4], "weights": [0, 1, 1], "my_mask": np.array([1, 0, 1], np.int64)},
    ]
    data = [tinker.Datum(model_input=text(tinker, 1, 2, 3), loss_fn_inputs=form) for form in forms]
    with service(tinker, url) as client:
        output = trainer(client).forward_backward(data, "cross_entropy").result()
        shown = [{name: tensor(value) for name, value in one.loss_fn_inputs.items()} for one in data]
        return [shown, loss_output(output)]


@script
def dimuon(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        training = ready(client.create_lora_training_client(MODEL, rank=8, optimizer=tinker.DimuonOptimizerConfig()))
        step = training.optim_step(tinker.DimuonParams(learning_rate=0.02))
        return [plain(step.result()), plain(training.get_info())]


@script
def images_and_audio(tinker: Any, url: str) -> Any:
    chunks = [
        tinker.EncodedTextChunk(tokens=[1, 2]),
        tinker.types.ImageChunk(data=b"\x89PNG\r\n", format="png", expected_tokens=3),
        tinker.DmelChunk(dmel=bytes([1, 2, 3, 4]) + b"\x00" * 12),
        tinker.EncodedTextChunk(tokens=[3]),
    ]
    pointer = tinker.types.ImageAssetPointerChunk(format="jpeg", location="asset-1", expected_tokens=2)
    one = tinker.Datum(
        model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": [4, 5], "weights": [1.0, 1.0]}
    )
    prompt = tinker.ModelInput(chunks=[*chunks, pointer])
    with service(tinker, url) as client:
        trained = trainer(client).forward_backward([one], "cross_entropy").result()
        sampling = ready(client.create_sampling_client(base_model=MODEL))
        response = sampling.sample(prompt, 1, tinker.SamplingParams(max_tokens=2)).result()
        return [loss_output(trained), sampled(response)]


@script
def provenance(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        training = trainer(client)
        sampling = ready(training.save_weights_and_get_sampling_client(record_stability_info=True))
        sequence = sampling.sample(text(tinker), 1, tinker.SamplingParams(max_tokens=3)).result().sequences[0]
        spans = [
            tinker.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=3),
            tinker.SampledProvenanceSpan(sequence_id=sequence.sequence_id, offset=0, length=2),
        ]
        one = datum(tinker, 5, 5).with_provenance(model_input=spans, loss_fn_inputs=spans)
        return loss_output(training.forward_backward([one], "cross_entropy").result())


@script
def clients_used_at_once(tinker: Any, url: str) -> Any:
    """Nobody waits for a client before it is used."""
    with service(tinker, url) as client:
        training = client.create_lora_training_client(MODEL, rank=8, seed=1)
        forward = training.forward_backward([datum(tinker)], "cross_entropy")
        optim = training.optim_step(tinker.AdamParams())
        results = [loss_output(forward.result()), plain(optim.result()), plain(training.get_info())]
        sampling = training.save_weights_and_get_sampling_client()
        response = sampling.sample(text(tinker), 1, tinker.SamplingParams(max_tokens=2)).result()
        return [*results, sampled(response), sampling.get_base_model()]


@async_script
async def clients_awaited(tinker: Any, url: str) -> Any:
    client = service(tinker, url)
    training = await client.create_lora_training_client(MODEL, rank=8, seed=1)
    forward = training.forward_backward([datum(tinker)], "cross_entropy")
    optim = training.optim_step(tinker.AdamParams())
    results = [loss_output(await forward), plain(await optim), plain(training.get_info())]
    sampling = await training.save_weights_and_get_sampling_client()
    response = await sampling.sample(text(tinker), 1, tinker.SamplingParams(max_tokens=2))
    logprobs = await asyncio.create_task(sampling.compute_logprobs(text(tinker)).coroutine())
    again = await client.create_sampling_client(base_model=MODEL).coroutine()
    names = [sampling.get_base_model(), again.get_base_model()]
    await client.close("success")
    return [*results, sampled(response), logprobs, names]


@script
def clients_as_futures(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        futures = [client.create_lora_training_client(MODEL, rank=8, seed=1).future()]
        training = futures[0].result(timeout=30)
        path = training.save_weights_for_sampler("named").result().path
        for create in (client.create_sampling_client, training.create_sampling_client):
            futures.append(create(path).future())
            futures[-1].result(timeout=30)
        nobodys = client.create_sampling_client(model_path="tinker://nobody/sampler_weights/x")
        is_done = [future.done() for future in futures]
        return [is_done, isinstance(training, tinker.TrainingClient), raised(tinker, nobodys.result)]


@script
def inflight_sampler(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        training = trainer(client)
        samplers = [ready(training.save_weights_and_get_sampling_client(kind="inflight")) for _ in range(2)]
        params = tinker.SamplingParams(max_tokens=2, temperature=0.0)
        return [sampled(one.sample(text(tinker), 1, params).result()) for one in samplers]


# Custom losses


@script
def custom_loss(tinker: Any, url: str) -> Any:
    def squared(data: list[Any], logprobs: list[Any]) -> Any:
        loss = sum((one**2).sum() for one in logprobs)
        return loss, {"pairs:sum": float(len(data))}

    without_weights = tinker.Datum(model_input=text(tinker, 1, 2, 3), loss_fn_inputs={"target_tokens": [2, 3, 4]})
    with service(tinker, url) as client:
        training = trainer(client)
        future = training.forward_backward_custom([datum(tinker), without_weights], squared)
        optim = training.optim_step(tinker.AdamParams())
        return [loss_output(future.result()), plain(optim.result())]


@async_script
async def async_custom_loss(tinker: Any, url: str) -> Any:
    def total(data: list[Any], logprobs: list[Any]) -> Any:
        return sum(one.sum() for one in logprobs), {}

    client = service(tinker, url)
    training = await client.create_lora_training_client_async(MODEL, rank=8)
    future = await training.forward_backward_custom_async([datum(tinker)], total)
    output = loss_output(await future)
    await client.close("success")
    return output


@script
def traced_loss(tinker: Any, url: str) -> Any:
    """Traced once, then run here or on the server as the server's flag says."""
    import torch

    def weighted(logprobs: Any, advantages: Any) -> Any:
        scaled = torch.exp(logprobs) * advantages
        return -scaled.sum(), {"custom/size:mean": scaled.abs().mean(), "custom/total:sum": scaled.sum()}

    inputs = {"target_tokens": [2, 3, 4], "advantages": [1.0, -0.5, 0.25]}
    one = tinker.Datum(model_input=text(tinker, 1, 2, 3), loss_fn_inputs=inputs)
    with service(tinker, url) as client:
        training = trainer(client)
        handle = client.create_custom_loss(weighted, {"logprobs": 1, "advantages": 1}).result()
        output = training.forward_backward_custom([one, one], handle).result()
        shown = [handle.name, [[one.name, one.rank] for one in handle.inputs], handle.session_id, handle.loss_id]
        return [shown, list(handle.input_names), loss_output(output)]


# Saving and loading


@script
def save_and_load(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        training = trainer(client)
        training.forward_backward([datum(tinker)], "cross_entropy").result()
        training.optim_step(tinker.AdamParams()).result()
        state = training.save_state("state", ttl_seconds=7200, user_metadata={"step": "1"}).result()
        again = training.save_state("state", overwrite=True).result()
        sampler = training.save_weights_for_sampler("sampler", ttl_seconds=3600, user_metadata={"a": "b"}).result()
        external = training.save_weights_external("out", age_encryption_recipients=["age1recipient"]).result()
        with deprecated() as kinds:
            loaded = [training.load_state(state.path).result()]
            loaded.append(training.load_state_with_optimizer(state.path, weights_access_token="tml-other").result())
        return [plain(one) for one in (state, again, sampler, external, loaded)] + [kinds]


def _resumed(tinker: Any, training: Any) -> Any:
    forward = training.forward_backward([datum(tinker)], "cross_entropy")
    optim = training.optim_step(tinker.AdamParams())
    return [forward.result().metrics["loss:sum"], plain(optim.result()), plain(training.get_info())]


@script
def resume_from_state(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        first = ready(client.create_lora_training_client(MODEL, rank=16, train_mlp=False))
        first.forward_backward([datum(tinker)], "cross_entropy").result()
        first.optim_step(tinker.AdamParams()).result()
        path = first.save_state("state").result().path
        metadata = {"parent": "first"}
        fresh = ready(client.create_training_client_from_state(path, user_metadata=metadata))
        whole = ready(client.create_training_client_from_state_with_optimizer(path))
        foreign = ready(client.create_training_client_from_state(path, weights_access_token="tml-other"))
        return [_resumed(tinker, one) for one in (fresh, whole, foreign)]


@async_script
async def async_resume_from_state(tinker: Any, url: str) -> Any:
    client = service(tinker, url)
    first = await client.create_lora_training_client_async(MODEL, rank=16)
    await (await first.optim_step_async(tinker.AdamParams()))
    saved = await (await first.save_state_async("state"))
    fresh = await client.create_training_client_from_state_async(saved.path)
    whole = await client.create_training_client_from_state_with_optimizer_async(saved.path)
    results = [plain(await (await one.optim_step_async(tinker.AdamParams()))) for one in (fresh, whole)]
    await client.close("success")
    return results


@script
def copy_weights(tinker: Any, url: str) -> Any:
    with service(tinker, url, project_id="project-1") as client:
        path = trainer(client).save_state("state").result().path
        copied = client.copy_weights(path, ttl_seconds=3600, weights_access_token="tml-other").result()
        rest = tinker.RestClient(base_url=url, api_key=KEY)
        return [copied, rest.copy_weights(path, "project-2").result()]


# Sampling


@script
def ephemeral_sampler(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        training = trainer(client)
        responses = []
        for _ in range(2):
            sampling = ready(training.save_weights_and_get_sampling_client())
            responses.append(sampling.sample(text(tinker), 2, tinker.SamplingParams(max_tokens=3)).result())
            training.optim_step(tinker.AdamParams()).result()
        return [[sampled(response) for response in responses], sampling.get_base_model()]


@script
def samplers_from_paths(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        training = trainer(client)
        path = training.save_weights_for_sampler("named").result().path
        makers: list[Callable[[], Any]] = [
            lambda: client.create_sampling_client(base_model=MODEL),
            lambda: client.create_sampling_client(model_path=path),
            lambda: training.create_sampling_client(path),
        ]
        params = tinker.SamplingParams(max_tokens=2)
        return [[sampled(make().sample(text(tinker), 1, params).result()), make().get_base_model()] for make in makers]


@script
def sampling_options(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        sampling = ready(client.create_sampling_client(base_model=MODEL))
        sampling_params = tinker.SamplingParams
        params = [
            sampling_params(),
            sampling_params(max_tokens=4, seed=3, temperature=0.0, top_k=20, top_p=0.9),
            sampling_params(max_tokens=4, stop="\n"),
            sampling_params(max_tokens=4, stop=["a", "b"]),
            sampling_params(max_tokens=4, stop=[19]),
            sampling_params(max_tokens=4, stop=[]),
        ]
        responses = [sampling.sample(text(tinker), 1, one).result() for one in params]
        targets = tinker.TensorData(data=[5, -1, 7, 8], dtype="int64", shape=[2, 2])
        sparse = tinker.TensorData(
            data=[7], dtype="int64", shape=[2, 6], sparse_crow_indices=[0, 0, 1], sparse_col_indices=[3]
        )
        options: list[dict[str, Any]] = [
            {"include_prompt_logprobs": True},
            {"topk_prompt_logprobs": 2},
            {"topk_sample_logprobs": 3},
            {"target_prompt_logprobs": targets},
            {"target_prompt_logprobs": sparse},
            {"prompt_alt_tokens_k": 2},
            {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 1},
        ]
        short = tinker.SamplingParams(max_tokens=2)
        responses += [sampling.sample(text(tinker), 1, short, **option).result() for option in options]
        return [sampled(response) for response in responses]


@async_script
async def async_sampling(tinker: Any, url: str) -> Any:
    client = service(tinker, url)
    sampling = await client.create_sampling_client_async(base_model=MODEL)
    params = tinker.SamplingParams(max_tokens=2)
    response = await sampling.sample_async(text(tinker), num_samples=3, sampling_params=params)
    logprobs = await sampling.compute_logprobs_async(text(tinker))
    base_model = await sampling.get_base_model_async()
    await client.close("success")
    return [sampled(response), logprobs, base_model]


@script
def compute_logprobs(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        sampling = ready(client.create_sampling_client(base_model=MODEL))
        whole = sampling.compute_logprobs(text(tinker, 3, 1, 4, 1, 5)).result()
        return [whole, sampling.compute_logprobs(text(tinker, 3, 1, 4), prompt_logprobs_last_n=1).result()]


@script
def many_samples(tinker: Any, url: str) -> Any:
    """All at once, through whichever poller the server's flags choose."""
    with service(tinker, url) as client:
        sampling = ready(client.create_sampling_client(base_model=MODEL))
        params = tinker.SamplingParams(max_tokens=2)
        futures = [sampling.sample(text(tinker, 1, number), 1, params) for number in range(20)]
        return [future.result().sequences[0].tokens for future in futures]


@script
def copies_of_a_sampler(tinker: Any, url: str) -> Any:
    """A pickled copy and one made from a handle: each takes its own range of sequence numbers from the server."""
    os.environ["TINKER_API_KEY"] = KEY
    try:
        with service(tinker, url) as client:
            sampling = ready(client.create_sampling_client(base_model=MODEL))
            params = tinker.SamplingParams(max_tokens=2)
            copies = [sampling, pickle.loads(pickle.dumps(sampling))]
            copies.append(tinker.SamplingClient.from_sampler_handle(sampling.get_sampler_handle()))
            results = [sampled(copy.sample(text(tinker), 1, params).result()) for copy in copies]
            handle = sampling.get_sampler_handle()
            opened = base64.urlsafe_b64decode(handle + "=" * (-len(handle) % 4)).decode()
            return [results, isinstance(json.loads(opened), dict), KEY in opened]
    finally:
        del os.environ["TINKER_API_KEY"]


@script
def cancelled_sample(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        sampling = ready(client.create_sampling_client(base_model=MODEL))
        future = sampling.sample(text(tinker), 1, tinker.SamplingParams(max_tokens=2))
        arrived(url, "/api/v1/retrieve_future")
        cancelled = future.cancel()
        arrived(url, "/api/v1/cancel_future")
        return [cancelled, future.cancelled()]


def arrived(url: str, path: str) -> None:
    """Wait until the server has seen a request for this path."""
    for _ in range(1000):
        with urllib.request.urlopen(f"{url}/stats") as response:
            if json.load(response)["requests"].get(path):
                return
        time.sleep(0.01)
    raise AssertionError(f"no request for {path} came")


# Looking things up


@script
def rest_calls(tinker: Any, url: str) -> Any:
    with service(tinker, url, user_metadata={"team": "compat"}, display_name="first") as client:
        training = ready(client.create_lora_training_client(MODEL, rank=8, user_metadata={"k": "v"}))
        state = training.save_state("state").result().path
        sampler = training.save_weights_for_sampler("sampler").result().path
        external = training.save_weights_external("out").result().path
        sampling = ready(client.create_sampling_client(model_path=sampler))
        sampling.get_base_model()
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    run_id = rest.list_training_runs().result().training_runs[0].training_run_id
    session_id = rest.list_sessions().result().sessions[0]
    calls: list[Callable[[], Any]] = [
        lambda: rest.get_training_run(run_id),
        lambda: rest.get_training_run_by_tinker_path(state, access_scope="accessible"),
        lambda: rest.get_weights_info_by_tinker_path(state),
        lambda: rest.list_training_runs(limit=1, offset=0, project_id="project-default"),
        lambda: rest.list_checkpoints(run_id),
        lambda: rest.list_user_checkpoints(limit=2, offset=1),
        lambda: rest.get_session(session_id, access_scope="accessible"),
        lambda: rest.list_sessions(limit=5, offset=0, access_scope="accessible"),
        lambda: rest.get_sampler(f"{session_id}:sample:0"),
        lambda: rest.export_session_trace(session_id),
        lambda: rest.get_external_weights_urls(external),
        lambda: rest.set_checkpoint_ttl_from_tinker_path(state, 7200),
        lambda: rest.set_checkpoint_ttl_from_tinker_path(state, None),
        lambda: rest.publish_checkpoint_from_tinker_path(state),
        lambda: rest.unpublish_checkpoint_from_tinker_path(state),
        lambda: rest.assign_session_project(session_id, "project-9"),
        lambda: rest.delete_checkpoint_from_tinker_path(sampler),
        lambda: rest.delete_checkpoint(run_id, "external_weights/out"),
        lambda: rest.list_checkpoints(run_id),
    ]
    return [plain(call().result()) for call in calls]


@async_script
async def async_rest_calls(tinker: Any, url: str) -> Any:
    client = service(tinker, url)
    training = await client.create_lora_training_client_async(MODEL)
    state = (await (await training.save_state_async("state"))).path
    await client.close("success")
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    run_id = state.removeprefix("tinker://").split("/")[0]
    results = [
        await rest.get_training_run_async(run_id),
        await rest.get_training_run_by_tinker_path_async(state),
        await rest.get_weights_info_by_tinker_path(state),
        await rest.list_training_runs_async(limit=3),
        await rest.list_checkpoints_async(run_id),
        await rest.list_user_checkpoints_async(),
        await rest.get_session_async(run_id.split(":")[0]),
        await rest.list_sessions_async(),
        await rest.set_checkpoint_ttl_from_tinker_path_async(state, 3600),
        await rest.publish_checkpoint_from_tinker_path_async(state),
        await rest.unpublish_checkpoint_from_tinker_path_async(state),
        await rest.delete_checkpoint_async(run_id, "weights/state"),
    ]
    return plain(results)


@script
def session_search(tinker: Any, url: str) -> Any:
    for number in range(3):
        with service(tinker, url, user_metadata={"n": str(number)}, display_name=f"run {number}") as client:
            trainer(client).save_state("state").result()
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    types = tinker.types
    with deprecated() as kinds:
        first = rest.search_sessions(types.SessionSearchRequest(limit=2)).result()
        second = rest.search_sessions(types.SessionSearchRequest(limit=2, cursor=first.next_cursor)).result()
    finished = types.ClientFinishedSessionStatusQuery(reasons=["success"])
    narrow = types.SessionSearchRequest(
        user_metadata={"n": "1"},
        display_name="run 1",
        project_ids=["project-default"],
        owner=types.UserSearchOwner(owner_urns=["tml:organization_user:u-1"]),
        statuses=[types.ActiveSessionStatusQuery(), finished],
    )
    with deprecated():
        third = rest.search_sessions(narrow).result()
    return [plain(first), plain(second), plain(third), kinds]


@script
def admin_calls(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        trainer(client).save_state("state").result()
    admin = tinker.AdminClient(base_url=url, api_key=KEY)
    start, end = datetime(2030, 1, 1, tzinfo=UTC), "2030-01-02T00:00:00Z"
    results = [
        admin.get_audit_log(event_type="checkpoints", day=date(2030, 1, 1)).result(),
        admin.get_audit_log().result(),
        admin.get_billing_usage(start, end).result(),
        admin.get_current_checkpoint_storage_usage(project_id="project-1").result(),
        admin.get_current_checkpoint_storage_usage().result(),
    ]
    return plain(results)


@script
def capabilities(tinker: Any, url: str) -> Any:
    client = service(tinker, url)
    with deprecated() as kinds:
        runs = client.create_rest_client().list_training_runs().result()
    return [plain(client.get_server_capabilities()), plain(runs), kinds]


@script
def token_exchange(tinker: Any, url: str) -> Any:
    """With a server that hands out short-lived tokens for keys."""
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    with service(tinker, url) as client:
        info = trainer(client).get_info()
    return [plain(rest.whoami().result()), plain(info)]


# Sessions


@script
def session_options(tinker: Any, url: str) -> Any:
    os.environ["TINKER_TAGS"] = "one"  # of several, the official package sends them in no order
    os.environ["TINKER_PROJECT_ID"] = "project-env"
    try:
        options = {"user_metadata": {"a": "b"}, "display_name": "named", "default_headers_overrides": {"X-Extra": "1"}}
        with service(tinker, url, **options) as client:
            ready(client.create_sampling_client(base_model=MODEL))
        with service(tinker, url, project_id="project-arg") as client:
            ready(client.create_sampling_client(base_model=MODEL))
    finally:
        del os.environ["TINKER_TAGS"], os.environ["TINKER_PROJECT_ID"]


@script
def closing(tinker: Any, url: str) -> Any:
    """Every way a session can end, and what a closed client says."""
    seen = []
    for error in (ValueError("no"), KeyboardInterrupt()):
        try:
            with service(tinker, url) as client:
                trainer(client)
                raise error
        except (ValueError, KeyboardInterrupt) as passed:
            seen.append(type(passed).__name__)
    client = service(tinker, url)
    training = trainer(client)
    client.close("errored", detail="gave up").result()
    client.close("success").result()
    after = raised(tinker, lambda: training.optim_step(tinker.AdamParams()).result())
    unused = service(tinker, url)
    unused.close("success").result()
    return [seen, after]


# What goes wrong


@script
def bad_requests(tinker: Any, url: str) -> Any:
    """Refusals at the door, one status each; the server is told to refuse in this order."""
    with service(tinker, url) as client:
        training = trainer(client)
        training.forward_backward([datum(tinker)], "cross_entropy").result()
        refused = [
            raised(tinker, lambda: training.forward_backward([datum(tinker)], "cross_entropy").result())
            for _ in range(4)
        ]
        after = training.optim_step(tinker.AdamParams()).result()
        missing = raised(
            tinker, lambda: ready(client.create_sampling_client(model_path="tinker://no/sampler_weights/no"))
        )
        gone = raised(tinker, lambda: tinker.RestClient(base_url=url, api_key=KEY).get_training_run("no").result())
        return [refused, plain(after), missing, gone]


@script
def first_request_refused(tinker: Any, url: str) -> Any:
    """Before anything has worked: the refusal may be meant for the request, or for the way it is written."""
    with service(tinker, url) as client:
        training = trainer(client)
        refused = raised(tinker, lambda: training.forward_backward([datum(tinker)], "cross_entropy").result())
        return [refused, plain(training.optim_step(tinker.AdamParams()).result())]


@script
def failed_operations(tinker: Any, url: str) -> Any:
    """Accepted, then failed: once per category, and the operation after them works."""
    with service(tinker, url) as client:
        training = trainer(client)
        failed = [raised(tinker, lambda: training.optim_step(tinker.AdamParams()).result()) for _ in range(3)]
        unknown = raised(tinker, lambda: ready(client.create_lora_training_client("no/such-model")))
        sampling = ready(client.create_sampling_client(base_model=MODEL))
        sample = raised(tinker, lambda: sampling.sample(text(tinker), 1, tinker.SamplingParams()).result())
        return [failed, unknown, sample, plain(training.optim_step(tinker.AdamParams()).result())]


@script
def bad_calls(tinker: Any, url: str) -> Any:
    """Mistakes that never reach the server."""
    with service(tinker, url) as client:
        training = trainer(client)
        sampling = ready(client.create_sampling_client(base_model=MODEL))
        params, adam = tinker.SamplingParams(max_tokens=1), tinker.AdamParams()
        floats = tinker.TensorData(data=[1.0], dtype="float32", shape=[1, 1])
        actions: list[Callable[[], Any]] = [
            lambda: training.forward_backward([], "cross_entropy").result(),
            lambda: training.optim_step(adam, adam_params=adam),
            lambda: training.optim_step(),
            lambda: training.optim_step("adam"),
            lambda: client.create_sampling_client(),
            lambda: client.create_sampling_client(model_path="/some/folder"),
            lambda: sampling.sample(text(tinker), 1, params, target_prompt_logprobs=floats).result(),
            lambda: sampling.sample(text(tinker), 1, params, prompt_alt_tokens_k=-1).result(),
            lambda: sampling.sample(text(tinker), 1, params, prompt_logprobs_last_n=1).result(),
            lambda: tinker.ParsedCheckpointTinkerPath.from_tinker_path("tinker://run/other/name"),
            lambda: tinker.Datum(model_input=text(tinker), loss_fn_inputs={"unknown": [1, 2]}),
            lambda: datum(tinker).with_provenance(model_input=[], loss_fn_inputs=[]),
            lambda: tinker.types.SessionSearchRequest(limit=1000),
            lambda: tinker.AdamParams(no_such_field=1),
            lambda: tinker.ServiceClient(base_url=url, api_key="not-a-key").get_server_capabilities(),
        ]
        return [raised(tinker, action) for action in actions]


@script
def pending_results(tinker: Any, url: str) -> Any:
    """The server is not ready three times, in three ways."""
    with service(tinker, url) as client:
        training = trainer(client)
        return plain(training.optim_step(tinker.AdamParams()).result())


@script
def large_results(tinker: Any, url: str) -> Any:
    with service(tinker, url) as client:
        output = trainer(client).forward_backward([datum(tinker)], "cross_entropy").result()
        sampling = ready(client.create_sampling_client(base_model=MODEL))
        response = sampling.sample(text(tinker), 1, tinker.SamplingParams(max_tokens=3)).result()
        return [loss_output(output), sampled(response)]


@script
def retried_submissions(tinker: Any, url: str) -> Any:
    """A busy server, a lost promise and an overloaded one: each request gets through in the end."""
    with service(tinker, url) as client:
        step = trainer(client).optim_step(tinker.AdamParams()).result()
        sampling = ready(client.create_sampling_client(base_model=MODEL))
        params = tinker.SamplingParams(max_tokens=2)
        responses = [sampling.sample(text(tinker), 1, params).result() for _ in range(2)]
        return [plain(step), [sampled(response) for response in responses]]


@script
def concurrent_threads(tinker: Any, url: str) -> Any:
    """Two models trained from two threads: the numbers of each stay in order."""
    results: dict[int, Any] = {}
    with service(tinker, url) as client:
        models = [trainer(client) for _ in range(2)]

        def train(number: int) -> None:
            futures = [models[number].optim_step(tinker.AdamParams()) for _ in range(5)]
            results[number] = [plain(future.result()) for future in futures]

        threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [results[number] for number in range(2)]
