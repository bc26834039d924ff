"""`tinsmith keys` where nothing can be written any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.troubles import SmallDisk
from tests.cli.program import InProcess
from tests.server.small_disk import small_disk
from tinsmith.server.store import Store
from tinsmith.server.store.reserve import NAME


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as made:
        yield made


@pytest.mark.parametrize("is_served", [True, False])
def test_keys_are_revoked_on_a_full_disk_and_new_ones_are_refused_in_plain_words(
    cli: InProcess, disk: SmallDisk, is_served: bool
) -> None:
    url = f"sqlite:///{disk.folder / 'tinsmith.db'}"
    store = Store(url)
    store.begin_reserve()
    made = [store.keys.create("", name) for name in "abc"]
    if not is_served:
        store.close()
    disk.begin()
    for key in made:
        revoked = cli("keys", "revoke", str(key.key.key_id), "--yes", "--state", disk.folder)
        assert revoked.code == 0, revoked.err
    (disk.folder / NAME).unlink()
    disk.begin()
    refused = cli("keys", "create", "d", "--state", disk.folder)
    assert refused.code == 1
    assert f"The disk of {disk.folder} is full: nothing can be written." in " ".join(refused.err.split())
    assert "Make room there and run the command again." in " ".join(refused.err.split())
    disk.end()
    store.close()
    again = Store(url)
    assert [again.keys.verify(key.plain) for key in made] == [None] * 3
    again.close()
