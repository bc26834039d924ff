"""Opening, upgrading, and what survives when processes die."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from tests.server.postgres import Postgres
from tests.server.store.making import DONE, MODEL, at_once, sample, seq_ids, training
from tinsmith.errors import ConfigError, InvalidInputError
from tinsmith.server.migrations import upgrade
from tinsmith.server.store import Store, database, identity, schema
from tinsmith.server.store.database import Database

KILLS = 8


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where no tables are yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/folder/tinsmith.db"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


def test_the_migrations_build_the_tables_that_the_code_uses(empty: str) -> None:
    database = Database(empty)
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, schema.metadata) == []
        assert context.get_current_revision() == schema.REVISION
    database.close()


_JOB_OF_0001 = (
    """
    INSERT INTO jobs (request_id, stream, seq_id, kind, lane, owner, session_id, base_model, model_id, size, state,
                      turn, worker, created)
    VALUES ('m:4', 'm', 4, 'optim_step', 'train', 'ann', 's', 'tiny', 'm', 1, 'running', 0, 'dead', 0)
    """,
    "INSERT INTO streams (stream, frontier, highest, last_request) VALUES ('m', 5, 4, 0)",
    "INSERT INTO payloads (request_id, data) VALUES ('m:4', '')",
    """
    INSERT INTO samplers (sampler_id, session_id, owner, base_model, model_id, model_seq_id, created)
    VALUES ('s:sample:0', 's', 'ann', 'tiny', 'm', 3, 0)
    """,
)


def test_a_database_of_an_earlier_release_keeps_what_it_holds(empty: str) -> None:
    engine = database._open(empty)
    with engine.begin() as connection:
        upgrade(connection, "0001")
        for statement in _JOB_OF_0001:
            connection.exec_driver_sql(statement)
    engine.dispose()
    store = Store(empty)
    assert store.jobs.requeue("tiny", max_attempts=1, error="") == []
    (job,) = store.jobs.claim("tiny", "w", train=10)
    assert (job.seq_id, job.attempts, job.samples) == (4, 0, 1)
    sampler = store.samplers.get("s:sample:0", "ann")
    assert sampler is not None
    assert not sampler.inflight
    store.close()


def test_every_database_has_an_id_of_its_own_and_keeps_it(empty: str, tmp_path: Path) -> None:
    engine = database._open(empty)
    with engine.begin() as connection:
        upgrade(connection, "0002")
    engine.dispose()
    found = []
    for url in (empty, empty, f"sqlite:///{tmp_path}/other.db"):
        store = Store(url)
        found.append(store.identity.database_id())
        store.close()
    assert found[0] == found[1] != found[2]


@pytest.fixture
def quick_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(identity, "KEEP_SECONDS", 0.01)


def refusal(url: str) -> str:
    """Of one more server."""
    store = Store(url)
    try:
        with pytest.raises(ConfigError) as caught, store.identity.sole_use("too much"):
            raise AssertionError("two servers on one database")
    finally:
        store.close()
    return str(caught.value)


def test_a_second_server_on_a_database_is_refused_and_told_who_has_it(empty: str, quick_locks: None) -> None:
    store = Store(empty)
    for name in ("first", "second"):
        with store.identity.sole_use(name):
            told = refusal(empty)
        assert told.startswith("Another server uses")
        assert (name if empty.startswith("postgresql") else "new/folder/tinsmith.db") in told
    store.close()


_HOLD = """
import sys
from tinsmith.server.store import Store
with Store(sys.argv[1]).identity.sole_use("victim"):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_the_database_of_a_killed_server_is_free(empty: str) -> None:
    command = [sys.executable, "-c", _HOLD, empty]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        process.kill()
    store = Store(empty)
    with store.identity.sole_use("successor"):
        pass
    store.close()


def test_a_restart_of_postgres_lets_no_second_server_in(postgres: Postgres, quick_locks: None) -> None:
    url = postgres.new_database()
    store = Store(url)
    with store.identity.sole_use("first"):
        postgres.stop()
        postgres.start()
        with psycopg.connect(url, autocommit=True) as connection:
            while not connection.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'").fetchall():
                time.sleep(0.01)
        assert "first" in refusal(url)
    store.close()


