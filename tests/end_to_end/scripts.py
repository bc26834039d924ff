"""Programs for a real server: those of the compatibility suite, and some whose numbers mean something.

Like those, each works with whichever package is passed in as `tinker`, and returns plain values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.compat.plain import failure, loss_output, plain, sampled
from tests.compat.scripts import KEY, MODEL, SCRIPTS, deprecated, raised, ready, script, text, trainer
from tests.end_to_end.serving import OTHER_KEY
from tests.support.tiny_tokenizer import byte_level_bpe

__all__ = ["SCRIPTS"]

OTHER_MODEL = "tiny/model-2"


@contextmanager
def opened(tinker: Any, url: str, key: str = KEY) -> Iterator[Any]:
    """A client whose session ends with the block, if the package can end one."""
    client = tinker.ServiceClient(base_url=url, api_key=key)
    yield client
    if hasattr(client, "close"):
        client.close("success").result()


def rest_client(tinker: Any, url: str, key: str = KEY) -> Any:
    if hasattr(tinker, "RestClient"):
        return tinker.RestClient(base_url=url, api_key=key)
    return tinker.ServiceClient(base_url=url, api_key=key).create_rest_client()


def sentence(tinker: Any, first: int, length: int = 12) -> Any:
    """A datum whose every token follows from the one before."""
    tokens = [(first + 7 * place) % 250 for place in range(length + 1)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(tinker: Any, training: Any, steps: Sequence[int], learning_rate: float = 1e-2) -> list[float]:
    """One step for each number, all submitted before any result is awaited; gives back the losses."""
    futures = []
    for step in steps:
        futures.append(training.forward_backward([sentence(tinker, step), sentence(tinker, step + 3)], "cross_entropy"))
        training.optim_step(tinker.AdamParams(learning_rate=learning_rate, weight_decay=0.01, grad_clip_norm=1.0))
    return [future.result().metrics["loss:sum"] for future in futures]


def submitted(tinker: Any, training: Any, steps: Sequence[int]) -> list[Any]:
    """A pass over one datum and an optimizer step for each number; gives back the futures of the passes."""
    futures = []
    for step in steps:
        futures.append(training.forward_backward([sentence(tinker, step)], "cross_entropy"))
        training.optim_step(tinker.AdamParams(learning_rate=1e-2))
    return futures


def logprobs_of(output: Any) -> list[list[float]]:
    return [one["logprobs"].tolist() for one in output.loss_fn_outputs]


# Training


@script
def loss_falls(tinker: Any, url: str) -> Any:
    with opened(tinker, url) as client:
        return train(tinker, trainer(client), [1] * 15)


@script
def every_public_loss(tinker: Any, url: str) -> Any:
    """Each loss with the inputs it reads; the old log-probabilities are the model's own, so every ratio is 1."""
    prompt = text(tinker, 1, 2, 3, 4)
    targets = {"target_tokens": [2, 3, 4, 5]}
    with opened(tinker, url) as client:
        training = trainer(client)
        scored = tinker.Datum(model_input=prompt, loss_fn_inputs={**targets, "weights": [0.0, 1.0, 0.5, 2.0]})
        forward = training.forward([scored], "cross_entropy").result()
        inputs = {**targets, "logprobs": logprobs_of(forward)[0], "advantages": [1.0, -0.5, 0.25, 2.0]}
        one = tinker.Datum(model_input=prompt, loss_fn_inputs=inputs)
        masked = tinker.Datum(
            model_input=prompt, loss_fn_inputs={**inputs, "sequence_ratio_mask": [0.0, 1.0, 1.0, 1.0]}
        )
        results = {"cross_entropy": loss_output(forward)}
        for loss, config in {
            "importance_sampling": None,
            "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
            "cispo": {"clip_low_threshold": 0, "clip_high_threshold": 3.5},
            "dro": {"beta": 0.1},
            "gspo": {"clip_low_threshold": 0.7},
        }.items():
            example = masked if loss == "gspo" else one
            results[loss] = loss_output(training.forward_backward([example], loss, config).result())
        return results


