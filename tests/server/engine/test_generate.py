"""A sample depends on its own request alone, and equals what a plain forward pass says."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.engine.oracle import new_adapter, with_peft
from tests.server.tiny_models import FAMILIES, make_model, save_model
from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapters import FrozenAdapter
from tinsmith.server.engine.attention import PackedCausal
from tinsmith.server.engine.generate import Generator, SampleDone
from tinsmith.server.engine.lora import LoraRows
from tinsmith.server.engine.model import Transformer
from tinsmith.server.engine.running import SampleWork
from tinsmith.server.engine.weights import load_model
from tinsmith.types import SampleResponse, SamplingParams, TensorData

EOS = 2
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 97, 41)]
OTHER = [int(token) for token in np.random.default_rng(1).integers(3, 97, 30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return load_model(save_model(tmp_path_factory.mktemp("llama")), "cpu", torch.float32)


@pytest.fixture(scope="module")
def adapters(model: Transformer) -> list[FrozenAdapter]:
    return [new_adapter(model, rank, seed).frozen_copy() for rank, seed in ((4, 1), (2, 2))]


def generator(model: Transformer, kv_tokens: int = 4096, **options: Any) -> Generator:
    return Generator(model, kv_tokens, [EOS], **options)


def work(key: object = "a", prompt: Sequence[int] = PROMPT, **fields: Any) -> SampleWork:
    """Unknown fields are those of SamplingParams."""
    names = SamplingParams.__struct_fields__
    params = SamplingParams(
        **{"max_tokens": 12, "seed": 5, "stop": [], **{n: v for n, v in fields.items() if n in names}}
    )
    return SampleWork(key, prompt, params, **{n: v for n, v in fields.items() if n not in names})


def finish(running: Generator) -> dict[Any, SampleDone]:
    """All results by key; bounded, and with nothing left behind."""
    done: dict[Any, SampleDone] = {}
    for _ in range(5000):
        if not running.has_work():
            break
        done |= {result.key: result for result in running.step()}
    assert not running.has_work()
    assert running.blocks.num_available == running.blocks.num_blocks, "blocks leaked"
    return done


def sample(running: Generator, *works: SampleWork) -> list[SampleResponse]:
    for one in works:
        running.add(one)
    done = finish(running)
    responses = []
    for one in works:
        response = done[one.key].response
        assert response is not None, done[one.key].error
        responses.append(response)
    return responses


def tokens_of(response: SampleResponse) -> list[list[int]]:
    return [sequence.tokens for sequence in response.sequences]


def forward(model: Transformer, tokens: Sequence[int], adapter: FrozenAdapter | None = None) -> torch.Tensor:
    """Log-probabilities after every token: [T, vocab]."""
    lora = LoraRows([(0, len(tokens), adapter)])
    with torch.inference_mode():
        hidden = model.hidden(torch.tensor(tokens), torch.arange(len(tokens)), PackedCausal([len(tokens)]), lora)
        return model.logits(hidden, lora).log_softmax(-1)


# --- what is sampled -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_samples_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = make_model(family)
    ours = load_model(save_model(tmp_path, family), "cpu", torch.float32)
    expected = reference.generate(torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, eos_token_id=None)
    [response] = sample(generator(ours), work(temperature=0, max_tokens=30))
    assert response.sequences[0].tokens == expected[0, len(PROMPT) :].tolist()
    assert response.sequences[0].stop_reason == "length"


def test_greedy_samples_of_an_adapter_equal_those_of_peft(model: Transformer) -> None:
    adapter = new_adapter(model, 4, 3)
    reference = with_peft(make_model(), adapter)
    expected = reference.generate(
        input_ids=torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, eos_token_id=None
    )
    adapted, plain = sample(
        generator(model),
        work("adapted", adapter=adapter.frozen_copy(), temperature=0, max_tokens=30),
        work("plain", temperature=0, max_tokens=30),
    )
    assert adapted.sequences[0].tokens == expected[0, len(PROMPT) :].tolist()
    assert adapted.sequences[0].tokens != plain.sequences[0].tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_sampled_log_probabilities_equal_a_forward_pass(
    model: Transformer, adapters: list[FrozenAdapter], temperature: float
) -> None:
    [response] = sample(
        generator(model), work(adapter=adapters[0], num_samples=3, temperature=temperature, topk_sample_logprobs=5)
    )
    for sequence in response.sequences:
        expected = forward(model, PROMPT + sequence.tokens, adapters[0])[len(PROMPT) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(sequence.logprobs_np, chosen.numpy(), atol=1e-4)
        assert sequence.topk_logprobs_np is not None
        values, ids = expected.topk(5)
        assert sequence.topk_logprobs_np.token_ids.tolist() == ids.tolist()
        np.testing.assert_allclose(sequence.topk_logprobs_np.logprobs, values.numpy(), atol=1e-4)


def test_first_tokens_follow_the_models_distribution(model: Transformer) -> None:
    [response] = sample(generator(model), work(num_samples=5000, max_tokens=1))
    chances = forward(model, PROMPT)[-1].exp().double().numpy()
    seen = np.bincount([tokens[0] for tokens in tokens_of(response)], minlength=97)
    common = chances * 5000 >= 5
    chi_square = float(((seen - chances * 5000)[common] ** 2 / (chances * 5000)[common]).sum())
    assert chi_square < common.sum() + 4 * math.sqrt(2 * common.sum())


def test_mixed_precision_samples_agree_with_its_own_forward_pass(tmp_path: Path) -> None:
    mixed = load_model(save_model(tmp_path), "cpu", torch.bfloat16)
    [response] = sample(generator(mixed), work(num_samples=2))
    for sequence in response.sequences:
        expected = forward(mixed, PROMPT + sequence.tokens)[len(PROMPT) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(sequence.logprobs_np, chosen.numpy(), atol=0.15)


# --- neighbours do not matter ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(model: Transformer, adapters: list[FrozenAdapter]) -> SampleResponse:
    return sample(generator(model), work(num_samples=3, adapter=adapters[0]))[0]


def assert_same(response: SampleResponse, expected: SampleResponse) -> None:
    assert tokens_of(response) == tokens_of(expected)
    for one, two in zip(response.sequences, expected.sequences, strict=True):
        np.testing.assert_allclose(one.logprobs_np, two.logprobs_np, atol=1e-4)


def crowd(adapters: list[FrozenAdapter]) -> list[SampleWork]:
    return [
        work(index, PROMPT[: 5 + 3 * index], adapter=[None, *adapters][index % 3], num_samples=1 + index % 2,
             max_tokens=3 + 2 * index, temperature=0.3 * index, seed=index)
        for index in range(9)
    ]  # fmt: skip


def test_seeded_samples_are_the_same_in_a_crowd(
    model: Transformer, adapters: list[FrozenAdapter], alone: SampleResponse
) -> None:
    neighbours = crowd(adapters)
    mine = work(num_samples=3, adapter=adapters[0])
    response = sample(generator(model), *neighbours[:5], mine, *neighbours[5:])[5]
    assert_same(response, alone)


def test_seeded_samples_are_the_same_when_they_join_late(
    model: Transformer, adapters: list[FrozenAdapter], alone: SampleResponse
) -> None:
    running = generator(model)
    for neighbour in crowd(adapters):
        running.add(neighbour)
    for _ in range(4):
        running.step()
    [response] = sample(running, work(num_samples=3, adapter=adapters[0]))
    assert_same(response, alone)


@pytest.mark.parametrize("chunk", [1, 3, 16, 40, 41])
def test_seeded_samples_are_the_same_for_any_chunk_of_prefill(
    model: Transformer, adapters: list[FrozenAdapter], alone: SampleResponse, chunk: int
) -> None:
    running = generator(model, prefill_tokens=chunk)
    assert_same(sample(running, work(num_samples=3, adapter=adapters[0]), *crowd(adapters))[0], alone)


@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_seeded_samples_are_the_same_for_any_block_size(
    model: Transformer, adapters: list[FrozenAdapter], alone: SampleResponse, block_size: int
) -> None:
    running = generator(model, block_size=block_size)
    assert_same(sample(running, work(num_samples=3, adapter=adapters[0]), *crowd(adapters))[0], alone)


def test_the_number_of_samples_does_not_change_the_first_ones(
    model: Transformer, adapters: list[FrozenAdapter], alone: SampleResponse
) -> None:
    [many] = sample(generator(model), work(num_samples=30, adapter=adapters[0]))
    assert tokens_of(many)[:3] == tokens_of(alone)
    assert len({tuple(tokens) for tokens in tokens_of(many)}) == 30


def test_without_a_seed_samples_differ(model: Transformer) -> None:
    one, two = sample(generator(model), work("one", seed=None), work("two", seed=None))
    assert tokens_of(one) != tokens_of(two)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1e30])
def test_an_adapter_with_broken_weights_is_refused_and_its_neighbours_go_on(
    model: Transformer, adapters: list[FrozenAdapter], alone: SampleResponse, weight: float
) -> None:
    live = new_adapter(model, 4, 4)
    live.weights[7] = weight
    running = generator(model)
    running.add(work("broken", adapter=live.frozen_copy(), num_samples=2))
    running.add(work("good", num_samples=3, adapter=adapters[0]))
    done = finish(running)
    assert isinstance(done["broken"].error, InvalidInputError)
    assert "training has diverged" in str(done["broken"].error)
    assert done["good"].response is not None
    assert_same(done["good"].response, alone)


class Poisoned(Transformer):
    """Token 96 means NaN."""

    def hidden(self, tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return super().hidden(tokens, *args, **options).masked_fill((tokens == 96)[:, None], float("nan"))


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}, {"topk_sample_logprobs": 3}]
)
def test_probabilities_that_are_not_finite_fail_their_own_request_only(
    model: Transformer, adapters: list[FrozenAdapter], alone: SampleResponse, params: dict[str, Any]
) -> None:
    poisoned = Poisoned(model.shape, model.embedding, model.layers, model.final_norm, model.head)
    running = generator(poisoned)
    running.add(work("broken", [5, 96], num_samples=2, **params))
    running.add(work("good", num_samples=3, adapter=adapters[0]))
    done = finish(running)
    assert "not finite" in str(done["broken"].error)
    assert done["good"].response is not None
    assert_same(done["good"].response, alone)


class Failing(Transformer):
    """Runs out of memory at chosen calls."""

    calls = 0
    failures: frozenset[int] = frozenset()

    def hidden(self, *args: Any, **options: Any) -> torch.Tensor:
        self._count()
        return super().hidden(*args, **options)

    def logits(self, *args: Any, **options: Any) -> torch.Tensor:
        self._count()
        return super().logits(*args, **options)

    def _count(self) -> None:
        type(self).calls += 1
        if self.calls in self.failures:
            raise MemoryError


def test_a_step_that_fails_on_the_device_can_be_repeated(
    model: Transformer, adapters: list[FrozenAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [*crowd(adapters), work(num_samples=3, prompt_logprobs=True, prompt_alt_tokens_k=2)]
    expected = sample(generator(model, prefill_tokens=16), *works)
    monkeypatch.setattr(Failing, "failures", frozenset(range(1, 200, 3)))
    failing = Failing(model.shape, model.embedding, model.layers, model.final_norm, model.head)
    running = generator(failing, prefill_tokens=16)
    for one in works:
        running.add(one)
    done: dict[Any, SampleDone] = {}
    num_failures = 0
    for _ in range(300):
        try:
            done |= {result.key: result for result in running.step()}
        except MemoryError:
            num_failures += 1
    assert num_failures > 10
    for one, wanted in zip(works, expected, strict=True):
        response = done[one.key].response
        assert response is not None
        assert_same(response, wanted)
    assert running.blocks.num_available == running.blocks.num_blocks


# --- the prefix cache ------------------------------------------------------------------------------------------------


def test_a_repeated_prompt_is_not_computed_again(
    model: Transformer, adapters: list[FrozenAdapter], alone: SampleResponse
) -> None:
    running = generator(model, block_size=4)
    [first] = sample(running, work(num_samples=3, adapter=adapters[0]))
    assert (first.prompt_cache_hit_tokens, running.num_prefilled_tokens) == (0, 41)
    for num_samples in (1, 3):
        before = running.num_prefilled_tokens
        [again] = sample(running, work(num_samples=num_samples, adapter=adapters[0]))
        assert (again.prompt_cache_hit_tokens, running.num_prefilled_tokens - before) == (40, 1)
        assert tokens_of(again) == tokens_of(alone)[:num_samples]


def test_what_somebody_else_has_sent_is_not_found(model: Transformer, adapters: list[FrozenAdapter]) -> None:
    """How much is found is told, and would tell what others have sent."""
    running = generator(model, block_size=4)
    for adapter in (None, adapters[0]):
        for owner, found in (("one", 0), ("other", 0), ("one", 40)):
            [response] = sample(running, dataclasses.replace(work(adapter=adapter), owner=owner))
            assert response.prompt_cache_hit_tokens == found


def test_a_long_shared_prefix_is_referred_to_and_a_short_one_copied(tmp_path: Path) -> None:
    long = load_model(save_model(tmp_path, max_position_embeddings=2048), "cpu", torch.float32)
    prompt = [int(token) for token in np.random.default_rng(2).integers(3, 97, 700)]
    running = generator(long, 8192)
    works = [work(index, [*prompt, index], seed=index, num_samples=1 + index % 2) for index in range(6)]
    sample(running, work("first", prompt))
    together = sample(running, *works)
    assert {response.prompt_cache_hit_tokens for response in together} == {688}
    fresh = [sample(generator(long, 8192), one)[0] for one in works]
    assert [tokens_of(response) for response in together] == [tokens_of(response) for response in fresh]


def test_equal_prompts_that_arrive_together_are_computed_once(model: Transformer) -> None:
    running = generator(model, block_size=4)
    responses = sample(running, *(work(index, seed=index) for index in range(8)))
    assert running.num_prefilled_tokens == 41 + 7
    alone = [sample(generator(model), work(index, seed=index))[0] for index in range(8)]
    assert [tokens_of(one) for one in responses] == [tokens_of(one) for one in alone]


def test_a_conversation_goes_on_from_what_was_sampled(model: Transformer) -> None:
    running = generator(model, block_size=4)
    [turn] = sample(running, work())
    longer = [*PROMPT, *turn.sequences[0].tokens, 9]
    [response] = sample(running, work(prompt=longer))
    assert response.prompt_cache_hit_tokens == (41 + 11) // 4 * 4
    assert tokens_of(response) == tokens_of(sample(generator(model), work(prompt=longer))[0])


def test_another_adapters_prefix_is_not_used(model: Transformer, adapters: list[FrozenAdapter]) -> None:
    running = generator(model, block_size=4)
    for adapter in (None, *adapters):
        [response] = sample(running, work(adapter=adapter))
        assert response.prompt_cache_hit_tokens == 0


def test_a_full_cache_makes_room_from_what_nobody_uses(model: Transformer) -> None:
    running = generator(model, kv_tokens=64, block_size=4)
    for start in range(10):
        prompt = [*OTHER[start:], *OTHER[:start]]
        [response] = sample(running, work(prompt=prompt))
        assert tokens_of(response) == tokens_of(sample(generator(model), work(prompt=prompt))[0])


def test_a_request_that_fills_the_cache_does_without_its_cached_prefix(model: Transformer) -> None:
    running = generator(model, kv_tokens=44, block_size=4)
    sample(running, work(max_tokens=4))
    [response] = sample(running, work(max_tokens=4))
    assert response.prompt_cache_hit_tokens == 0


# --- room ------------------------------------------------------------------------------------------------------------


def test_samples_that_do_not_fit_together_run_one_after_another(model: Transformer) -> None:
    expected = sample(generator(model), work(num_samples=20))[0]
    running = generator(model, kv_tokens=41 + 3 + 2 * 56, block_size=4)
    assert_same(sample(running, work(num_samples=20))[0], expected)


def test_requests_wait_for_room_and_are_served_in_order(model: Transformer) -> None:
    running = generator(model, kv_tokens=112, block_size=4)
    for index in range(6):
        running.add(work(index, [*PROMPT[:30], index]))
    finished = []
    while running.has_work():
        finished += [done.key for done in running.step()]
        used = sum(sequence.table is not None for sequence in running._batch.rows)
        assert used <= 2
    assert finished == list(range(6))


def test_a_long_prompt_does_not_stop_running_samples(model: Transformer) -> None:
    running = generator(model, prefill_tokens=4)
    running.add(work("running", PROMPT[:4], max_tokens=8))
    running.step()
    running.add(work("long", PROMPT, max_tokens=1))
    keys = [done.key for _ in range(20) for done in running.step()]
    assert keys == ["running", "long"]


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_no_history_of_requests_leaks_blocks(data: st.DataObject) -> None:
    running = generator(_shared_model(), kv_tokens=160, block_size=4, prefill_tokens=data.draw(st.integers(1, 50)))
    added: set[int] = set()
    finished: set[object] = set()
    for key in range(data.draw(st.integers(1, 12))):
        length = data.draw(st.integers(1, 41))
        running.add(work(key, PROMPT[:length], num_samples=data.draw(st.integers(1, 4)), stop=None, seed=key,
                         max_tokens=data.draw(st.integers(0, 12)), temperature=1.5))  # fmt: skip
        added.add(key)
        for _ in range(data.draw(st.integers(0, 4))):
            finished |= {done.key for done in running.step()}
        if data.draw(st.booleans()):
            running.cancel(data.draw(st.sampled_from(sorted(added))))
        in_use = {id(table): table for table in _tables(running)}.values()
        counts = np.zeros(running.blocks.num_blocks, int)
        for blocks in in_use:
            counts[blocks] += 1
        assert counts.tolist() == running.blocks.references.tolist()
    finish(running)


def _tables(running: Generator) -> list[np.ndarray]:
    requests = list(running._requests.values())
    tables = [request.table.blocks for request in requests if request.table is not None]
    tables += [request.tail for request in requests if request.tail is not None]
    samples = [sequence for request in requests for sequence in request.samples]
    return tables + [sequence.table.blocks for sequence in samples if sequence.table is not None]


_models: list[Transformer] = []


@pytest.fixture(autouse=True)
def _share(model: Transformer) -> None:
    """Hypothesis runs many examples in one test, which module fixtures reach only through here."""
    _models[:] = [model]


def _shared_model() -> Transformer:
    return _models[0]


def test_a_cancelled_request_frees_its_room_at_once_and_others_go_on(model: Transformer, alone: SampleResponse) -> None:
    running = generator(model)
    running.add(work("keep", num_samples=2))
    running.add(work("drop", OTHER, num_samples=4))
    running.step()
    running.cancel("drop")
    kept = running.blocks.num_blocks - running.blocks.num_available
    expected = generator(model)
    expected.add(work("keep", num_samples=2))
    expected.step()
    assert kept == expected.blocks.num_blocks - expected.blocks.num_available
    done = finish(running)
    assert list(done) == ["keep"]
    running.cancel("never seen")


# --- where samples end -----------------------------------------------------------------------------------------------


def pieces(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


@pytest.fixture(scope="module")
def greedy(model: Transformer) -> list[int]:
    return sample(generator(model), work(temperature=0, max_tokens=20))[0].sequences[0].tokens


def first_stop(greedy: list[int], stops: Callable[[list[int]], bool]) -> list[int]:
    return next(greedy[:end] for end in range(1, len(greedy) + 1) if stops(greedy[:end]))


def test_a_stop_text_ends_a_sample_with_the_token_that_completes_it(model: Transformer, greedy: list[int]) -> None:
    stop = pieces(greedy)[pieces(greedy).index(">", 18) - 1 :][:3]  # the end of one token and the beginning of the next
    expected = first_stop(greedy, lambda tokens: stop in pieces(tokens))
    [response] = sample(generator(model), work(temperature=0, max_tokens=20, stop=[stop, "never"], decode=pieces))
    assert response.sequences[0].tokens == expected
    assert len(expected) < 20
    assert response.sequences[0].stop_reason == "stop"
    assert response.sequences[0].logprobs is not None
    assert len(response.sequences[0].logprobs) == len(expected)


def test_a_stop_token_ends_a_sample_and_is_part_of_it(model: Transformer, greedy: list[int]) -> None:
    expected = first_stop(greedy, lambda tokens: tokens[-1] == greedy[6])
    [response] = sample(generator(model), work(temperature=0, max_tokens=20, stop=[greedy[6]]))
    assert (response.sequences[0].tokens, response.sequences[0].stop_reason) == (expected, "stop")


def test_without_a_stop_the_end_of_text_token_ends_a_sample(model: Transformer, greedy: list[int]) -> None:
    running = Generator(model, 4096, [greedy[4]])
    stopped, endless = sample(
        running, work("a", temperature=0, max_tokens=20, stop=None), work("b", temperature=0, max_tokens=20)
    )
    assert stopped.sequences[0].tokens == first_stop(greedy, lambda tokens: tokens[-1] == greedy[4])
    assert endless.sequences[0].tokens == greedy


def test_a_stop_at_the_last_allowed_token_is_a_stop(model: Transformer, greedy: list[int]) -> None:
    length = len(first_stop(greedy, lambda tokens: tokens[-1] == greedy[6]))
    [response] = sample(generator(model), work(temperature=0, max_tokens=length, stop=[greedy[6]]))
    assert response.sequences[0].stop_reason == "stop"


def test_without_max_tokens_a_sample_goes_to_the_end_of_the_context(model: Transformer) -> None:
    [response] = sample(generator(model, max_context=60), work(max_tokens=None))
    assert len(response.sequences[0].tokens) == 60 - 41


def test_without_max_tokens_a_sample_goes_to_the_end_of_a_cache_that_is_shorter(model: Transformer) -> None:
    [response] = sample(generator(model, kv_tokens=48), work(max_tokens=None))
    assert len(response.sequences[0].tokens) == 48 - 41
    several = sample(generator(model, kv_tokens=112), work(max_tokens=None, num_samples=2))  # each has its own prompt
    assert [len(tokens) for tokens in tokens_of(*several)] == [64 - 41] * 2


def test_no_tokens_may_be_asked_for(model: Transformer) -> None:
    [response] = sample(generator(model), work(max_tokens=0, num_samples=2, prompt_logprobs=True))
    assert tokens_of(response) == [[], []]
    assert response.prompt_logprobs_np is not None


def test_a_tokenizer_that_fails_fails_its_request_only(model: Transformer) -> None:
    def broken(tokens: list[int]) -> str:
        raise KeyError(tokens[-1])

    running = generator(model)
    running.add(work("broken", stop="x", decode=broken))
    running.add(work("good"))
    done = finish(running)
    assert "could not decode" in str(done["broken"].error)
    assert done["good"].response is not None


# --- what is asked about the prompt ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("last_n", [None, 1, 9, 40])
def test_prompt_log_probabilities_equal_a_forward_pass(
    model: Transformer, adapters: list[FrozenAdapter], chunk: int, last_n: int | None
) -> None:
    running = generator(model, prefill_tokens=chunk)
    sample(running, work(adapter=adapters[0]))  # a cached prefix must not hide positions that are asked for
    [response] = sample(running, work(adapter=adapters[0], prompt_logprobs=True, topk_prompt_logprobs=4,
                                      prompt_logprobs_last_n=last_n))  # fmt: skip
    expected = forward(model, PROMPT, adapters[0])[:-1]
    chosen = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
    first = 41 - (last_n or 40)
    assert response.prompt_logprobs_np is not None
    assert np.isnan(response.prompt_logprobs_np[:first]).all()
    np.testing.assert_allclose(response.prompt_logprobs_np[first:], chosen[first - 1 :], atol=1e-4)
    topk = response.topk_prompt_logprobs
    assert topk is not None
    assert topk[:first] == [None] * first
    values, ids = expected.topk(4)
    assert [[token for token, _ in row or []] for row in topk[first:]] == ids[first - 1 :].tolist()
    np.testing.assert_allclose(
        [[value for _, value in row or []] for row in topk[first:]], values[first - 1 :], atol=1e-4
    )


def test_log_probabilities_of_a_suffix_use_the_cached_prefix(model: Transformer) -> None:
    running = generator(model, block_size=4)
    sample(running, work())
    [response] = sample(running, work(prompt_logprobs=True, prompt_logprobs_last_n=5))
    assert response.prompt_cache_hit_tokens == 35 // 4 * 4


@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_named_tokens_are_scored_in_the_layout_of_the_request(model: Transformer, layout: str) -> None:
    asked = np.random.default_rng(3).integers(0, 97, (40, 3))
    asked[np.random.default_rng(4).random((40, 3)) < (0.3 if layout == "dense" else 0.9)] = -1
    targets = TensorData.from_numpy(asked) if layout == "dense" else TensorData.from_numpy_sparse(asked, -1)
    assert (targets.csr is not None) == (layout == "sparse")
    [response] = sample(generator(model, prefill_tokens=16), work(target_prompt_logprobs=targets))
    expected = forward(model, PROMPT)[:-1].gather(1, torch.from_numpy(asked).clamp(min=0)).numpy()
    result = response.target_prompt_logprobs
    assert result is not None
    assert (result.dtype, result.shape, result.csr is None) == ("float32", [40, 3], layout == "dense")
    np.testing.assert_allclose(result.to_numpy(), np.where(asked < 0, 0, expected), atol=1e-4)


def test_alternatives_to_prompt_tokens_are_drawn_from_the_model(model: Transformer) -> None:
    [response] = sample(
        generator(model, prefill_tokens=16), work(prompt_alt_tokens_k=400, temperature=0.8, max_tokens=1)
    )
    drawn = response.prompt_alt_tokens
    assert drawn is not None
    tokens, logprobs = drawn.tokens.to_numpy(), drawn.logprobs.to_numpy()
    assert tokens.shape == logprobs.shape == (40, 400)
    expected = forward(model, PROMPT)[:-1]
    np.testing.assert_allclose(logprobs, expected.gather(1, torch.from_numpy(tokens)).numpy(), atol=1e-4)
    chances = (expected / 0.8).softmax(-1).numpy()
    frequencies = np.stack([np.bincount(row, minlength=97) / 400 for row in tokens])
    assert np.abs(frequencies - chances).max() < 0.12
    [again] = sample(generator(model, prefill_tokens=5), work(prompt_alt_tokens_k=400, temperature=0.8, max_tokens=1))
    assert again.prompt_alt_tokens is not None
    assert (again.prompt_alt_tokens.tokens.to_numpy() == tokens).all()


def test_what_is_not_asked_for_is_not_returned(model: Transformer) -> None:
    [response] = sample(generator(model), work())
    assert response.prompt_logprobs_np is None
    assert response.topk_prompt_logprobs_np is None
    assert response.target_prompt_logprobs is None
    assert response.prompt_alt_tokens is None
    assert response.sequences[0].topk_logprobs_np is None


def test_a_prompt_of_one_token_has_no_log_probabilities_but_samples(model: Transformer) -> None:
    [response] = sample(generator(model), work(prompt=[5], prompt_logprobs=True, topk_prompt_logprobs=2))
    assert response.prompt_logprobs == [None]
    assert response.topk_prompt_logprobs == [None]
    assert len(response.sequences[0].tokens) == 12


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "The prompt is empty"),
        ({"prompt": [5, 97]}, "holds the token 97, and this model knows tokens 0 to 96"),
        ({"prompt": [5, -1]}, "holds the token -1"),
        ({"prompt": PROMPT * 4}, "A prompt of 164 tokens plus max_tokens of 12 exceeds the context of 128; shorten"),
        ({"max_tokens": 89}, "41 tokens plus max_tokens of 89 exceeds the context of 128; ask for at most 88 tokens"),
        ({"stop": "x"}, "needs a tokenizer"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 41}, "prompt_logprobs_last_n is 41; .* may be 1 to 40"),
        ({"prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n is 4; with prompt_logprobs"),
        ({"target_prompt_logprobs": TensorData.from_numpy(np.zeros((41, 2), int))}, r"needs int64 of shape \[40, K\]"),
        (
            {"target_prompt_logprobs": TensorData.from_numpy(np.full((40, 2), 97))},
            "holds 97; use token ids from 0 to 96",
        ),
    ],
)
def test_bad_input_is_the_result_of_its_own_request(model: Transformer, fields: dict[str, Any], message: str) -> None:
    running = generator(model)
    running.add(work("good"))
    running.add(work("bad", **fields))
    done = finish(running)
    assert done["good"].response is not None
    assert isinstance(done["bad"].error, InvalidInputError)
    with pytest.raises(InvalidInputError, match=message):
        raise done["bad"].error


def finished_before(running: Generator, last: str) -> list[object]:
    """The keys of requests that finish before one does."""
    finished: list[object] = []
    for _ in range(1000):
        finished += [done.key for done in running.step()]
        if last in finished:
            return finished[:-1]
    raise AssertionError(f"{last} did not finish; {finished} did")


def horde(count: int, **fields: Any) -> list[SampleWork]:
    """Of one owner; their prompts have nothing in common."""
    return [
        work(f"one of a horde {index}", [3 + index, *PROMPT[1:]], owner="horde", max_tokens=20, **fields)
        for index in range(count)
    ]


@pytest.mark.parametrize(("kv_tokens", "max_rows"), [(4 * 64, 999), (4096, 4)], ids=["full cache", "full batch"])
def test_a_horde_of_requests_of_one_owner_does_not_hold_up_another(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, kv_tokens: int, max_rows: int
) -> None:
    """There is room for four at once; the fifth waits for the first of them, not for the whole horde."""
    running = generator(model, kv_tokens=kv_tokens)
    monkeypatch.setattr(running._decoder, "max_rows", max_rows, raising=False)
    for one in horde(20):
        running.add(one)
    running.step()
    running.add(work("alone", owner="another", max_tokens=3))
    assert len(finished_before(running, "alone")) == 4
    assert len(finish(running)) == 16


def test_a_horde_of_samples_of_one_request_does_not_hold_up_another(model: Transformer) -> None:
    running = generator(model, kv_tokens=6 * 64)
    [many] = horde(1, num_samples=40)
    running.add(many)
    running.step()
    running.add(work("alone", owner="another", max_tokens=3))
    assert finished_before(running, "alone") == []
    assert sum(sample.stop_reason is not None for sample in running.samples(many.key)) == 10  # who had room at first
    response = finish(running)[many.key].response
    assert response is not None
    assert len(response.sequences) == 40


def test_samples_are_not_held_back_for_who_has_to_wait_for_a_whole_request(model: Transformer) -> None:
    """Three prompts keep 9 of 16 blocks until all their samples have begun; another wants 8."""
    running = generator(model, kv_tokens=16 * 16)
    for one in horde(3, num_samples=40):
        running.add(one)
    running.step()
    running.add(work("alone", owner="another", max_tokens=80))
    rows = []
    while running._waiting:
        assert len(rows) < 20 * 45 / 3, "it begins when the first of the three has ended"
        rows.append(len(running._batch.rows))
        running.step()
    assert sum(rows) / len(rows) > 2.7
    assert len(finish(running)) == 3


def test_prompts_of_another_owner_leave_room_for_the_samples_of_those_that_are_in(model: Transformer) -> None:
    """One sample stops early, and its room would just do for the other's prompt: then none of either could run on."""

    def several(seed: int) -> SampleWork:
        stop = np.random.default_rng(seed).choice(97, 8, replace=False).tolist()
        return work("several", PROMPT[:4], owner="one", num_samples=3, max_tokens=33, seed=seed, stop=stop)

    def lengths(seed: int) -> list[int]:
        return list(map(len, tokens_of(*sample(roomy(64), several(seed)))))

    def roomy(num_blocks: int) -> Generator:
        running = generator(model, kv_tokens=num_blocks * 4, block_size=4)
        running._decoder.call_cost_tokens = 0  # blocks are shared as on a GPU
        return running

    seed = next(seed for seed in range(1000) if lengths(seed)[0] == 3 and min(lengths(seed)) > 1)
    running = roomy(18)
    running.add(work("alone", PROMPT[:1], owner="one", max_tokens=8))
    running.add(several(seed))
    running.step()
    running.add(work("long", [*PROMPT, 5, 6, 7], owner="another", num_samples=3, max_tokens=17))
    assert len(finish(running)) == 3


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_of_owners_who_have_as_much_each_is_served_in_turn(model: Transformer, max_tokens: int) -> None:
    """One always has three requests there, and the cache holds one at a time."""
    running = generator(model, kv_tokens=64)
    busy = (work(number, owner="busy", max_tokens=max_tokens) for number in itertools.count())
    for one in itertools.islice(busy, 3):
        running.add(one)
    running.step()
    running.add(work("alone", owner="another", max_tokens=max_tokens))
    done: list[object] = []
    while "alone" not in done:
        assert len(done) < 5
        finished = [each.key for each in running.step()]
        done += finished
        for one in itertools.islice(busy, len(finished)):
            running.add(one)


def test_a_horde_of_long_prompts_does_not_hold_up_another(model: Transformer) -> None:
    """The prompt that is being computed goes on; then comes who has nothing yet."""
    running = generator(model, prefill_tokens=32)
    for index in range(10):
        running.add(work(index, [3 + index, *PROMPT * 2], owner="horde", max_tokens=40))
    running.step()
    running.add(work("alone", owner="another", max_tokens=2))
    before = running.num_prefilled_tokens
    assert finished_before(running, "alone") == []
    assert running.num_prefilled_tokens - before < 2 * len(PROMPT * 2)
    assert len(finish(running)) == 10


def test_a_request_that_can_never_fit_says_what_to_do(model: Transformer) -> None:
    running = generator(model, kv_tokens=48)
    running.add(work(max_tokens=40))
    error = finish(running)["a"].error
    assert error is not None
    assert "needs a cache of 80 tokens, and this server has 48" in str(error)
    assert "give the server more memory" in str(error)


def test_a_key_in_use_is_refused(model: Transformer) -> None:
    running = generator(model)
    running.add(work())
    with pytest.raises(ValueError, match="in use"):
        running.add(work())
