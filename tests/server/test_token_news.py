"""Tokens are told as they are drawn to those who ask, and samplers that follow a model see it change."""

from __future__ import annotations

import msgspec
import pytest

from tests.server.workbench import Workbench
from tinsmith.server.messages import Drawn, Message
from tinsmith.server.store.records import Failed
from tinsmith.wire import proto

STREAMED = {"is_streamed": True, "num_samples": 3, "topk_sample_logprobs": 2}


def test_what_is_told_is_what_the_result_begins_with(bench: Workbench) -> None:
    sampler_id = bench.base_sampler()
    with bench.worker():
        quiet = bench.result(bench.sample(sampler_id, 0, max_tokens=20))
        assert bench.drawn == []
        request_id = bench.sample(sampler_id, 1, max_tokens=20, more=STREAMED)
        result = proto.decode_sample_response(bench.result(request_id))
    assert result.sequences[0].tokens == proto.decode_sample_response(quiet).sequences[0].tokens
    assert {each.request_id for each in bench.drawn} == {request_id}
    for index, sequence in enumerate(result.sequences):
        told = [each for each in bench.drawn if each.index == index]
        assert len(told) > 10  # step by step
        tokens: list[int] = []
        for each in told:
            assert each.start == len(tokens)
            tokens += each.tokens
            place = slice(each.start, each.start + len(each.tokens))
            assert each.logprobs == pytest.approx((sequence.logprobs or [])[place])
            assert [[token for token, _ in row] for row in each.topk] == [
                [token for token, _ in row or []] for row in (sequence.topk_logprobs or [])[place]
            ]
        assert tokens == sequence.tokens[: len(tokens)]
        assert len(tokens) >= 19  # the last step is told by the result


def test_tokens_that_end_a_sample_do_so_beside_its_stops(bench: Workbench) -> None:
    sampler_id = bench.base_sampler()
    with bench.worker():
        tokens = bench.tokens(bench.sample(sampler_id, 0, max_tokens=20))
        ended = bench.tokens(bench.sample(sampler_id, 1, max_tokens=20, more={"end_tokens": [tokens[7]]}))
    assert ended == tokens[: tokens.index(tokens[7]) + 1]


def test_a_sampler_can_follow_a_model(bench: Workbench) -> None:
    model = bench.create("s:train:0")
    follows = bench.following_sampler(model)
    with bench.worker():
        bench.train(model, range(1, 3))
        copy = bench.copied_sampler(model, 3)
        first = bench.tokens(bench.sample(follows, 0, max_tokens=10))
        assert first == bench.tokens(bench.sample(copy, 0, max_tokens=10))
        bench.train(model, range(5, 25))
        bench.data(model, 4)
        later = bench.copied_sampler(model, 25)
        second = bench.tokens(bench.sample(follows, 1, max_tokens=10))
        assert second == bench.tokens(bench.sample(later, 0, max_tokens=10)) != first
    with bench.worker():  # which has the model on the disk only
        assert bench.tokens(bench.sample(follows, 2, max_tokens=10)) == second


def test_a_sampler_cannot_follow_a_model_that_is_gone(bench: Workbench) -> None:
    follows = bench.following_sampler("s:train:7")
    with bench.worker():
        refused = bench.outcome(bench.sample(follows, 0))
    assert isinstance(refused, Failed)
    assert "not kept any more" in refused.error


def test_a_message_of_tokens_is_read_as_it_was_written() -> None:
    message = Message(drawn=(Drawn("r", 1, 2, [3, 4], [-0.1, -2.5], [[(3, -0.1)], [(5, -0.2)]]),))
    assert msgspec.json.decode(msgspec.json.encode(message), type=Message) == message