@script
def tensors_the_loss_reads(tinker: Any, url: str) -> Any:
    """Lists, numpy arrays, torch tensors and tensor data; one and two dimensions; dense and sparse."""
    import numpy as np
    import torch

    targets_2d = torch.zeros(3, 40, dtype=torch.int64)
    targets_2d[0, 3] = targets_2d[2, 7] = 9
    weights_2d = torch.zeros(3, 40)
    weights_2d[0, 3] = weights_2d[2, 7] = 0.5
    forms = [
        {"target_tokens": [2, 3, 4], "weights": [0.0, 0.5, 1.0]},
        {"target_tokens": np.array([2, 3, 4], np.int32), "weights": np.array([0, 0.5, 1], np.float64)},
        {"target_tokens": torch.tensor([2, 3, 4]), "weights": torch.tensor([0, 0.5, 1], dtype=torch.bfloat16)},
        {
            "target_tokens": tinker.TensorData(data=[2, 3, 4], dtype="int64"),
            "weights": tinker.TensorData(data=[0.0, 0.5, 1.0], dtype="float32", shape=[3]),
        },
        {"target_tokens": np.arange(6).reshape(3, 2), "weights": np.ones((3, 2), np.float32)},
        {"target_tokens": targets_2d, "weights": weights_2d},
    ]
    data = [tinker.Datum(model_input=text(tinker, 1, 2, 3), loss_fn_inputs=form) for form in forms]
    with opened(tinker, url) as client:
        return loss_output(trainer(client).forward_backward(data, "cross_entropy").result())


@script
def gradients_add_up(tinker: Any, url: str) -> Any:
    """Two calls before a step are one call with both; `forward` leaves no gradient behind."""
    with opened(tinker, url) as client:
        apart, together = trainer(client), trainer(client)
        data = [sentence(tinker, 1), sentence(tinker, 2)]
        for one in data:
            apart.forward_backward([one], "cross_entropy")
        apart.forward([sentence(tinker, 3)], "cross_entropy")
        together.forward_backward(data, "cross_entropy")
        steps = [model.optim_step(tinker.AdamParams(learning_rate=1e-2)).result() for model in (apart, together)]
        after = [model.forward(data, "cross_entropy").result().metrics["loss:sum"] for model in (apart, together)]
        return [[step.metrics["grad_norm"] for step in steps], after]


@script
def two_owners_at_once(tinker: Any, url: str) -> Any:
    """Each alone, then both at the same time, on the same base model."""

    def losses(key: str, first: int) -> list[float]:
        with opened(tinker, url, key) as client:
            return train(tinker, trainer(client), range(first, first + 8))

    jobs = [(KEY, 1), (OTHER_KEY, 50)]
    alone = [losses(*job) for job in jobs]
    together: list[Any] = [None, None]

    def run(number: int) -> None:
        together[number] = losses(*jobs[number])

    in_threads([lambda number=number: run(number) for number in range(2)])  # type: ignore[misc]
    return [alone, together]


@script
def two_base_models(tinker: Any, url: str) -> Any:
    with opened(tinker, url) as client:
        models = [client.create_lora_training_client(name, rank=4, seed=1) for name in (MODEL, OTHER_MODEL)]
        return [train(tinker, model, [1] * 6) for model in models]


def in_threads(actions: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Saving and loading


@script
def save_and_load_again(tinker: Any, url: str) -> Any:
    with opened(tinker, url) as client:
        training = trainer(client)
        train(tinker, training, [1])
        state = training.save_state("state", ttl_seconds=7200, user_metadata={"step": "1"}).result()
        taken = raised(tinker, lambda: training.save_state("state").result())
        again = training.save_state("state", overwrite=True).result()
        sampler = training.save_weights_for_sampler("sampler", ttl_seconds=3600, user_metadata={"a": "b"}).result()
        external = training.save_weights_external("out").result()
        with deprecated():
            loaded = [training.load_state(state.path).result()]
            loaded.append(training.load_state_with_optimizer(state.path).result())
        return [plain(one) for one in (state, again, sampler, external, loaded)] + [taken]


@script
def resumed_and_uninterrupted(tinker: Any, url: str) -> Any:
    """Saved after three steps and a half: the half is a gradient that waits for its step."""
    before, after = [1, 2, 3], [4, 5, 6]
    adam = tinker.AdamParams(learning_rate=1e-2)
    with opened(tinker, url) as client:
        first = client.create_lora_training_client(MODEL, rank=8, seed=3, train_mlp=False)
        train(tinker, first, before)
        first.forward_backward([sentence(tinker, 9)], "cross_entropy")
        path = first.save_state("half-way").result().path
        whole = client.create_training_client_from_state_with_optimizer(path)
        weights_only = client.create_training_client_from_state(path)
        results = []
        for model in (first, whole, weights_only):
            step = model.optim_step(adam).result().metrics["grad_norm"]
            results.append([step, train(tinker, model, after)])
        infos = [plain(model.get_info()) for model in (first, whole)]
        return [results, infos]


# Sampling


@script
def sample_and_forward(tinker: Any, url: str) -> Any:
    """Log-probabilities of the same tokens and weights from sampling, from scoring a prompt, and from training."""
    prompt = [5, 6, 7]
    with opened(tinker, url) as client:
        training = trainer(client)
        train(tinker, training, [1, 2, 3], learning_rate=5e-2)
        sampling = training.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=24, seed=11, stop=[])
        sequence = sampling.sample(text(tinker, *prompt), 1, params).result().sequences[0]
        tokens = [*prompt, *sequence.tokens]
        scored = sampling.compute_logprobs(text(tinker, *tokens)).result()
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        one = tinker.Datum(model_input=text(tinker, *tokens[:-1]), loss_fn_inputs=inputs)
        forward = logprobs_of(training.forward([one], "cross_entropy").result())[0]
        skipped = len(prompt) - 1
        return {"sampled": sequence.logprobs, "scored": scored[skipped + 1 :], "forward": forward[skipped:]}


