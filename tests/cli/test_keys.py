"""The keys of a server of one's own, in its database."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import InProcess
from tinsmith.server.store import Store


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def verified(state: Path, key: str) -> str | None:
    """The owner to whom the server would open, if to any."""
    store = Store(f"sqlite:///{state / 'tinsmith.db'}")
    found = store.keys.verify(key)
    store.close()
    return found and found.owner


def test_a_new_key_is_printed_once_and_opens_the_server(cli: InProcess, state: Path) -> None:
    done = cli("keys", "create", "laptop", "--note", "of Ann", "--state", state)
    key = done.out.strip()
    assert done.code == 0
    assert key.startswith("tml-")
    assert key not in done.err
    assert "from now on the server takes no others" in done.err
    assert "tinsmith keys create NAME --owner local" in done.err
    assert "first key" not in cli("keys", "create", "second", "--state", state).err
    assert verified(state, key) is not None
    listed = cli("keys", "list", "--state", state)
    assert "laptop" in listed.out
    assert "of Ann" in listed.out
    assert key not in listed.out
    assert f"...{key[-4:]}" in listed.out


def test_two_keys_open_the_same_things_if_they_have_one_owner(cli: InProcess, state: Path) -> None:
    made = [
        cli("-f", "json", "keys", "create", name, *owner, "--state", state).json()
        for name, owner in (("one", ()), ("two", ()), ("three", ("--owner", "local")))
    ]
    assert made[0].keys() == {"key_id", "name", "owner", "note", "hint", "created", "revoked", "key"}
    assert made[0]["owner"] != made[1]["owner"]
    assert made[2]["owner"] == "local"
    again = cli("-f", "json", "keys", "create", "new", "--owner", made[0]["owner"], "--state", state).json()
    assert verified(state, again["key"]) == made[0]["owner"]
    found = cli("-f", "json", "keys", "list", "--owner", made[0]["owner"], "--state", state).json()["keys"]
    assert [key["name"] for key in found] == ["one", "new"]
    assert all("key" not in key for key in found)
    assert found[0]["created"].endswith("Z")


def test_a_second_key_of_an_owner_needs_another_name(cli: InProcess, state: Path) -> None:
    owner = cli("-f", "json", "keys", "create", "laptop", "--state", state).json()["owner"]
    refused = cli("keys", "create", "laptop", "--owner", owner, "--state", state)
    assert (refused.code, refused.out) == (1, "")
    assert "There is a key 'laptop' of this owner already; take another name" in refused.err
    assert cli("keys", "create", "laptop", "--state", state).code == 0, "that of another owner"


def test_names_that_look_the_same_are_the_same_and_others_are_refused(cli: InProcess, state: Path) -> None:
    owner = cli("-f", "json", "keys", "create", "caf\u00e9", "--state", state).json()["owner"]
    for same in ("cafe\u0301", "caf\u00e9 "):
        assert "There is a key" in cli("keys", "create", same, "--owner", owner, "--state", state).err
    for wrong in ("", " ", "lap\ntop", "x" * 101):
        assert "take 1 to 100 printable characters" in cli("keys", "create", wrong, "--state", state).err


def test_a_hint_names_the_state_that_the_command_was_about(cli: InProcess, tmp_path: Path) -> None:
    state = tmp_path / "a state"
    place = f"--state '{state}'"
    assert f"tinsmith keys create NAME --owner local {place}" in cli("keys", "create", "one", "--state", state).err
    for command in (
        ("keys", "create", "x", "--owner", "ghost"),
        ("keys", "revoke", "7", "--yes"),
        ("audit", "--key", "x"),
    ):
        assert f"`tinsmith keys list {place}` shows those there are." in cli(*command, "--state", state).err


def test_an_owner_that_no_key_has_is_refused(cli: InProcess, state: Path) -> None:
    cli("keys", "create", "ann", "--state", state)
    for owner in ("", "nobody"):
        done = cli("keys", "create", "ann-2", "--owner", owner, "--state", state)
        assert done.code == 1
        assert f"There is no owner {owner!r}." in done.err
        assert "tinsmith keys list" in done.err
    assert "1 key\n" in cli("keys", "list", "--state", state).out


def test_a_revoked_key_is_refused_and_listed_as_such(cli: InProcess, state: Path) -> None:
    made = cli("-f", "json", "keys", "create", "laptop", "--state", state).json()
    refused = cli("keys", "revoke", str(made["key_id"]), "--state", state)
    assert refused.code == 2, "nobody said yes"
    assert verified(state, made["key"]) is not None
    assert cli("keys", "revoke", str(made["key_id"]), "--yes", "--state", state) == (0, "", "")
    assert verified(state, made["key"]) is None
    (key,) = cli("-f", "json", "keys", "list", "--state", state).json()["keys"]
    assert key["revoked"] is not None
    assert cli("keys", "revoke", str(made["key_id"]), "--yes", "--state", state).code == 1


def test_a_key_that_does_not_exist_cannot_be_revoked(cli: InProcess, state: Path) -> None:
    cli("keys", "create", "laptop", "--state", state)
    done = cli("keys", "revoke", "77", "--yes", "--state", state)
    assert done.code == 1
    assert "There is no key 77." in done.err
    assert "tinsmith keys list" in done.err


def test_a_folder_without_a_server_is_not_made_into_one_by_looking(cli: InProcess, state: Path) -> None:
    done = cli("keys", "list", "--state", state)
    assert done.code == 1
    assert "--state or --database" in done.err
    assert not state.exists()


def test_a_database_that_cannot_be_reached_is_told_without_its_password(cli: InProcess) -> None:
    done = cli("keys", "list", "--database", "postgresql://ann:secret@127.0.0.1:1/tinsmith")
    assert done.code == 1
    assert "The database cannot be opened" in done.err
    assert "secret" not in done.err


def test_a_key_is_revoked_by_its_name_if_no_other_good_one_has_it(cli: InProcess, state: Path) -> None:
    def create(name: str) -> dict[str, str]:
        made: dict[str, str] = cli("-f", "json", "keys", "create", name, "--state", state).json()
        return made

    of_ann, of_bob = create("laptop"), create("laptop")
    doubtful = cli("keys", "revoke", "laptop", "--yes", "--state", state)
    assert doubtful.code == 1
    assert f"2 keys have the name 'laptop': {of_ann['key_id']}, {of_bob['key_id']}." in doubtful.err
    assert cli("keys", "revoke", str(of_bob["key_id"]), "--yes", "--state", state).code == 0
    assert cli("keys", "revoke", "laptop", "--yes", "--state", state) == (0, "", "")
    assert verified(state, of_ann["key"]) is None
    assert "was revoked before" in cli("keys", "revoke", "laptop", "--yes", "--state", state).err
    for unknown in ("phone", "9" * 30):
        assert f"There is no key {unknown}." in cli("keys", "revoke", unknown, "--yes", "--state", state).err


def test_a_key_that_is_given_instead_of_its_name_is_neither_shown_nor_kept(cli: InProcess, state: Path) -> None:
    key = cli("keys", "create", "laptop", "--state", state).out.strip()
    done = cli("keys", "revoke", key, "--yes", "--state", state)
    assert done.code == 1
    assert "There is no key with that name." in done.err
    assert key not in done.err + cli("-f", "json", "audit", "--state", state).out
    assert verified(state, key) is not None


def test_a_number_is_never_taken_for_a_name(cli: InProcess, state: Path) -> None:
    first, second = (cli("-f", "json", "keys", "create", name, "--state", state).json() for name in ("2", "other"))
    assert cli("keys", "revoke", "2", "--yes", "--state", state).code == 0
    assert verified(state, first["key"]) == first["owner"]
    assert verified(state, second["key"]) is None
