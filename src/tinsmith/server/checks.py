"""What is refused at the door: requests that are well formed but that this server's models cannot serve.

Every function raises an `InvalidInputError` that names the field, the value and the remedy. The engine relies on these
checks: what passes them has the shapes, ids and finite numbers that its tensors need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tinsmith.errors import InvalidInputError
from tinsmith.server.models import ModelFacts
from tinsmith.server.store.records import Checkpoint, Sampler
from tinsmith.types import (
    AdamParams,
    CreateCustomLossRequest,
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    LoraConfig,
    ModelInput,
    OptimizerConfig,
    OptimParams,
    SampleRequest,
    SamplingParams,
    TensorData,
)
from tinsmith.types._brief import brief
from tinsmith.types.tensors import Array

MAX_RANK = 256
MAX_SAMPLES = 1024
MAX_TOPK = 1000
MAX_STOPS = 64
MAX_DATA = 100_000
MAX_CELLS = 2**26
"""Of all tensors of a request together, made dense: sparse ones of a few bytes could fill the memory."""
MAX_LOSS_INPUTS = 16
MAX_LOSS_NODES = 1000
MAX_LOSS_ARGUMENTS = 256
MAX_METADATA_BYTES = 64 * 1024
MAX_TEXT_LENGTH = 1000
MAX_TAGS = 100
MAX_ADAM_NUMBER = 1e12
"""Single precision overflows not far beyond, when it is divided by 1 - beta."""
MIN_TTL_SECONDS = 3600
MAX_TTL_SECONDS = 10 * 365 * 24 * 3600


def refuse(field: str, problem: str, value: object = None) -> InvalidInputError:
    return InvalidInputError(f"{field} {problem}", field=field, value=value)


# --- models ----------------------------------------------------------------------------------------------------------


def check_base_model(name: str, models: Mapping[str, ModelFacts]) -> ModelFacts:
    if name in models:
        return models[name]
    raise refuse("base_model", f"{name!r} is not served here. Use one of: {', '.join(sorted(models))}", name)


def check_base_of(checkpoint: Checkpoint, models: Mapping[str, ModelFacts]) -> ModelFacts:
    if checkpoint.base_model in models:
        return models[checkpoint.base_model]
    raise refuse(
        "model_path",
        f"is {checkpoint.key.tinker_path}, which was trained on {checkpoint.base_model!r}, and that is not served here "
        "at the moment; have it served, too",
    )


def check_lora(config: LoraConfig | None) -> LoraConfig:
    lora = config or LoraConfig(rank=32)
    if not 1 <= lora.rank <= MAX_RANK:
        raise refuse("lora_config.rank", f"is {lora.rank}, but ranks go from 1 to {MAX_RANK}", lora.rank)
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise refuse("lora_config", "trains nothing: set train_attn, train_mlp or train_unembed")
    check_seed("lora_config.seed", lora.seed)
    return lora


def check_seed(field: str, seed: int | None) -> None:
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise refuse(field, f"is {seed}, which does not fit 64 bits", seed)


def check_optimizer(config: OptimizerConfig) -> None:
    if config.type != "adamw":
        raise refuse(
            "optimizer_config.type",
            f"is {config.type!r}, an optimizer whose formula is not public. This server has 'adamw'",
            config.type,
        )


def check_step(params: OptimParams) -> None:
    if not isinstance(params, AdamParams):
        raise refuse(
            "optimizer_params.type", f"is {params.type!r}, but the model's optimizer is 'adamw': send adam_params"
        )
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not 0 <= value <= MAX_ADAM_NUMBER:
            raise refuse(f"adam_params.{name}", f"is {value}, but must lie between 0 and {MAX_ADAM_NUMBER:g}", value)
    if params.eps == 0:
        raise refuse("adam_params.eps", "is 0, but must be greater: where there is no gradient it is the divisor", 0)
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise refuse(f"adam_params.{name}", f"is {value}, but must be at least 0 and below 1", value)


# --- names and times -------------------------------------------------------------------------------------------------


def check_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is not None and not MIN_TTL_SECONDS <= ttl_seconds <= MAX_TTL_SECONDS:
        raise refuse(
            "ttl_seconds",
            f"is {ttl_seconds}, but must lie between {MIN_TTL_SECONDS} (an hour) and {MAX_TTL_SECONDS} (ten years); "
            "leave it out to keep the checkpoint for ever",
            ttl_seconds,
        )
    return ttl_seconds


def check_text(field: str, *texts: str | None) -> None:
    """Names and the like, which are kept and shown in lists."""
    for text in texts:
        if text is not None and len(text) > MAX_TEXT_LENGTH:
            raise refuse(field, f"has {len(text):,} characters; keep it to {MAX_TEXT_LENGTH:,}")


def check_tags(tags: Sequence[str]) -> None:
    if len(tags) > MAX_TAGS:
        raise refuse("tags", f"has {len(tags):,} entries; keep it to {MAX_TAGS}")
    check_text("tags", *tags)


def text_metadata(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata comes back as text, so whatever else was given is written as JSON."""
    if metadata is None:
        return None
    texts = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode() for key, value in metadata.items()
    }
    if any("\0" in text for pair in texts.items() for text in pair):
        raise refuse("user_metadata", "holds the character NUL (U+0000), which no database takes: remove it")
    size = sum(len(key) + len(value) for key, value in texts.items())
    if size > MAX_METADATA_BYTES:
        raise refuse("user_metadata", f"has {size:,} characters; keep it below {MAX_METADATA_BYTES:,}")
    return texts