@script
def alone_and_in_a_crowd(tinker: Any, url: str) -> Any:
    with opened(tinker, url) as client:
        training = trainer(client)
        train(tinker, training, [1, 2], learning_rate=5e-2)
        samplers = [training.save_weights_and_get_sampling_client(), client.create_sampling_client(base_model=MODEL)]
        params = tinker.SamplingParams(max_tokens=16, seed=5, temperature=0.9, top_p=0.95, top_k=50)

        def drawn() -> list[Any]:
            return [sampler.sample(text(tinker, 9, 8, 7), 3, params) for sampler in samplers]

        def tokens(futures: Sequence[Any]) -> Any:
            return [[sequence.tokens for sequence in future.result().sequences] for future in futures]

        alone = [tokens([future])[0] for future in drawn()]
        unseeded = tinker.SamplingParams(max_tokens=20)
        crowd = [samplers[n % 2].sample(text(tinker, *range(1, 3 + n)), 2, unseeded) for n in range(10)]
        company = drawn()
        crowd += [samplers[n % 2].sample(text(tinker, 9, 8, 7, n), 2, unseeded) for n in range(10)]
        in_company = tokens(company)
        tokens(crowd)
        return [alone, in_company]


@script
def samplers_keep_their_weights(tinker: Any, url: str) -> Any:
    with opened(tinker, url) as client:
        training = trainer(client)
        path = training.save_weights_for_sampler("before").result().path
        old = [training.save_weights_and_get_sampling_client(), client.create_sampling_client(model_path=path)]
        params = tinker.SamplingParams(max_tokens=8, seed=2, temperature=0.7)

        def drawn(sampler: Any) -> Any:
            sequence = sampler.sample(text(tinker), 1, params).result().sequences[0]
            return [sequence.tokens, sequence.logprobs]

        before = [drawn(sampler) for sampler in old]
        train(tinker, training, [1, 2, 3], learning_rate=5e-2)
        after = [drawn(sampler) for sampler in old]
        return [before, after, drawn(training.save_weights_and_get_sampling_client())]


@script
def inflight_samplers(tinker: Any, url: str) -> Any:
    """What a sampler gives at first, after a step, after a snapshot, and with a newer one after publishing again."""
    with opened(tinker, url) as client:
        training = trainer(client)
        params = tinker.SamplingParams(max_tokens=8, temperature=0.0)

        def drawn(sampler: Any) -> Any:
            sequence = sampler.sample(text(tinker), 1, params).result().sequences[0]
            return [sequence.tokens, sequence.logprobs]

        older = ready(training.save_weights_and_get_sampling_client(kind="inflight"))
        first = drawn(older)
        train(tinker, training, [1, 2, 3], learning_rate=5e-2)
        after_training = drawn(older)
        snapshot = ready(training.save_weights_and_get_sampling_client())
        after_snapshot = drawn(older)
        newer = ready(training.save_weights_and_get_sampling_client(kind="inflight"))
        return [first, after_training, after_snapshot, drawn(older), drawn(newer), drawn(snapshot)]