def test_a_server_whose_database_another_one_has_used_stops(postgres: Postgres, quick_locks: None) -> None:
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    store = Store(postgres.new_database())
    try:
        with store.identity.sole_use("first"):
            store._database.write(lambda connection: connection.execute(schema.identity.update().values(used_by="me")))
            assert stopped.wait(30)
    finally:
        signal.signal(signal.SIGTERM, before)
        store.close()


def test_many_that_open_a_new_database_at_once_all_can_use_it(empty: str) -> None:
    def open_and_use(place: int) -> None:
        store = Store(empty)
        store.jobs.enqueue(sample(place))
        store.close()

    at_once(6, open_and_use)
    store = Store(empty)
    assert len(store.jobs.claim("tiny", "w", sample=10)) == 6
    store.close()


def test_a_database_of_a_newer_release_is_refused(empty: str) -> None:
    database = Database(empty)
    database.write(lambda connection: connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")))
    database.close()
    with pytest.raises(ConfigError, match="newer Tinsmith"):
        Store(empty)


@pytest.mark.parametrize("url", ["nonsense", "mysql://host/db", "sqlite://", "sqlite:///:memory:"])
def test_a_url_that_cannot_work_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigError, match="use sqlite:////absolute"):
        Store(url)


def test_a_password_in_a_malformed_url_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Store("postgres:ann:secret@host")
    assert "secret" not in str(caught.value)


def test_a_failed_call_leaves_nothing_behind(store: Store) -> None:
    with pytest.raises(InvalidInputError):
        store.jobs.enqueue(training(0, payload=b"x", size=2**63))
    assert store.jobs.enqueue(training(0)).is_new


def test_errors_of_the_database_show_no_values(store: Store) -> None:
    store.jobs.enqueue(sample(0))
    with pytest.raises(sa.exc.IntegrityError) as caught:
        store._database.write(
            lambda c: c.execute(sa.insert(schema.payloads), {"request_id": "s:sample:0:0", "data": b"secret prompt"})
        )
    assert "secret" not in str(caught.value)


def statements(store: Store) -> list[tuple[str, Any]]:
    """What goes to the database from now on, with its parameters."""
    seen: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        seen.append((statement, parameters))

    sa.event.listen(store._database.engine, "before_cursor_execute", note)
    return seen


