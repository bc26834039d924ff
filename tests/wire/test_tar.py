"""Tar bodies: every tar reads what is written here, and whatever is read here is believed no further than it goes."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import InvalidInputError
from tinsmith.wire import tar

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=300)
FILES = st.dictionaries(NAMES, st.binary(max_size=2000), max_size=4)


def packed(files: dict[str, bytes]) -> bytes:
    parts = (tar.head(name, len(data)) + data + tar.padding(len(data)) for name, data in files.items())
    return b"".join(parts) + tar.END


def read(body: bytes, piece_size: int = 700) -> dict[str, bytes]:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), piece_size):
            yield body[start : start + piece_size]
            yield b""

    async def collect() -> dict[str, bytes]:
        return {
            entry.name: b"".join([piece async for piece in entry.content()]) async for entry in tar.entries(pieces())
        }

    return asyncio.run(collect())


@given(FILES, st.integers(1, 3000))
def test_what_is_written_is_read_however_it_is_cut(files: dict[str, bytes], piece_size: int) -> None:
    assert read(packed(files), piece_size) == files


@given(FILES)
def test_other_programs_read_what_is_written(files: dict[str, bytes]) -> None:
    with tarfile.open(fileobj=io.BytesIO(packed(files))) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert found == files


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_other_programs_write_is_read(form: int) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=form) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in ("folder/one", "folder/two"):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = 3, 1.5  # for which some formats need a record of its own
            archive.addfile(entry, io.BytesIO(b"abc"))
    assert read(data.getvalue()) == {"folder/one": b"abc", "folder/two": b"abc"}


def test_sizes_beyond_eight_gigabytes_fit_into_the_head() -> None:
    head = tar.head("large", 2**40)
    assert len(head) == tarfile.BLOCKSIZE
    assert tarfile.TarInfo.frombuf(head, "utf-8", "strict").size == 2**40


@pytest.mark.parametrize("length", [0, 100, 512, 600, 1023])
def test_a_body_that_ends_too_early_is_refused(length: int) -> None:
    with pytest.raises(InvalidInputError, match="ends too early"):
        read(packed({"one": b"x" * 700})[:length])


def test_what_is_no_plain_file_or_no_tar_is_refused() -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with pytest.raises(InvalidInputError, match="no plain file"):
        read(link.tobuf())
    with pytest.raises(InvalidInputError, match="is no tar"):
        read(b"{}" * 512)
    name = tarfile.TarInfo("x")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 2**30  # which would be held in memory
    with pytest.raises(InvalidInputError, match="no plain file"):
        read(name.tobuf())