# --- training --------------------------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """What a loss reads besides `target_tokens`."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    takes_matrices: bool = False
    """Whether `target_tokens` may have several targets per position."""


_CLIPS = ("clip_low_threshold", "clip_high_threshold")
_RATIO = ("logprobs", "advantages")

# The engine has the same table with the formulas; it cannot be imported here, because that would load torch.
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(needed=("weights",), takes_matrices=True),
    "importance_sampling": Loss(needed=_RATIO),
    "ppo": Loss(needed=_RATIO, optional=_CLIPS, settings=_CLIPS),
    "cispo": Loss(needed=_RATIO, optional=_CLIPS, settings=_CLIPS),
    "dro": Loss(needed=_RATIO, settings=("beta",)),
    "gspo": Loss(needed=(*_RATIO, "sequence_ratio_mask"), optional=_CLIPS, settings=_CLIPS),
}


class CustomInput(NamedTuple):
    name: str
    rank: int


def check_training(examples: ForwardBackwardInput, facts: ModelFacts, custom: Sequence[CustomInput] | None) -> int:
    """The number of tokens. `custom` are the inputs of an uploaded loss, if that is the loss."""
    if not examples.data:
        raise refuse("data", "is empty: give at least one datum")
    if len(examples.data) > MAX_DATA:
        raise refuse("data", f"holds {len(examples.data):,} examples; send at most {MAX_DATA:,} in one request")
    cells = sum(math.prod(_shape(tensor)) for datum in examples.data for tensor in datum.loss_fn_inputs.values())
    if cells > MAX_CELLS:
        raise refuse("data", f"has tensors of {cells:,} values; send at most {MAX_CELLS:,} in one request")
    loss = None if custom is not None else _known_loss(examples)
    tokens = 0
    for index, datum in enumerate(examples.data):
        try:
            tokens += _check_datum(datum, examples.loss_fn, facts, loss, custom or ())
        except InvalidInputError as error:
            where = f"data[{index}]"
            raise InvalidInputError(f"{where}: {error.message}", field=f"{where}.{error.field}") from None
    return tokens


def _known_loss(examples: ForwardBackwardInput) -> Loss:
    name, config = examples.loss_fn, examples.loss_fn_config or {}
    loss = LOSSES.get(name)
    if loss is None:
        raise refuse("loss_fn", f"{name!r} has no public formula. This server has: {', '.join(LOSSES)}, custom", name)
    for key, value in config.items():
        if key not in loss.settings:
            legal = f"Its settings are: {', '.join(loss.settings)}" if loss.settings else "It has none"
            raise refuse("loss_fn_config", f"has {key!r}, which {name} does not know. {legal}", key)
        if isinstance(value, str) or not math.isfinite(value):
            raise refuse(f"loss_fn_config[{key!r}]", f"is {value!r}, but must be a finite number", value)
    low, high = (config.get(key) for key in _CLIPS)
    if isinstance(low, float | int) and isinstance(high, float | int) and low > high:
        raise refuse("loss_fn_config", f"has clip_low_threshold {low} above clip_high_threshold {high}")
    return loss


def _check_datum(
    datum: Datum, loss_fn: str, facts: ModelFacts, loss: Loss | None, custom: Sequence[CustomInput]
) -> int:
    length = check_text_input("model_input", datum.model_input, facts)
    if length > facts.max_context:
        raise refuse("model_input", f"has {length} tokens; {facts.name} takes {facts.max_context}", length)
    for name, tensor in datum.loss_fn_inputs.items():
        _check_width(f"loss_fn_inputs[{name!r}]", tensor)
    shape = _check_targets(datum.loss_fn_inputs.get("target_tokens"), length, loss_fn, facts)
    if loss is None:
        _check_custom_inputs(datum, custom, length)
        return length
    if len(shape) == 2 and not loss.takes_matrices:
        raise refuse("loss_fn_inputs['target_tokens']", f"has the shape {shape}, but {loss_fn} takes [{length}] only")
    for name in loss.needed:
        if name not in datum.loss_fn_inputs:
            raise refuse("loss_fn_inputs", f"lacks {name!r}, which {loss_fn} needs")
    for name in (*loss.needed, *loss.optional):
        if name in datum.loss_fn_inputs:
            _check_weights(name, datum.loss_fn_inputs[name], shape)
    return length


