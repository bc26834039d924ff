"""Between the wire and the engine: requests in either dialect to examples, results to protobuf or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.engine import (
    DEFAULT_MAX_TOKENS,
    END_OF_TEXT,
    Example,
    Ints,
    LossOutput,
    Sampled,
    SampleOptions,
    Sequence,
    Sparse,
    TopK,
)
from tinsmith.wire import tinker_pb2 as pb

_DTYPES: Mapping[int, np.dtype[Any]] = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8")}


class LossRequest(NamedTuple):
    """A forward or forward/backward request, whichever way it was written."""

    model_id: str
    seq_id: int | None
    examples: list[Example]
    loss: str
    config: Mapping[str, float]
    forward_only: bool


def loss_request_from_message(message: Any) -> LossRequest:
    config = {name: value.number for name, value in message.loss_fn_config_v2.items() if value.HasField("number")}
    examples = [_example_from_message(datum) for datum in message.data]
    return LossRequest(message.model_id, message.seq_id, examples, message.loss_fn, config, message.forward_only)


def loss_request_from_json(request: Mapping[str, Any]) -> LossRequest:
    forward_only = "forward_input" in request
    work = request["forward_input" if forward_only else "forward_backward_input"]
    examples = [_example_from_json(datum) for datum in work["data"]]
    config = work.get("loss_fn_config") or {}
    return LossRequest(request["model_id"], request.get("seq_id"), examples, work["loss_fn"], config, forward_only)


def _example_from_message(datum: Any) -> Example:
    inputs = {name: _dense_from_message(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return Example(np.concatenate([_NO_TOKENS, *map(_chunk_from_message, datum.model_input)]), inputs)


_NO_TOKENS = np.zeros(0, np.int64)


def _chunk_from_message(chunk: Any) -> Ints:
    match chunk.WhichOneof("chunk"):
        case "encoded_text":
            return np.frombuffer(chunk.encoded_text.tokens, "<i4").astype(np.int64)
        case "image":
            return np.zeros(chunk.image.expected_tokens or 1, np.int64)
    return np.zeros(1, np.int64)


def _dense_from_message(tensor: Any) -> npt.NDArray[Any]:
    dtype = _DTYPES[tensor.dtype]
    if tensor.WhichOneof("encoding") == "dense":
        flat = np.frombuffer(tensor.dense, dtype)
        return flat.reshape(tuple(tensor.shape)) if tensor.shape else flat
    csr = tensor.sparse_csr
    cells = [np.frombuffer(part, "<i8") for part in (csr.crow_indices, csr.col_indices)]
    return Sparse(np.frombuffer(csr.values, dtype), cells[0], cells[1], tuple(tensor.shape)).dense()


def _example_from_json(datum: Mapping[str, Any]) -> Example:
    inputs = {name: _dense_from_json(tensor) for name, tensor in datum["loss_fn_inputs"].items()}
    return Example(prompt_tokens(datum["model_input"]), inputs)


def _dense_from_json(tensor: Mapping[str, Any]) -> npt.NDArray[Any]:
    parsed = tensor_from_json(tensor)
    return parsed.dense() if isinstance(parsed, Sparse) else parsed


def tensor_from_json(tensor: Mapping[str, Any]) -> npt.NDArray[Any] | Sparse:
    data = np.asarray(tensor["data"], tensor.get("dtype"))
    shape = tuple(tensor.get("shape") or data.shape)
    if tensor.get("sparse_crow_indices") is None:
        return data.reshape(shape)
    starts, columns = (np.asarray(tensor[f"sparse_{part}_indices"], np.int64) for part in ("crow", "col"))
    return Sparse(data, starts, columns, shape)


def prompt_tokens(model_input: Mapping[str, Any]) -> Ints:
    tokens: list[int] = []
    for chunk in model_input["chunks"]:
        tokens += chunk["tokens"] if chunk["type"] == "encoded_text" else [0] * (chunk.get("expected_tokens") or 1)
    return np.asarray(tokens, np.int64)


def sample_options(request: Mapping[str, Any]) -> SampleOptions:
    params = request["sampling_params"]
    targets = request.get("target_prompt_logprobs")
    return SampleOptions(
        num_samples=request.get("num_samples", 1),
        max_tokens=params.get("max_tokens") or DEFAULT_MAX_TOKENS,
        seed=params.get("seed") or 0,
        stop=_stop_tokens(params.get("stop")),
        greedy=params.get("temperature", 1) == 0,
        prompt_logprobs=bool(request.get("prompt_logprobs")),
        topk_prompt=request.get("topk_prompt_logprobs", 0),
        topk_sample=request.get("topk_sample_logprobs", 0),
        alternatives=request.get("prompt_alt_tokens_k", 0),
        targets=None if targets is None else tensor_from_json(targets),
        last_n=request.get("prompt_logprobs_last_n"),
    )


def _stop_tokens(stop: Any) -> tuple[int, ...]:
    """None means the end of text, an empty list means nothing. Texts never match: this server has no tokenizer."""
    if stop is None:
        return (END_OF_TEXT,)
    return tuple(token for token in stop if isinstance(token, int)) if isinstance(stop, list) else ()


def loss_output_message(output: LossOutput) -> bytes:
    """One record per run of examples with the same trailing shape, as the format demands."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="tinker:ArrayRecord", metrics=output.metrics)
    groups: list[list[dict[str, npt.NDArray[Any]]]] = []
    for example in output.examples:
        if not groups or groups[-1][0]["logprobs"].shape[1:] != example["logprobs"].shape[1:]:
            groups.append([])
        groups[-1].append(example)
    for group in groups:
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(group))
        for name in group[0]:
            record.fields[name].CopyFrom(_batched([example[name] for example in group]))
    return bytes(message.SerializeToString())


