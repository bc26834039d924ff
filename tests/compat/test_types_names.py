"""Every name of the official `tinker.types` exists here, and means the same."""

import dataclasses
import typing

import pytest
import tinker.types as official

from tinsmith import types as ours

NAMES = sorted(name for name in vars(official) if name[0].isupper())
LITERALS = [name for name in NAMES if typing.get_origin(getattr(official, name)) is typing.Literal]
CLASSES = [name for name in NAMES if isinstance(getattr(official, name), type)]
DATACLASSES = [name for name in NAMES if dataclasses.is_dataclass(getattr(official, name))]


def test_there_are_152_names_and_all_are_exported() -> None:
    assert len(NAMES) == 152
    assert set(NAMES) <= set(ours.__all__)


def test_the_three_types_that_the_official_package_uses_but_hides_are_exported_too() -> None:
    assert {"GenericEvent", "TryAgainResponse", "TopkLogprobs"} <= set(ours.__all__)


def test_the_export_list_is_sorted_and_true() -> None:
    assert ours.__all__ == sorted(ours.__all__)
    assert all(hasattr(ours, name) for name in ours.__all__)


@pytest.mark.parametrize("name", LITERALS)
def test_a_literal_has_the_same_values(name: str) -> None:
    assert set(typing.get_args(getattr(ours, name))) == set(typing.get_args(getattr(official, name)))


def test_the_error_category_has_the_same_members() -> None:
    members = {member.name: member.value for member in ours.RequestErrorCategory}
    assert members == {member.name: member.value for member in official.RequestErrorCategory}


@pytest.mark.parametrize("name", [name for name in DATACLASSES if name != "TensorData"])
def test_a_dataclass_has_the_same_fields_in_the_same_order(name: str) -> None:
    """Code may give these by position. The private fields of the official ones are its own business."""
    public = [field.name for field in dataclasses.fields(getattr(official, name)) if not field.name.startswith("_")]
    assert [field for field in getattr(ours, name).__struct_fields__ if not field.startswith("_")] == public


@pytest.mark.parametrize("name", [name for name in DATACLASSES if name != "TensorData"])
def test_a_dataclass_passes_for_one_here(name: str) -> None:
    """So that `dataclasses.replace` and `asdict` take its objects; those of a tensor are of no use to anybody."""
    public = [field.name for field in dataclasses.fields(getattr(official, name)) if not field.name.startswith("_")]
    assert [field.name for field in dataclasses.fields(getattr(ours, name))] == public


@pytest.mark.parametrize("name", CLASSES)
def test_every_official_property_and_method_exists(name: str) -> None:
    """Save the hooks of the library that the official types are made with."""
    members = {
        member
        for cls in getattr(official, name).__mro__
        if cls.__module__.startswith("tinker.types")
        for member in vars(cls)
        if not member.startswith(("_", "model_", "validate_", "serialize_"))
    }
    assert not [member for member in members if not hasattr(getattr(ours, name), member)]
