"""`tinsmith serve`: the server of this package."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tinsmith.cli.failures import FAILED
from tinsmith.cli.output import emit
from tinsmith.cli.params import Number


@click.command("serve")
@click.option("--model", "models", multiple=True, required=True, metavar="MODEL", help="Hub id, folder or NAME=FOLDER.")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    metavar="PORT",
    help="0 takes a free one.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where all is kept that must last; ~/.tinsmith by default.",
)
@click.option("--database", default="", metavar="URL", help="PostgreSQL URL; by default SQLite in the state folder.")
@click.option(
    "--storage",
    default="",
    metavar="URL",
    help="Where files lie, such as s3://bucket/prefix; the state folder by default.",
)
@click.option(
    "--storage-cache-gib",
    type=Number(min=0),
    default=16,
    show_default=True,
    metavar="GIB",
    help="What local copies of such files may take up.",
)
@click.option("--api-key", "api_keys", multiple=True, metavar="KEY", help="A key to accept; repeatable.")
@click.option("--token-exchange", is_flag=True, help="Clients swap their key for a token that lasts an hour.")
@click.option(
    "--session-timeout",
    type=click.IntRange(min=1),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="When a session ends whose client is silent.",
)
@click.option(
    "--stall-timeout",
    type=click.IntRange(min=1),
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help="When a worker is started anew that hangs in one step.",
)
@click.option(
    "--replay-bound",
    type=Number(min=0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Work that a crash may cost, to be done again.",
)
@click.option(
    "--max-models",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    metavar="NUMBER",
    help="Models that one owner may have.",
)
@click.option(
    "--max-checkpoints-gib",
    type=Number(min=0, min_open=True),
    metavar="GIB",
    help="What the checkpoints of one owner may take up; no limit by default.",
)
@click.option(
    "--max-queued",
    type=click.IntRange(min=1),
    default=50_000,
    show_default=True,
    metavar="NUMBER",
    help="Operations of one owner that may wait.",
)
@click.option(
    "--max-queued-mib",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    metavar="MIB",
    help="How much data they may hold.",
)
@click.option(
    "--max-open-requests",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    metavar="NUMBER",
    help="Requests of one owner that are served at once.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "mps"]),
    default="auto",
    show_default=True,
    help="Where the models run.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="The precision of the base models.",
)
@click.option(
    "--train-workers",
    type=click.IntRange(1, 10_000),
    default=1,
    show_default=True,
    metavar="NUMBER",
    help="Processes that share the training of each model; on GPUs, each has one of its own.",
)
@click.option("--ray", metavar="ADDRESS", help="A Ray cluster for the workers: HOST:PORT, or auto.")
@click.option(
    "--sample-workers",
    default="0",
    show_default=True,
    metavar="NUMBER",
    help="With --ray: workers of each model that only sample, beside one that trains, or LEAST:MOST of them, by what "
    "there is to draw; 0 is one for both.",
)
@click.option(
    "--idle-sample-worker",
    type=Number(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="With LEAST:MOST: how long one worker less has been enough before one ends.",
)
@click.option(
    "--worker-cpus",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="NUMBER",
    help="With --ray: CPUs for each process of a worker.",
)
@click.option(
    "--shard-base",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Whether each of these processes holds only a part of the base model; auto: if the whole does not fit.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="On a GPU: a result is the same to the last bit in any batch, in training and sampling alike; slower.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Log lines for people, or one JSON object each.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged; debug has a line for every request.",
)
@click.option(
    "--audit-days",
    type=click.IntRange(min=1),
    default=400,
    show_default=True,
    metavar="DAYS",
    help="How long it is known who did what.",
)
def command(
    models: tuple[str, ...],
    host: str,
    port: int,
    state: Path | None,
    database: str,
    storage: str,
    storage_cache_gib: float,
    api_keys: tuple[str, ...],
    token_exchange: bool,
    session_timeout: int,
    stall_timeout: int,
    replay_bound: float,
    max_models: int,
    max_checkpoints_gib: float | None,
    max_queued: int,
    max_queued_mib: int,
    max_open_requests: int,
    device: str,
    dtype: str,
    train_workers: int,
    shard_base: str,
    ray: str | None,
    sample_workers: str,
    idle_sample_worker: float,
    worker_cpus: int,
    deterministic: bool,
    log_format: str,
    log_level: str,
    audit_days: int,
) -> None:
    """Serve the Tinker API on this machine."""
    from tinsmith.errors import ConfigError, MissingExtraError

    try:
        from tinsmith.server import logs
        from tinsmith.server.config import ServerConfig
        from tinsmith.server.embedded import prepared
        from tinsmith.server.main import serve
        from tinsmith.server.models import parse_source
        from tinsmith.server.scaling import parse_bounds
    except ImportError as error:
        raise MissingExtraError(error.name or "uvicorn", "server", "Serving") from error
    logs.configure(log_format, log_level)  # type: ignore[arg-type]
    with _errors_in_the_log(log_format):
        if ray == "":  # of a variable that is not set, say
            raise ConfigError("--ray is empty; give HOST:PORT of the cluster's head, or auto, or leave it out.")
        config = ServerConfig(
            models=tuple(prepared(parse_source(model)) for model in models),
            host=host,
            port=port,
            state=(state or Path.home() / ".tinsmith").absolute(),
            database=database,
            storage=storage,
            cache_bytes=int(storage_cache_gib * 2**30),
            api_keys=api_keys,
            token_exchange=token_exchange,
            session_timeout_seconds=session_timeout,
            stall_seconds=stall_timeout,
            replay_bound_seconds=replay_bound,
            max_models=max_models,
            max_checkpoint_bytes=None if max_checkpoints_gib is None else int(max_checkpoints_gib * 2**30),
            max_queued_requests=max_queued,
            max_queued_bytes=max_queued_mib * 2**20,
            max_open_requests=max_open_requests,
            device=device,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            train_workers=train_workers,
            shard_base=shard_base,  # type: ignore[arg-type]
            ray=ray or "",
            sample_workers=parse_bounds(sample_workers).least,
            most_sample_workers=parse_bounds(sample_workers).most,
            idle_sample_worker_seconds=idle_sample_worker,
            worker_cpus=worker_cpus,
            deterministic=deterministic,
            log_format=log_format,  # type: ignore[arg-type]
            log_level=log_level,  # type: ignore[arg-type]
            audit_days=audit_days,
        )
        serve(config, on_ready=lambda address: emit(f"Tinsmith is ready at {address}\n"))


@contextmanager
def _errors_in_the_log(log_format: str) -> Iterator[None]:
    """In a log for programs, what makes a start impossible is a line like others."""
    from tinsmith.errors import TinkerError

    try:
        yield
    except TinkerError as error:
        if log_format != "json":
            raise
        logging.getLogger("tinsmith.server").critical("%s", error)
        click.get_current_context().exit(FAILED)