def test_neither_claiming_nor_waiting_reads_the_whole_queue(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tinsmith.db")
    store.jobs.enqueue(sample(0))
    seen = statements(store)
    store.jobs.claim("tiny", "w", sample=1)
    store.jobs.complete("w", {"s:sample:0:0": DONE})
    store.jobs.cancel_asked("tiny", "w")
    store.results.statuses(["s:sample:0:0"])
    store.results.completions("s:sample:0", 0, 0)
    queries = [(statement, values) for statement, values in seen if statement.startswith(("SELECT", "UPDATE", "WITH"))]
    with store._database.engine.connect() as connection:
        for statement, values in queries:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
            assert not [row.detail for row in plan if row.detail.startswith(("SCAN jobs", "SCAN streams"))]
    assert len(queries) > 5
    store.close()


def test_the_newest_weights_of_a_model_are_found_without_a_look_at_those_of_others(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tinsmith.db")
    seen = statements(store)
    store.samplers.published("m", "ann")
    ((statement, values),) = [each for each in seen if each[0].startswith("SELECT")]
    with store._database.engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
    assert "USING INDEX samplers_published (model_id=?)" in plan[0].detail
    assert not [row for row in plan if "ORDER BY" in row.detail]
    store.close()


def publish_many(store: Store, num_removed: int, num_kept: int) -> None:
    """Inflight samplers of one model, of which the older were given up."""
    now = store._database.now()
    same = {"session_id": "s", "owner": "ann", "base_model": "tiny", "model_id": MODEL, "inflight": True}
    rows = [
        {**same, "sampler_id": f"{n}", "model_seq_id": n, "created": now, "removed": now if n < num_removed else None}
        for n in range(num_removed + num_kept)
    ]
    store._database.write(lambda connection: connection.execute(sa.insert(schema.samplers), rows))


def give_up_all(store: Store) -> list[str]:
    later = store._database.now() + timedelta(hours=1)
    return store.samplers.remove_copies(later, most=9, unused_since=later)


def test_giving_up_published_weights_costs_no_more_after_many_were_given_up(tmp_path: Path) -> None:
    def steps(num_removed: int) -> int:
        """Those of SQLite's machine, in hundreds."""
        store = Store(f"sqlite:///{tmp_path}/{num_removed}.db")
        publish_many(store, num_removed, num_kept=100)
        taken: list[int] = []

        def count(connection: Any, *_: object) -> None:
            connection.set_progress_handler(lambda: taken.append(1), 100)

        sa.event.listen(store._database.engine, "checkout", count)
        assert len(give_up_all(store)) == 99
        store.close()
        return len(taken)

    assert steps(num_removed=2000) < 2 * steps(num_removed=0)


def test_postgresql_finds_the_newest_weights_by_an_index_for_each_that_may_be_given_up(postgres: Postgres) -> None:
    store = Store(postgres.new_database())
    publish_many(store, num_removed=0, num_kept=5000)
    store._database.write(lambda connection: connection.exec_driver_sql("ANALYZE samplers"))
    seen = statements(store)
    store.samplers.kept(["1"])
    assert len(give_up_all(store)) == 4999
    queries = [(statement, values) for statement, values in seen if "mates" in statement]
    with store._database.engine.connect() as connection:
        for statement, values in queries:
            plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {statement}", values).scalars())
            assert "using samplers_published on samplers mates" in plan
            assert "Seq Scan on samplers mates" not in plan
    assert len(queries) > 2
    store.close()


def test_samplers_are_made_while_published_weights_are_looked_through(store: Store) -> None:
    publish_many(store, num_removed=0, num_kept=1)
    seen = statements(store)
    long_ago = store._database.now() - timedelta(hours=1)
    assert store.samplers.remove_copies(long_ago, most=9, unused_since=long_ago) == []
    assert [statement.partition(" ")[0] for statement, _ in seen if "samplers" in statement] == ["SELECT"]


def test_what_is_acknowledged_reaches_the_disk_and_what_follows_from_it_need_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"sqlite:///{tmp_path}/tinsmith.db")
    flushed: list[str] = []
    monkeypatch.setattr(database.os, "fsync", lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}")))
    store.jobs.enqueue(sample(0))
    assert flushed == [f"{tmp_path}/tinsmith.db-wal"]
    store.jobs.claim("tiny", "w", sample=1)
    store.jobs.complete("w", {"s:sample:0:0": DONE})
    assert len(flushed) == 1
    store.close()


def test_nobody_waits_for_the_disk_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(f"sqlite:///{tmp_path}/tinsmith.db")
    disk_is_busy, go_on = threading.Event(), threading.Event()

    def slow(file: int) -> None:
        disk_is_busy.set()
        assert go_on.wait(30)

    monkeypatch.setattr(database.os, "fsync", slow)
    with ThreadPoolExecutor(1) as thread:
        submission = thread.submit(store.jobs.enqueue, sample(0))
        assert disk_is_busy.wait(30)
        assert len(store.jobs.claim("tiny", "w", sample=1)) == 1
        assert not submission.done()
        go_on.set()
        assert submission.result(30).is_new
    store.close()


def test_a_process_gets_the_write_lock_as_soon_as_another_lets_it_go(tmp_path: Path) -> None:
    ours, theirs = (Database(f"sqlite:///{tmp_path}/tinsmith.db") for _ in range(2))
    holds, go_on = threading.Event(), threading.Event()

    def hold(connection: sa.Connection) -> None:
        holds.set()
        assert go_on.wait(30)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ours.write, hold)
        assert holds.wait(30)
        second = threads.submit(theirs.write, lambda connection: None)
        assert not second.done()
        go_on.set()
        first.result(30)
        second.result(30)
    ours.close()
    theirs.close()


