"""Data is cut into requests of bounded size, and the results come back as one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.client.chunks import byte_size, input_bytes, join, join_metrics, split
from tinsmith.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    TensorData,
)


def datum(num_tokens: int) -> Datum:
    return Datum(ModelInput.from_ints([1] * num_tokens), {})


def output(count: int, metrics: Mapping[str, float]) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(
        loss_fn_output_type="x",
        loss_fn_outputs=[{"logprobs": TensorData([float(index)], dtype="float32")} for index in range(count)],
        metrics=metrics,
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 10), st.integers(1, 300))
def test_runs_are_consecutive_complete_and_within_both_limits(sizes: list[int], max_data: int, max_bytes: int) -> None:
    data = [datum(size) for size in sizes]
    runs = split(data, [byte_size(datum) for datum in data], max_data, max_bytes)
    assert [each for run in runs for each in run] == data
    for run in runs:
        assert 1 <= len(run) <= max_data
        assert len(run) == 1 or sum(map(byte_size, run)) <= max_bytes
    for run, following in itertools.pairwise(runs):  # none is smaller than it must be
        assert len(run) == max_data or sum(map(byte_size, run)) + byte_size(following[0]) > max_bytes


def test_the_size_of_a_datum_counts_every_kind_of_content() -> None:
    image = ImageChunk(data=b"x" * 11, format="png")
    pointer = ImageAssetPointerChunk(format="png", location="tinker://abc")
    sparse = TensorData.from_numpy_sparse(np.eye(50, dtype=np.float32))
    audio = DmelChunk(dmel=b"y" * 13)
    chunks = ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2, 3]), image, pointer, audio])
    example = Datum(chunks, {"weights": [1.0, 2.0], "target_tokens": sparse})
    assert input_bytes(chunks, 4) == 12 + 11 + len("tinker://abc") + 13
    assert byte_size(example) == input_bytes(chunks, 4) + 2 * 4 + 50 * 4 + (51 + 50) * 8


def test_the_default_limits_cut_three_thousand_short_examples_by_their_number() -> None:
    data = [datum(100)] * 3000
    assert [len(run) for run in split(data, [byte_size(datum) for datum in data], 1024, 5_000_000)] == [1024, 1024, 952]


def test_a_single_result_is_passed_on_untouched() -> None:
    only = output(2, {"no colon": 1.0, "a:b:c": 2.0, "x:unheard_of": 3.0})
    assert join([only]) is only


def test_results_are_joined_in_order() -> None:
    joined = join([output(2, {}), output(1, {})])
    assert [each["logprobs"].tolist() for each in joined.loss_fn_outputs] == [[0.0], [1.0], [0.0]]


def official_join(parts: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
    from tinker.types import ForwardBackwardOutput as Official

    results = [
        Official(loss_fn_output_type="x", loss_fn_outputs=[{}] * size, metrics=dict(part))
        for part, size in zip(parts, sizes, strict=True)
    ]
    return dict(combine_fwd_bwd_output_results(results).metrics)


@settings(deadline=None)  # the first example pays for importing the official package
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.fixed_dictionaries(
                {
                    f"m:{reduction}": st.floats(-1e6, 1e6)
                    for reduction in ("sum", "min", "max", "mean", "slack", "unique")
                }
            ),
            st.integers(0, 2**53),
        ),
        min_size=2,
        max_size=4,
    )
)
def test_known_reductions_agree_with_the_official_package(
    chunks: list[tuple[int, dict[str, float], int]],
) -> None:
    sizes = [size for size, _, _ in chunks]
    parts = [{**metrics, "h:hash2": float(digest)} for _, metrics, digest in chunks]
    ours, theirs = join_metrics(parts, sizes), official_join(parts, sizes)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=1e-9, abs=1e-6)


def test_metrics_of_unknown_kinds_are_kept_under_names_of_their_own() -> None:
    parts = [{"plain": 1.0, "sum": 5.0, "a:b:c": 2.0}, {"plain": 3.0, "sum": 6.0, "a:b:c": 4.0}]
    assert join_metrics(parts, [1, 1]) == {
        "plain": 1.0,
        "plain_1": 3.0,
        "sum": 5.0,
        "sum_1": 6.0,
        "a:b:c": 2.0,
        "a:b:c_1": 4.0,
    }


def test_a_metric_that_some_chunks_lack_is_reduced_over_the_others() -> None:
    assert join_metrics([{"loss:sum": 1.0}, {"tail:mean": 4.0}, {"loss:sum": 2.0}], [1, 3, 1]) == {
        "loss:sum": 3.0,
        "tail:mean": 4.0,
    }


def test_no_value_breaks_the_reduction() -> None:
    strange = {"a:hash2": math.nan, "b:hash2": math.inf, "c:mean": math.nan, "d:slack": math.inf, "e:sum": -math.inf}
    joined = join_metrics([strange, strange], [0, 0])
    assert joined.keys() == strange.keys()
    assert math.isnan(joined["a:hash2"])
