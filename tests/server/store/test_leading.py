"""One server leads, and only its workers work: what a worker does whose server was replaced counts for nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psycopg
import pytest
import sqlalchemy as sa

from tests.server.postgres import Postgres
from tests.server.store.making import training
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.bulletin import Posted
from tinsmith.server.store.leading import Leader, ReplacedError


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture
def stores(url: str) -> Iterator[list[Store]]:
    """Of three servers, or workers."""
    opened = [Store(url) for _ in range(3)]
    yield opened
    for store in opened:
        store.close()


def cut_off(url: str, mode: str) -> None:
    """Ends the connections that hold locks of this mode, as a network would that is cut."""
    with psycopg.connect(url, autocommit=True) as connection:
        held = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = %s AND granted"
        connection.execute(f"SELECT pg_terminate_backend(pid) FROM ({held}) AS held", [mode])
        while connection.execute(held, [mode]).fetchall():
            pass


def test_one_leads_until_it_gives_up(stores: list[Store]) -> None:
    first, second, _ = (store.lead for store in stores)
    assert first.take("first", "s3://files")
    assert not second.take("second")
    assert second.leader() == Leader("first", "s3://files")
    assert first.is_ours()
    first.give_up()
    assert second.take("second")
    assert first.leader() == Leader("second", "")


def test_a_lead_that_was_lost_is_taken_again_if_nobody_else_led(stores: list[Store], url: str) -> None:
    lead = stores[0].lead
    assert lead.take("first")
    cut_off(url, "ExclusiveLock")
    assert lead.is_ours()
    assert not stores[1].lead.take("second")


def test_a_lead_that_another_took_meanwhile_is_lost(stores: list[Store], url: str) -> None:
    first, second, _ = (store.lead for store in stores)
    assert first.take("first")
    cut_off(url, "ExclusiveLock")
    assert second.take("second")
    assert not first.is_ours()
    assert second.is_ours()


def test_a_leader_that_does_nothing_loses_the_lead_and_one_that_does_keeps_it(stores: list[Store]) -> None:
    """A process that is stopped as a whole holds its lock for as long as that lasts."""
    first, second, _ = (store.lead for store in stores)
    assert first.take("first")
    assert second.end_silent(60) == 0
    assert not second.take("second")
    assert second.end_silent(0) == 1
    while not second.take("second"):
        pass
    assert not first.is_ours()


def test_who_stood_by_is_told_of_an_outage_before_it_can_lead(stores: list[Store], url: str) -> None:
    """Or it could be quicker than who led before."""
    first, second, _ = (store.lead for store in stores)
    assert first.take("first")
    assert not second.take("second")
    with psycopg.connect(url, autocommit=True) as connection:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
    with pytest.raises(StoreUnavailableError):
        second.take("second")
    assert first.is_ours()
    assert not second.take("second")


def test_only_in_the_name_of_who_leads_jobs_are_taken_begun_and_put_back(stores: list[Store]) -> None:
    old, new, worker = stores
    assert old.lead.take("old")
    worker.lead.work_for("old")
    for number in range(3):
        worker.jobs.enqueue(training(number))
    (job, *_) = worker.jobs.claim("tiny", "w", train=1)
    old.lead.give_up()
    assert new.lead.take("new")
    for work in (
        lambda: worker.jobs.claim("tiny", "w", train=1),
        lambda: worker.jobs.begin("w", [job.request_id]),
        lambda: worker.jobs.requeue("tiny", max_attempts=1, error=""),
        lambda: worker.jobs.deal({job.request_id: "there"}),
        lambda: worker.jobs.fail_all("tiny", "given up"),
    ):
        with pytest.raises(ReplacedError, match="another server runs the workers of this database now: new"):
            work()
    assert new.jobs.requeue("tiny", max_attempts=10, error="") == []
    assert [each.seq_id for each in new.jobs.claim("tiny", "v", train=10)] == [0, 1, 2]


def test_a_claim_that_is_under_way_is_whole_before_another_leads(stores: list[Store]) -> None:
    """Else it could take jobs after they were put back, and nobody would ever put those back."""
    old, new, worker = stores
    assert old.lead.take("old")
    worker.lead.work_for("old")
    old.lead.give_up()
    is_taken = threading.Event()

    def take() -> None:
        assert new.lead.take("new")
        is_taken.set()

    def work(connection: sa.Connection) -> None:
        worker.lead.check(connection)
        thread.start()
        assert not is_taken.wait(0.3)

    thread = threading.Thread(target=take)
    worker._database.write(work)
    assert is_taken.wait(30)
    thread.join()
    with pytest.raises(ReplacedError):
        worker._database.write(worker.lead.check)


_WORKER = """
import sys
from tinsmith.server.store import Store
store = Store(sys.argv[1])
store.lead.work_for("old")
store.lead.hold_as_worker()
print("holds", flush=True)
for line in sys.stdin:
    store.lead.keep_as_worker()
    print("kept", flush=True)
"""


def test_whoever_leads_knows_when_the_last_worker_of_another_is_gone(stores: list[Store], url: str) -> None:
    old, new, late = stores
    assert old.lead.take("old")
    command = [sys.executable, "-c", _WORKER, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        assert worker.stdout.readline() == "holds\n"
        cut_off(url, "ShareLock")
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "kept\n"
        old.lead.give_up()
        assert new.lead.take("new")
        assert not new.lead.workers_are_gone()
        worker.kill()
        worker.wait()
    while not new.lead.workers_are_gone():
        pass
    late.lead.work_for("old")
    with pytest.raises(ReplacedError):
        late.lead.hold_as_worker()


def test_a_worker_whose_process_is_stopped_is_not_waited_for(stores: list[Store], url: str) -> None:
    old, new, _ = stores
    assert old.lead.take("old")
    command = [sys.executable, "-c", _WORKER, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "holds\n"
        worker.send_signal(signal.SIGSTOP)
        old.lead.give_up()
        assert new.lead.end_silent(60) == 0
        assert not new.lead.workers_are_gone()
        assert new.lead.end_silent(0) == 1
        while not new.lead.workers_are_gone():
            pass
        worker.kill()


def test_only_what_the_leader_posts_is_read(stores: list[Store]) -> None:
    old, new, reader = stores
    assert old.lead.take("old")
    assert reader.bulletin.newest() is None
    for number in (1, 2):
        old.bulletin.post(Posted("old", number, b"news"))
    assert reader.bulletin.newest() == Posted("old", 2, b"news")
    old.lead.give_up()
    assert new.lead.take("new")
    assert reader.bulletin.newest() is None
    new.bulletin.begin("new")
    old.bulletin.post(Posted("old", 3, b"late"))
    assert reader.bulletin.newest() is None


def test_under_one_name_one_comes_after_the_other(stores: list[Store]) -> None:
    order: list[str] = []

    def second() -> None:
        with stores[1].alone("place"):
            order.append("second")

    thread = threading.Thread(target=second)
    with stores[0].alone("place"), stores[2].alone("another"):
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
