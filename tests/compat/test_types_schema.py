"""Our JSON schema says of every type what the official models' schema says, except where we mean to differ."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
import tinker.types as official

from tinsmith.types.schema import json_schema

OURS = json_schema()["$defs"]
MODELS = {
    name: model
    for name, model in sorted(vars(official).items())
    if isinstance(model, type) and issubclass(model, pydantic.BaseModel)
}

_OLDER_IMAGES = "fields of older API releases, read and sent only if given"
_KNOWN_FAMILIES = "the families are named one by one; any other is read and sent too"
_NO_TAG_MISTAKES = "an event carries its own label, so it cannot be mislabelled"
_DOOR = "a value that no server can use is refused before it is sent"
_LENIENT = "the official client reads this without its model, so a server may leave it out"

_OLDER_CLIENTS = "a field of older API releases, which clients of these look at"

DELIBERATE = {
    "ClientConfigResponse.create_model_via_load_weights": _OLDER_CLIENTS,
    "CreateModelRequest.optimizer_config": _KNOWN_FAMILIES,
    "CreateSessionRequest.user_metadata": "no metadata is the natural default",
    "EncodedTextChunk.tokens": _DOOR,
    "GetInfoResponse.optimizer_config": _KNOWN_FAMILIES,
    "ImageAssetPointerChunk.height": _OLDER_IMAGES,
    "ImageAssetPointerChunk.tokens": _OLDER_IMAGES,
    "ImageAssetPointerChunk.width": _OLDER_IMAGES,
    "ImageChunk.height": _OLDER_IMAGES,
    "ImageChunk.tokens": _OLDER_IMAGES,
    "ImageChunk.width": _OLDER_IMAGES,
    "LoadWeightsRequest.optimizer_config": _KNOWN_FAMILIES,
    "LoraConfig.rank": _DOOR,
    "LoraConfig.seed": _DOOR,
    "OptimStepRequest.optim_params": _KNOWN_FAMILIES,
    "RequestFailedResponse.category": _LENIENT,
    "SampleRequest.num_samples": _DOOR,
    "SampleRequest.prompt_alt_tokens_k": _DOOR,
    "SampleRequest.prompt_logprobs_last_n": _DOOR,
    "SampleRequest.topk_prompt_logprobs": _DOOR,
    "SampleRequest.topk_sample_logprobs": _DOOR,
    "SamplingParams.seed": _DOOR,
    "SamplingParams.max_tokens": _DOOR,
    "SamplingParams.temperature": _DOOR,
    "SamplingParams.top_k": _DOOR,
    "SamplingParams.top_p": _DOOR,
    "SaveWeightsExternalRequest.age_encryption_recipients": _DOOR,
    "SessionEndEvent.event": _NO_TAG_MISTAKES,
    "SessionStartEvent.event": _NO_TAG_MISTAKES,
    "UnhandledExceptionEvent.event": _NO_TAG_MISTAKES,
    "WeightsInfoResponse.optimizer_config": _KNOWN_FAMILIES,
}


def _same_words(schema: Any) -> Any:
    """A schema without what the two generators merely spell differently."""
    if isinstance(schema, list):
        return sorted(map(_same_words, schema), key=repr)
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    words = {
        key: _same_words(value) for key, value in schema.items() if key not in _SPELLING and not _says_nothing(value)
    }
    if "const" in words:
        words["enum"] = [words.pop("const")]
    if "enum" in words:
        words.pop("type", None)
    if "oneOf" in words:
        words["anyOf"] = words.pop("oneOf")
    return {key: words[key] for key in sorted(words)}


_SPELLING = {"title", "description", "default", "format", "contentEncoding", "discriminator"}


def _says_nothing(schema: Any) -> bool:
    return schema is True or schema == {}


def _fields(schema: dict[str, Any]) -> dict[str, tuple[Any, bool, Any]]:
    """Of every field: what it holds, whether it must be given, and what it is otherwise."""
    required = schema.get("required", [])
    return {
        name: (_same_words(field), name in required, field.get("default"))
        for name, field in schema.get("properties", {}).items()
    }


def _differences(name: str) -> set[str]:
    mine, theirs = _fields(OURS[name]), _fields(MODELS[name].model_json_schema())
    return {f"{name}.{field}" for field in mine.keys() | theirs.keys() if mine.get(field) != theirs.get(field)}


@pytest.mark.parametrize("name", MODELS)
def test_the_fields_are_the_official_ones(name: str) -> None:
    assert _differences(name) == {field for field in DELIBERATE if field.startswith(f"{name}.")}


@pytest.mark.parametrize("name", MODELS)
def test_requests_are_closed_and_responses_are_open(name: str) -> None:
    closed = OURS[name].get("additionalProperties", True) is False
    official_closed = MODELS[name].model_config.get("extra") == "forbid"
    # SamplingParams is open in the official package, so that a misspelt name has no effect; ours refuses it.
    assert closed == (official_closed or name == "SamplingParams")


def test_every_reference_in_the_document_leads_somewhere() -> None:
    def references(schema: Any) -> set[str]:
        if isinstance(schema, dict):
            own = {schema["$ref"]} if "$ref" in schema else set()
            return own.union(*map(references, schema.values()))
        return set().union(*map(references, schema)) if isinstance(schema, list) else set()

    assert {reference.removeprefix("#/$defs/") for reference in references(OURS)} <= OURS.keys()