@script
def seeded_sampling(tinker: Any, url: str) -> Any:
    """Every option, with seeds, so that the answer is one and the same for everybody."""
    with opened(tinker, url) as client:
        sampling = client.create_sampling_client(base_model=MODEL)

        def drawn(count: int = 1, options: dict[str, Any] | None = None, **params: Any) -> Any:
            chosen = tinker.SamplingParams(**{"max_tokens": 12, "seed": 4, **params})
            return sampled(sampling.sample(text(tinker), count, chosen, **(options or {})).result())

        plain_run = drawn(stop=[])
        tokens = plain_run["sequences"][0]["tokens"]
        targets = tinker.TensorData(data=[5, -1, 7, 8], dtype="int64", shape=[2, 2])
        sparse = tinker.TensorData(
            data=[7], dtype="int64", shape=[2, 6], sparse_crow_indices=[0, 0, 1], sparse_col_indices=[3]
        )
        return {
            "plain": plain_run,
            "greedy": drawn(temperature=0.0),
            "narrow": drawn(temperature=0.5, top_k=3, top_p=0.9),
            "several": drawn(4),
            "stop token": drawn(stop=[tokens[2]]),
            "stop text": drawn(stop=["e", "a"]),
            "prompt logprobs": drawn(options={"include_prompt_logprobs": True}),
            "last prompt logprob": drawn(options={"include_prompt_logprobs": True, "prompt_logprobs_last_n": 1}),
            "best of prompt": drawn(options={"topk_prompt_logprobs": 2}),
            "best of sample": drawn(options={"topk_sample_logprobs": 3}),
            "targets": drawn(options={"target_prompt_logprobs": targets}),
            "sparse targets": drawn(options={"target_prompt_logprobs": sparse}),
            "other tokens": drawn(options={"prompt_alt_tokens_k": 2}),
        }


@script
def stop_texts(tinker: Any, url: str) -> Any:
    """Tokens, stop reasons and texts of samples that end at one of three letters."""
    with opened(tinker, url) as client:
        sampling = client.create_sampling_client(base_model=MODEL)
        params = tinker.SamplingParams(max_tokens=400, seed=1, stop=["e", "a", "t"])
        sequences = sampling.sample(text(tinker), 4, params).result().sequences
        tokens = [list(sequence.tokens) for sequence in sequences]
        texts = [byte_level_bpe().decode(one, skip_special_tokens=False) for one in tokens]
        return [tokens, [str(sequence.stop_reason) for sequence in sequences], texts]


@script
def whole_context(tinker: Any, url: str) -> Any:
    """A prompt that fills the context can still be scored; a longer one is refused."""
    with opened(tinker, url) as client:
        sampling = client.create_sampling_client(base_model=MODEL)
        full = [token % 250 for token in range(512)]
        scored = sampling.compute_logprobs(text(tinker, *full)).result()
        longer = raised(tinker, lambda: sampling.compute_logprobs(text(tinker, *full, 1)).result())
        return [len(scored), longer["category"]]


@script
def abandoned_samples(tinker: Any, url: str) -> Any:
    """Cancelled while they run; whoever comes next is served."""
    with opened(tinker, url) as client:
        sampling = client.create_sampling_client(base_model=MODEL)
        params = tinker.SamplingParams(max_tokens=500, stop=[])
        futures = [sampling.sample(text(tinker, 1, number), 4, params) for number in range(4)]
        cancelled = [future.cancel() for future in futures]
        after = sampling.sample(text(tinker), 1, tinker.SamplingParams(max_tokens=2, seed=1)).result()
        return [cancelled, [future.cancelled() for future in futures], len(after.sequences)]


# Who may see what


@script
def published(tinker: Any, url: str) -> Any:
    """What was published can be sampled from and trained on by others, until it is not any more."""
    with opened(tinker, url) as mine, opened(tinker, url, OTHER_KEY) as theirs:
        training = trainer(mine)
        train(tinker, training, [1, 2])
        state = training.save_state("state").result().path
        weights = training.save_weights_for_sampler("sampler").result().path
        params = tinker.SamplingParams(max_tokens=4, seed=1)

        def uses(client: Any) -> Any:
            model = client.create_training_client_from_state(state)
            loss = model.forward([sentence(tinker, 1)], "cross_entropy").result().metrics["loss:sum"]
            sampler = client.create_sampling_client(model_path=weights)
            return [loss, sampler.sample(text(tinker), 1, params).result().sequences[0].tokens]

        rest = rest_client(tinker, url)
        before = raised(tinker, lambda: uses(theirs))
        for path in (state, weights):
            rest.publish_checkpoint_from_tinker_path(path).result()
        shared = [uses(mine), uses(theirs)]
        foreign_rest = rest_client(tinker, url, OTHER_KEY)
        deleted = raised(tinker, lambda: foreign_rest.delete_checkpoint_from_tinker_path(state).result())
        for path in (state, weights):
            rest.unpublish_checkpoint_from_tinker_path(path).result()
        return {"before": before, "shared": shared, "deleted": deleted, "after": raised(tinker, lambda: uses(theirs))}


