"""What our types write, the official models read; what those write, ours read; and both mean the same."""

from __future__ import annotations

import pydantic
import pytest
import tinker.types as official
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker.types.generic_event import GenericEvent as OfficialGenericEvent

from tests.types.official_values import values_of
from tinsmith import types as ours
from tinsmith.types._model import Request
from tinsmith.wire import json as wire

MODELS: dict[str, type[pydantic.BaseModel]] = {
    name: model
    for name, model in vars(official).items()
    if isinstance(model, type) and issubclass(model, pydantic.BaseModel)
} | {"GenericEvent": OfficialGenericEvent}
REQUESTS = sorted(name for name in MODELS if issubclass(getattr(ours, name), Request))
RESPONSES = sorted(MODELS.keys() - set(REQUESTS))

LEFT_OUT = {"SaveWeightsForSamplerRequest": {"kind": "snapshot"}}
"""Fields with what they always meant: servers that do not know them would refuse the request."""

OURS_ALONE = {"ClientConfigResponse": {"create_model_via_load_weights"}}
"""Fields that official clients no longer look at, and older ones do."""

a_few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", REQUESTS)
@a_few
@given(data=st.data())
def test_a_request_of_ours_is_a_valid_official_one_with_the_same_fields(name: str, data: st.DataObject) -> None:
    values = data.draw(values_of(MODELS[name]))
    mine = getattr(ours, name).from_builtins(values)
    theirs = MODELS[name].model_validate(values)

    assert MODELS[name].model_validate_json(wire.encode(mine)) == theirs
    sent = LEFT_OUT.get(name, {}) | wire.loads(wire.encode(mine))
    assert sent == wire.loads(theirs.model_dump_json(exclude_none=True).encode())


@pytest.mark.parametrize("name", REQUESTS)
@a_few
@given(data=st.data())
def test_an_official_request_is_read_as_the_same_request(name: str, data: st.DataObject) -> None:
    values = data.draw(values_of(MODELS[name]))
    sent = MODELS[name].model_validate(values).model_dump_json(exclude_none=True).encode()

    assert wire.decode(getattr(ours, name), sent) == getattr(ours, name).from_builtins(values)


@pytest.mark.parametrize("name", RESPONSES)
@a_few
@given(data=st.data())
def test_an_official_response_is_read_with_the_same_fields(name: str, data: st.DataObject) -> None:
    theirs = MODELS[name].model_validate(data.draw(values_of(MODELS[name])))
    mine = wire.decode(getattr(ours, name), theirs.model_dump_json().encode())

    mine_alone = OURS_ALONE.get(name, set())
    assert {
        field: value for field, value in mine.model_dump().items() if field not in mine_alone
    } == theirs.model_dump()
    assert not mine.extra or name == "RequestFailedResponse"


@pytest.mark.parametrize("name", RESPONSES)
@a_few
@given(data=st.data())
def test_a_response_of_ours_is_read_by_the_official_models(name: str, data: st.DataObject) -> None:
    values = data.draw(values_of(MODELS[name]))
    sent = wire.encode(getattr(ours, name).from_builtins(values))

    assert MODELS[name].model_validate_json(sent) == MODELS[name].model_validate(values)