def _check_targets(targets: TensorData | None, length: int, loss_fn: str, facts: ModelFacts) -> tuple[int, ...]:
    where = "loss_fn_inputs['target_tokens']"
    if targets is None:
        raise refuse("loss_fn_inputs", f"lacks 'target_tokens', which {loss_fn} needs")
    if targets.dtype != "int64":
        raise refuse(where, f"has the dtype {targets.dtype}, but token ids are int64")
    shape = _shape(targets)
    if len(shape) not in (1, 2) or shape[0] != length or 0 in shape:
        wanted = f"[{length}] or [{length}, K]"
        raise refuse(where, f"has the shape {list(shape)}, but the input has {length} tokens: it must be {wanted}")
    _check_ids(where, targets.values, facts)
    return shape


def _check_width(where: str, tensor: TensorData) -> None:
    shape = _shape(tensor)
    if len(shape) == 2 and shape[1] > MAX_TOPK:
        raise refuse(where, f"has {shape[1]} values per position; at most {MAX_TOPK} are possible", shape[1])


def _check_weights(name: str, tensor: TensorData, shape: tuple[int, ...]) -> None:
    where = f"loss_fn_inputs[{name!r}]"
    if tensor.dtype != "float32":
        raise refuse(where, f"has the dtype {tensor.dtype}, but must be float32: convert it, e.g. with .float()")
    if _shape(tensor) != shape:
        raise refuse(where, f"has the shape {list(_shape(tensor))}, but target_tokens has {list(shape)}")


def _check_custom_inputs(datum: Datum, custom: Sequence[CustomInput], length: int) -> None:
    for needed in custom:
        if needed.name == "logprobs":  # the model's own, not the datum's
            continue
        if needed.name not in datum.loss_fn_inputs:
            raise refuse("loss_fn_inputs", f"lacks {needed.name!r}, which the custom loss reads")
        shape = _shape(datum.loss_fn_inputs[needed.name])
        if needed.rank == 0 and math.prod(shape) == 1:
            continue
        if len(shape) != needed.rank or (needed.rank and shape[0] != length):
            wanted = ("one number", f"[{length}]", f"[{length}, K]")[needed.rank]
            raise refuse(
                f"loss_fn_inputs[{needed.name!r}]", f"has the shape {list(shape)}, but the custom loss wants {wanted}"
            )


def _shape(tensor: TensorData) -> tuple[int, ...]:
    return tuple(tensor.shape or ()) if tensor.csr else tensor.values.shape


def _check_ids(where: str, ids: Array, facts: ModelFacts, lowest: int = 0) -> None:
    wrong = ids[(ids < lowest) | (ids >= facts.vocab_size)]
    if wrong.size:
        raise _unknown_token(where, int(wrong.flat[0]), facts)


def _unknown_token(where: str, token: int, facts: ModelFacts) -> InvalidInputError:
    return refuse(where, f"holds {token}, but the tokens of {facts.name} are 0 to {facts.vocab_size - 1}", token)


def check_text_input(where: str, value: ModelInput, facts: ModelFacts) -> int:
    """The length of an input, which must be text: these models see and hear nothing."""
    kinds = {chunk.type for chunk in value.chunks} - {"encoded_text"}
    if kinds:
        held = ", ".join(sorted(kinds))
        raise refuse(where, f"holds {held}, but {facts.name} takes text only. Send chunks of the type encoded_text")
    texts = [chunk.tokens for chunk in value.chunks if isinstance(chunk, EncodedTextChunk) and len(chunk.tokens)]
    if not texts:
        raise refuse(where, "is empty: give at least one token")
    highest = max(map(max, texts))  # none is negative: the type of a chunk sees to that
    if highest >= facts.vocab_size:
        raise _unknown_token(where, highest, facts)
    return sum(map(len, texts))