def _batched(arrays: list[npt.NDArray[Any]]) -> Any:
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
    data = b"".join(array.astype("<f4").tobytes() for array in arrays)
    return pb.BatchedTensor(data=data, offsets=offsets, dtype=pb.DTYPE_FLOAT32, trailing_shape=arrays[0].shape[1:])


def loss_output_json(output: LossOutput) -> dict[str, Any]:
    examples = [{name: _tensor_json(array) for name, array in example.items()} for example in output.examples]
    return {"loss_fn_output_type": "scalar", "loss_fn_outputs": examples, "metrics": output.metrics}


def _tensor_json(array: npt.NDArray[Any]) -> dict[str, Any]:
    return {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}


@lru_cache(maxsize=256)
def sampled_message(sampled: Sampled) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=sampled.cached_tokens)
    message.sequences.extend(_sequence_message(sequence) for sequence in sampled.sequences)
    if sampled.prompt_logprobs is not None:
        message.prompt_logprobs = sampled.prompt_logprobs.astype("<f4").tobytes()
    if sampled.topk_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk_message(sampled.topk_prompt))
    if sampled.target_prompt is not None:
        message.target_prompt_logprobs.CopyFrom(_float_tensor(sampled.target_prompt))
    if sampled.alternatives is not None:
        tokens, logprobs = sampled.alternatives.tokens, sampled.alternatives.logprobs
        dense = tokens.astype("<i4").tobytes()
        message.prompt_alt_tokens.tokens.CopyFrom(pb.Tensor(dense=dense, dtype=pb.DTYPE_INT32, shape=tokens.shape))
        message.prompt_alt_tokens.logprobs.CopyFrom(_float_tensor(logprobs))
    return bytes(message.SerializeToString())


def _sequence_message(sequence: Sequence) -> Any:
    return pb.SampledSequence(
        stop_reason=pb.STOP_REASON_STOP if sequence.stopped else pb.STOP_REASON_LENGTH,
        tokens=sequence.tokens.astype("<i4").tobytes(),
        logprobs=sequence.logprobs.astype("<f4").tobytes(),
        topk_sampled_logprobs=None if sequence.topk is None else _topk_message(sequence.topk),
    )


def _topk_message(topk: TopK) -> Any:
    length, k = topk.tokens.shape
    tokens, logprobs = topk.tokens.astype("<i4").tobytes(), topk.logprobs.astype("<f4").tobytes()
    return pb.TopkLogprobs(token_ids=tokens, logprobs=logprobs, k=k, length=length)


def _float_tensor(array: npt.NDArray[Any] | Sparse) -> Any:
    if isinstance(array, Sparse):
        csr = pb.SparseCsr(
            values=array.values.astype("<f4").tobytes(),
            crow_indices=array.row_starts.tobytes(),
            col_indices=array.columns.tobytes(),
        )
        return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_FLOAT32, shape=array.shape)
    return pb.Tensor(dense=array.astype("<f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=array.shape)


def sampled_json(sampled: Sampled) -> dict[str, Any]:
    sequences = [
        {
            "stop_reason": "stop" if sequence.stopped else "length",
            "tokens": sequence.tokens.tolist(),
            "logprobs": sequence.logprobs.tolist(),
        }
        for sequence in sampled.sequences
    ]
    prompt = sampled.prompt_logprobs
    # NaN, "not computed", becomes null.
    return {"type": "sample", "sequences": sequences, "prompt_logprobs": None if prompt is None else prompt.tolist()}
