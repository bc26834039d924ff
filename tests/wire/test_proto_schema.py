"""Our .proto describes the same messages as the official client's, under a package name of its own."""

from google.protobuf import descriptor_pb2
from tinker.proto import tinker_public_pb2 as official

from tinsmith.wire import tinker_pb2 as ours


def _described(module: object) -> descriptor_pb2.FileDescriptorProto:
    """The file's descriptor with whatever only concerns its name and package taken out."""
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    package = f".{file.package}."
    for message in file.message_type:
        for part in (message, *message.nested_type):
            for field in part.field:
                field.type_name = field.type_name.removeprefix(package)
                field.ClearField("json_name")
    return file


def _by_name(parts) -> dict[str, str]:
    return {part.name: str(part) for part in parts}


def test_every_message_has_the_official_names_numbers_and_types() -> None:
    assert _by_name(_described(ours).message_type) == _by_name(_described(official).message_type)


def test_every_enum_has_the_official_names_and_numbers() -> None:
    assert _by_name(_described(ours).enum_type) == _by_name(_described(official).enum_type)


def test_the_package_name_is_our_own_so_both_modules_fit_in_one_process() -> None:
    assert ours.DESCRIPTOR.package == "tinsmith.wire"
    assert official.DESCRIPTOR.package != ours.DESCRIPTOR.package