def check_custom_loss(request: CreateCustomLossRequest) -> None:
    check_text("name", request.name)
    names = [one.name for one in request.inputs]
    if not names or names[0] != "logprobs":
        raise refuse("inputs", f"must begin with 'logprobs', not {brief(names)}")
    if len(names) > MAX_LOSS_INPUTS or len(set(names)) < len(names):
        raise refuse("inputs", f"must be at most {MAX_LOSS_INPUTS} different names, not {brief(names)}")
    nodes = request.graph.nodes
    if not 1 <= len(nodes) <= MAX_LOSS_NODES:
        raise refuse("graph.nodes", f"has {len(nodes)} steps; 1 to {MAX_LOSS_NODES:,} are possible")
    if nodes[-1].op != "output":
        raise refuse("graph.nodes", f"must end with the step 'output', not {nodes[-1].op!r}")
    for node in nodes:
        count = _num_values([node.args, node.kwargs])
        if count > MAX_LOSS_ARGUMENTS:
            raise refuse(
                f"graph.nodes[{brief(node.name)}]",
                f"has {count:,} arguments; at most {MAX_LOSS_ARGUMENTS} are possible. Pass tensors as loss_fn_inputs",
            )


def _num_values(argument: object) -> int:
    """Of an argument, with all that is nested in it: an index of a million numbers would cost gigabytes of memory."""
    if isinstance(argument, Mapping):
        return sum(map(_num_values, argument.values()))
    return sum(map(_num_values, argument)) if isinstance(argument, list | tuple) else 1


# --- sampling --------------------------------------------------------------------------------------------------------


def check_sampler(sampler: Sampler) -> None:
    """A sampling session can be gone for good, which is no reason for its client to try again for ever."""
    if sampler.session_state == "cancelled":
        raise refuse("sampling_session_id", "belongs to a session that ended in silence; make a new sampling client")
    if sampler.removed is not None:
        raise refuse(
            "sampling_session_id",
            "has no weights any more: a copy of a model is kept until its session ends or it was not used for long, "
            "which is an hour if its owner uses many others. Save weights under a name to keep them, and make a new "
            "sampling client",
        )


def check_sampling(request: SampleRequest, facts: ModelFacts) -> int:
    """The number of tokens this may take: the prompt, and what is generated at most."""
    length = check_text_input("prompt", request.prompt, facts)
    if length > facts.max_context:
        raise refuse("prompt", f"has {length} tokens; {facts.name} takes {facts.max_context}", length)
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise refuse("num_samples", f"is {request.num_samples}, but must lie between 1 and {MAX_SAMPLES}")
    new_tokens = _check_max_tokens(request.sampling_params, length, facts)
    check_seed("sampling_params.seed", request.sampling_params.seed)
    _check_stop(request.sampling_params, facts)
    _check_prompt_options(request, length, facts)
    return length + request.num_samples * new_tokens


def _check_max_tokens(params: SamplingParams, length: int, facts: ModelFacts) -> int:
    """The last token is never read by the model, so it needs no place in the context."""
    room = facts.max_context + 1 - length
    if params.max_tokens is None:
        return room
    if params.max_tokens > room:
        raise refuse(
            "sampling_params.max_tokens",
            f"is {params.max_tokens}, but after a prompt of {length} tokens {facts.name} has room for {room} "
            f"(its context is {facts.max_context}): lower it, leave it out, or shorten the prompt",
            params.max_tokens,
        )
    return params.max_tokens


def _check_stop(params: SamplingParams, facts: ModelFacts) -> None:
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    where = "sampling_params.stop"
    if len(stops) > MAX_STOPS:
        raise refuse(where, f"has {len(stops)} entries; at most {MAX_STOPS} are possible")
    if "" in stops:
        raise refuse(where, "holds an empty text, which would end every sample at once")
    ids = [stop for stop in stops if isinstance(stop, int)]
    _check_ids(where, np.asarray(ids, dtype=object), facts)


def _check_prompt_options(request: SampleRequest, length: int, facts: ModelFacts) -> None:
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        count, most = getattr(request, name), min(MAX_TOPK, facts.vocab_size)
        if count > most:
            raise refuse(name, f"is {count}, but at most {most} are possible", count)
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n < length:
        raise refuse(
            "prompt_logprobs_last_n",
            f"is {last_n}, but of a prompt of {length} tokens 1 to {length - 1} can be scored",
            last_n,
        )
    if request.target_prompt_logprobs is not None:
        _check_prompt_targets(request.target_prompt_logprobs, length, facts)


def _check_prompt_targets(targets: TensorData, length: int, facts: ModelFacts) -> None:
    where, shape = "target_prompt_logprobs", _shape(targets)
    if targets.dtype != "int64":
        raise refuse(where, f"has the dtype {targets.dtype}, but token ids are int64")
    if len(shape) != 2 or shape[0] != length - 1 or shape[1] > MAX_TOPK:
        raise refuse(
            where,
            f"has the shape {list(shape)}, but a prompt of {length} tokens needs [{length - 1}, K], K to {MAX_TOPK}",
        )
    _check_ids(where, targets.values, facts, lowest=-1)
