"""From the options to the SDK. A command gives up after `--timeout` seconds, and says after two that it is waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeVar

from tinsmith.cli.options import Options
from tinsmith.cli.output import note

if TYPE_CHECKING:
    from types import TracebackType

    from tinsmith.client.admin import AdminClient
    from tinsmith.client.config import Config
    from tinsmith.client.connection import Connection
    from tinsmith.client.futures import APIFuture
    from tinsmith.client.rest import RestClient
    from tinsmith.client.service import ServiceClient

T = TypeVar("T")

FIRST_WORD_SECONDS = 1.5
CONNECT_SECONDS = 5.0
PATIENT_SECONDS = 60.0
PATIENT_RETRY_SECONDS = 300.0


class Server:
    """The server of one command. Its clients are made on first use and closed when the block is left."""

    def __init__(self, options: Options, session_name: str | None = None) -> None:
        self.config = make_config(options)
        self.program = options.program
        self._session_name = session_name
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    @cached_property
    def connection(self) -> Connection:
        from tinsmith.client import futures
        from tinsmith.client.connection import Connection

        connection = Connection(self.config)
        self._open.callback(lambda: futures.run(connection.close, connection.loop).result())
        return connection

    @cached_property
    def rest(self) -> RestClient:
        from tinsmith.client.rest import RestClient

        return RestClient(self.connection)

    @cached_property
    def admin(self) -> AdminClient:
        from tinsmith.client.admin import AdminClient

        return AdminClient(self.connection)

    @cached_property
    def service(self) -> ServiceClient:
        from tinsmith.client.service import ServiceClient

        return self._open.enter_context(ServiceClient(config=self.config, display_name=self._session_name))

    @cached_property
    def patient_service(self) -> ServiceClient:
        """For transfers, which may be cut off and go on again. Ask something of the others first: on a dead server
        this one would wait for minutes."""
        import msgspec

        from tinsmith.client.service import ServiceClient

        patient = msgspec.structs.replace(
            self.config,
            timeout=max(self.config.timeout, PATIENT_SECONDS),
            retry_budget=max(self.config.retry_budget, PATIENT_RETRY_SECONDS),
        )
        return self._open.enter_context(ServiceClient(config=patient, display_name=self._session_name))

    def wait(self, future: APIFuture[T]) -> T:
        with self.patience():
            return future.result()

    @contextmanager
    def patience(self) -> Iterator[Callable[[], None]]:
        """Whatever takes its time in this block does not do so in silence. Gives what to call once others speak."""
        timer = threading.Timer(FIRST_WORD_SECONDS, note, [f"Waiting for {self.config.base_url} ..."])
        timer.daemon = True
        timer.start()
        try:
            yield timer.cancel
        finally:
            timer.cancel()


def make_config(options: Options) -> Config:
    from tinsmith.client.config import Config

    return Config.from_env(
        base_url=options.base_url,
        api_key=options.api_key,
        timeout=options.timeout,
        connect_timeout=min(CONNECT_SECONDS, options.timeout),
        retry_budget=options.timeout,
        telemetry=False,  # it would double the requests of a short command
    )
