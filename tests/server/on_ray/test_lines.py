"""What is said between the API process and a worker on Ray, and who may say it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tinsmith.server.bell import Bell
from tinsmith.server.messages import Message
from tinsmith.server.on_ray import line, lives
from tinsmith.server.on_ray.line import Line
from tinsmith.server.on_ray.lives import RayLife
from tinsmith.server.on_ray.messages import LineAddress, Order, Report

HERE = "127.0.0.1"
SECONDS = 60.0
ENDED = 3


class TalkativeWorker:
    """Tells that it is ready, which ids it was rung for, and its last words when it shall end."""

    def __init__(self) -> None:
        self.line = Line(HERE)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        bell = Bell(self.line.wait_for_call())
        self.line.tell(Message(ready=True))
        while not bell.is_closed:
            if bell.rang(within_seconds=SECONDS):
                self.line.tell(Message(done=("job",)))
        self.line.tell(Message(failed="last words"))
        self.line._caller.close()


class Orders:
    """In place of the bridge: what it was told."""

    def __init__(self) -> None:
        self.told: list[Order] = []

    def tell(self, order: Order) -> None:
        self.told.append(order)


def heard_by(talk: Callable[[RayLife, AsyncIterator[Message]], Any], orders: Orders | None = None) -> None:
    async def run() -> None:
        life = RayLife(orders or Orders(), 1)  # type: ignore[arg-type]
        async with asyncio.timeout(SECONDS):
            await talk(life, (msgspec.json.decode(said, type=Message) async for said in life.heard()))

    asyncio.run(run())


def test_a_worker_is_woken_heard_and_dismissed_and_its_last_words_come_before_its_end() -> None:
    async def talk(life: RayLife, said: AsyncIterator[Message]) -> None:
        life.wake()
        life.dismiss()  # neither does anything to one that was not called yet
        life.hear(Report(messages=[Message(where="there")]))
        life.hear(Report(line=TalkativeWorker().line.address))
        assert (await anext(said)).where == "there"
        assert (await anext(said)).ready
        life.wake()
        assert (await anext(said)).done == ("job",)
        life.dismiss()
        life.wake()
        life.hear(Report(ended=ENDED))
        assert [message.failed async for message in said] == ["last words"]
        assert await life.ended() == ENDED

    heard_by(talk)


def test_an_end_is_known_also_if_a_machine_that_is_gone_never_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "LAST_WORDS_SECONDS", 0.1)

    async def talk(life: RayLife, said: AsyncIterator[Message]) -> None:
        life.hear(Report(line=TalkativeWorker().line.address))
        assert (await anext(said)).ready
        life.hear(Report(ended=ENDED))
        assert [message async for message in said] == []
        assert await life.ended() == ENDED

    heard_by(talk)


def test_a_worker_that_cannot_be_reached_is_killed_with_the_reason() -> None:
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    orders = Orders()

    async def talk(life: RayLife, said: AsyncIterator[Message]) -> None:
        life.hear(Report(line=LineAddress(HERE, port, "secret")))
        why = (await anext(said)).failed
        assert f"{HERE}:{port}" in why
        assert "at all ports" in why

    heard_by(talk, orders)
    assert [order.do for order in orders.told] == ["kill"]


def test_of_a_worker_that_was_gone_before_it_could_be_called_the_end_is_told() -> None:
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    orders = Orders()

    async def talk(life: RayLife, said: AsyncIterator[Message]) -> None:
        life.hear(Report(line=LineAddress(HERE, port, "secret")))
        life.hear(Report(messages=[Message(failed="its actor is gone: out of memory")]))
        life.hear(Report(ended=ENDED))
        assert [message.failed async for message in said] == ["its actor is gone: out of memory"]

    heard_by(talk, orders)
    assert orders.told == []


def test_who_does_not_know_the_secret_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "SECRET_SECONDS", 0.2)
    worker = TalkativeWorker()
    host, port, secret = msgspec.structs.astuple(worker.line.address)
    for guess in (b"", b"x" * len(secret), secret[:-1].encode()):
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(guess)
            stranger.settimeout(SECONDS)
            assert stranger.recv(1) == b"", f"{guess!r} was answered"
    assert dripped((host, port), len(secret)) < len(secret)
    monkeypatch.setattr(line, "SECRET_SECONDS", SECONDS)
    with socket.create_connection((host, port)) as known, known.makefile("rb") as said:
        known.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for letter in secret.encode():
            known.send(bytes([letter]))
        assert msgspec.json.decode(said.readline(), type=Message).ready
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))


def dripped(address: tuple[str, int], most: int) -> int:
    """How many bytes are taken from a stranger who sends them one by one, before it is hung up on."""
    with socket.create_connection(address) as stranger:
        stranger.settimeout(0.1)
        for number in range(most):
            with suppress(TimeoutError):
                try:
                    stranger.sendall(b"x")
                    stranger.recv(1)
                except ConnectionError:
                    pass
                return number
    return most