@script
def strangers(tinker: Any, url: str) -> Any:
    """What a foreign key gets for things that exist, and for things that do not."""
    with opened(tinker, url) as client:
        training = trainer(client)
        state = training.save_state("state").result().path
        sampling = training.save_weights_for_sampler("sampler").result().path
        run_id = state.removeprefix("tinker://").split("/")[0]
    rest = rest_client(tinker, url, OTHER_KEY)
    with opened(tinker, url, OTHER_KEY) as theirs:

        def attempts(run: str, saved: str, weights: str) -> list[Any]:
            actions: list[Callable[[], Any]] = [
                lambda: rest.get_training_run(run).result(),
                lambda: rest.get_weights_info_by_tinker_path(saved).result(),
                lambda: rest.list_checkpoints(run).result(),
                lambda: rest.publish_checkpoint_from_tinker_path(saved).result(),
                lambda: rest.set_checkpoint_ttl_from_tinker_path(saved, 7200).result(),
                lambda: rest.delete_checkpoint_from_tinker_path(saved).result(),
                lambda: rest.get_session(run.split(":")[0]).result(),
                lambda: ready(theirs.create_training_client_from_state(saved)),
                lambda: ready(theirs.create_sampling_client(model_path=weights)),
            ]
            return [_outcome(tinker, action) for action in actions]

        real = attempts(run_id, state, sampling)
        missing_run = "00000000-0000-4000-8000-000000000000:train:0"
        made_up = attempts(*(path.replace(run_id, missing_run) for path in (run_id, state, sampling)))
        listed = [run.training_run_id for run in rest.list_training_runs(limit=100).result().training_runs]
        own = rest_client(tinker, url).get_weights_info_by_tinker_path(state).result()
        return {"real": real, "made up": made_up, "listed": run_id in listed, "own": plain(own)}


def _outcome(tinker: Any, action: Callable[[], Any]) -> Any:
    try:
        return plain(action())
    except Exception as error:  # noqa: BLE001 - whatever a user would see
        seen = failure(tinker, error)
        return [seen["failure"], seen["status_code"], seen["category"]]


@script
def downloads(tinker: Any, url: str) -> Any:
    """The files of an external checkpoint, by name, with their sizes."""
    import urllib.request

    with opened(tinker, url) as client:
        training = trainer(client)
        train(tinker, training, [1])
        path = training.save_weights_external("out").result().path
    rest = rest_client(tinker, url)
    sizes = {}
    for name, address in rest.get_external_weights_urls(path).result().urls.items():
        with urllib.request.urlopen(address) as response:
            sizes[name] = len(response.read())
    return sizes


# What the oldest clients know


@script
def losses_of_old(tinker: Any, url: str) -> Any:
    """The losses and calls that every release has."""
    prompt, targets = text(tinker, 1, 2, 3), {"target_tokens": [2, 3, 4]}
    with opened(tinker, url) as client:
        training = client.create_lora_training_client(MODEL, rank=8, seed=1)
        scored = tinker.Datum(model_input=prompt, loss_fn_inputs={**targets, "weights": [0.0, 1.0, 0.5]})
        rewarded = tinker.Datum(
            model_input=prompt,
            loss_fn_inputs={**targets, "logprobs": [-5.0, -5.5, -6.0], "advantages": [1.0, -0.5, 0.25]},
        )
        outputs = [training.forward([scored], "cross_entropy").result()]
        outputs += [
            training.forward_backward([rewarded], loss).result()
            for loss in ("importance_sampling", "ppo", "cispo", "dro")
        ]
        step = training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        return [[output.metrics["loss:sum"], logprobs_of(output)] for output in outputs] + [dict(step.metrics)]


@script
def lookups_of_old(tinker: Any, url: str) -> Any:
    with opened(tinker, url) as client:
        supported = sorted(model.model_name for model in client.get_server_capabilities().supported_models)
        training = client.create_lora_training_client(MODEL, rank=8, seed=1)
        state = training.save_state("state").result().path
        training.save_weights_for_sampler("sampler").result()
        run_id = training.get_info().model_id
    rest = rest_client(tinker, url)
    run = rest.get_training_run(run_id).result()
    info = rest.get_weights_info_by_tinker_path(state).result()
    checkpoints = rest.list_checkpoints(run_id).result().checkpoints
    rest.publish_checkpoint_from_tinker_path(state).result()
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    rest.delete_checkpoint_from_tinker_path(state).result()
    left = rest.list_checkpoints(run_id).result().checkpoints
    return {
        "supported": supported,
        "run": [run.base_model, run.lora_rank],
        "info": [info.base_model, info.lora_rank],
        "checkpoints": sorted(one.checkpoint_id for one in checkpoints),
        "left": [one.checkpoint_id for one in left],
    }


# Crashes


@script
def pipelined_training(tinker: Any, url: str) -> Any:
    """Many steps, all submitted at once."""
    with opened(tinker, url) as client:
        return train(tinker, trainer(client), range(40))