def test_work_goes_on_after_postgres_was_restarted(postgres: Postgres) -> None:
    store = Store(postgres.new_database())
    store.jobs.enqueue(training(0))
    postgres.stop()
    with pytest.raises(sa.exc.OperationalError):
        store.jobs.enqueue(training(1))
    postgres.start()
    store.jobs.enqueue(training(1))
    assert seq_ids(store.jobs.claim("tiny", "w", train=10)) == [0, 1]
    store.close()


_SUBMIT = """
import sys
from tests.server.store.making import training
from tinsmith.server.store import Store
store = Store(sys.argv[1])
print(sum(store.jobs.enqueue(training(seq_id)).is_new for seq_id in range(150)))
"""


def test_two_processes_submit_the_same_numbers_to_one_database(url: str) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", _SUBMIT, url], stdout=subprocess.PIPE) for _ in range(2)]
    new = [int(process.communicate(timeout=120)[0]) for process in processes]
    assert sum(new) == 150
    store = Store(url)
    assert seq_ids(store.jobs.claim("tiny", "w", train=1000)) == list(range(150))
    store.close()


_WORK_UNTIL_KILLED = """
import itertools, sys
from tests.server.store.making import DONE, training
from tinsmith.server.store import Store
store = Store(sys.argv[1])
store.jobs.requeue("tiny", max_attempts=9, error="")
for seq_id in itertools.count(int(sys.argv[2])):
    print("acknowledged", store.jobs.enqueue(training(seq_id)).request_id, flush=True)
    for job in store.jobs.claim("tiny", "w", train=2):
        for request_id in store.jobs.complete("w", {job.request_id: DONE}):
            print("completed", request_id, flush=True)
"""


def test_a_killed_process_loses_nothing_that_it_acknowledged(url: str) -> None:
    chance = random.Random(7)
    acknowledged: set[str] = set()
    completed: list[str] = []
    for _ in range(KILLS):
        command = [sys.executable, "-c", _WORK_UNTIL_KILLED, url, str(len(acknowledged))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(chance.randrange(1, 40))]
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        for word, request_id in (line.split() for line in lines if line.endswith("\n")):
            acknowledged.add(request_id) if word == "acknowledged" else completed.append(request_id)
        _check_ledger(url, acknowledged, completed)
    assert len(completed) > KILLS


def _check_ledger(url: str, acknowledged: set[str], completed: list[str]) -> None:
    assert len(completed) == len(set(completed)), "a job was done twice"
    database = Database(url)
    if database.is_sqlite:
        assert database.read(lambda c: c.scalar(sa.text("PRAGMA integrity_check"))) == "ok"
    database.close()
    store = Store(url)
    statuses = store.results.statuses(acknowledged)
    assert statuses.keys() == acknowledged
    assert all(statuses[request_id].outcome == DONE for request_id in completed)
    store.close()


def test_the_model_of_the_killed_process_goes_on_in_order(url: str) -> None:
    store = Store(url)
    for seq_id in range(3):
        store.jobs.enqueue(training(seq_id))
    store.jobs.claim("tiny", "lost", train=2)
    store.close()
    again = Store(url)
    again.jobs.requeue("tiny", max_attempts=9, error="")
    assert [job.request_id for job in again.jobs.claim("tiny", "w", train=10)] == [f"{MODEL}:{n}" for n in range(3)]
    again.close()


def test_a_second_store_of_one_process_leaves_the_locks_of_the_first(tmp_path: Path) -> None:
    """To close a file takes away all locks of its process: the next to leave would find nobody else, and tidy up."""
    file = tmp_path / "tinsmith.db"
    first, second = (Store(f"sqlite:///{file}") for _ in range(2))
    script = f"import sqlite3; c = sqlite3.connect({str(file)!r}); c.execute('SELECT * FROM jobs'); c.close()"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert file.with_name("tinsmith.db-wal").exists()
    second.close()
    first.close()
