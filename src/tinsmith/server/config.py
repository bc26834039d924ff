"""Every setting of the server in one frozen record, made once at the entry point and passed down."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tinsmith.errors import ConfigError
from tinsmith.server.hiding import SecretsHidden
from tinsmith.server.logs import LogFormat, LogLevel
from tinsmith.server.models import ModelSource
from tinsmith.server.scaling import Bounds, check_bounds

Device: TypeAlias = Literal["auto", "cpu", "cuda", "mps"]
Dtype: TypeAlias = Literal["auto", "float32", "bfloat16"]
ShardBase: TypeAlias = Literal["auto", "always", "never"]

DATABASE_FILE = "tinsmith.db"
IDLE_SAMPLE_WORKER_SECONDS = 120.0
"""In the state folder, unless there is a database elsewhere."""

_MIB = 2**20


class ServerConfig(SecretsHidden, frozen=True, kw_only=True):
    models: tuple[ModelSource, ...]
    host: str = "127.0.0.1"
    port: int = 8000

    state: Path = msgspec.field(default_factory=lambda: Path.home() / ".tinsmith")
    """The folder of checkpoints and the default database, or of local copies of files that lie elsewhere."""

    database: str = ""
    """A database URL; empty means a SQLite file in the state folder."""

    storage: str = ""
    """The URL under which checkpoints, snapshots and the weights of samplers lie; empty means in the state folder."""

    cache_bytes: int = 16 * 2**30
    """What local copies of files under that URL may take up, besides those that were used within the hour."""

    api_keys: tuple[str, ...] = ()
    """Keys accepted besides those in the database."""

    takes_any_key: bool = False
    """Local mode: whoever reaches it is the user of this machine, whatever keys are in the database."""

    token_exchange: bool = False
    """Whether clients swap their key for a short-lived token first."""

    device: Device = "auto"
    dtype: Dtype = "auto"
    deterministic: bool = False

    max_context: int | None = None
    """Tokens of one sequence; `None` means as many as the model was made for."""

    kv_tokens: int | None = None
    """Tokens the sampler's cache holds; `None` means as many as fit."""

    train_token_budget: int | None = None
    """Tokens of one training micro-batch; `None` means as many as fit."""

    train_workers: int = 1
    """Processes that share the training of each model, all on one machine unless Ray places them."""

    ray: str = ""
    """The address of a Ray cluster that the workers are placed on, or `auto`; empty means processes on this machine."""

    sample_workers: int = 0
    """On Ray: workers that only sample, for each model, while another one trains. At 0 one worker does both."""

    most_sample_workers: int | None = None
    """Up to so many, if there is much to draw; `None` means always the same number."""

    idle_sample_worker_seconds: float = IDLE_SAMPLE_WORKER_SECONDS
    """How long one of them less has been enough before one ends."""

    worker_cpus: int = 1
    """On Ray: what each process of a worker asks for."""

    shard_base: ShardBase = "auto"
    """Whether each of them has a shard of the base model's layers; `auto` means where a whole one does not fit."""

    stall_seconds: int = 3600
    """How long one step of an engine may take, a micro-batch at the most, before its worker is started anew."""

    replay_bound_seconds: float = 60.0
    """How much work may have to be done again after a crash: snapshots of models are written often enough for it."""

    result_ttl_seconds: int = 24 * 3600
    """How long the result of an operation can be fetched."""

    log_format: LogFormat = "text"
    log_level: LogLevel = "info"

    audit_days: int = 400
    """How long the audit trail goes back."""

    session_timeout_seconds: int = 600
    """How long a session goes on whose client sends no heartbeat. Clients send one every ten seconds."""

    idle_seconds: int = 7 * 24 * 3600
    """How long things are kept that nobody uses: a model of a session that has ended, and weights that a sampler has
    copied from a model. Those of an ended session are not kept at all; checkpoints are not affected."""

    long_poll_seconds: float = 25.0
    """How long a request for a result waits for it. Clients give up after 45 s."""

    url_lifetime_seconds: int = 3600
    """How long a download URL is good for. Clients ask for new ones five minutes before that."""

    inline_result_bytes: int = _MIB
    """Of a larger result, a client that allows it first learns the size, so that it can plan its memory."""

    max_models: int = 1000
    """Models of one owner that can be worked on."""

    max_checkpoint_bytes: int | None = None
    """What the checkpoints of one owner may take up; `None` means as much as the disk holds."""

    max_sampler_copies: int = 256
    """Copies of models that are kept for the samplers of one owner, besides those used within the hour."""

    max_queued_requests: int = 50_000
    max_queued_bytes: int = 2048 * _MIB
    """What of one owner may wait to be done."""

    max_paperwork_bytes: int = 64 * _MIB
    paperwork_bytes_per_second: int = 4096
    """Records of one owner that no work is done for, such as refusals: at once, and how much more as time passes."""

    max_open_requests: int = 4096
    """Requests of one owner that are served at once; each result that is waited for is one."""

    max_incoming_bytes: int = 512 * _MIB
    """Of one owner: bodies that are being received and unpacked."""

    max_body_bytes: int = 64 * _MIB
    max_decompressed_bytes: int = 256 * _MIB

    max_json_bytes: int = 32 * _MIB
    """JSON grows tenfold when it is decoded, so less of it is accepted."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("No model to serve. Name at least one, for example --model Qwen/Qwen3-0.6B.")
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ConfigError(f"Two models have the same name: {', '.join(names)}. Use NAME=FOLDER to rename one.")
        if self.ray and self.ray != "auto":
            check_ray_address(self.ray)
        if self.sample_workers and not self.ray:
            raise ConfigError("--sample-workers is for workers on a Ray cluster: give its address with --ray, or auto.")
        check_bounds(self.sampler_bounds)
        if self.idle_sample_worker_seconds != IDLE_SAMPLE_WORKER_SECONDS and len({*self.sampler_bounds}) == 1:
            raise ConfigError("--idle-sample-worker goes with bounds, such as --sample-workers 1:4.")
        if self.worker_cpus != 1 and not self.ray:
            raise ConfigError("--worker-cpus is for workers on a Ray cluster: give its address with --ray, or auto.")
        for number, key in enumerate(self.api_keys, start=1):
            if not key.startswith("tml-"):  # it is not told: what is no key may be a password
                raise ConfigError(f"The API key number {number} must start with 'tml-': clients send no others.")

        if self.storage.partition(":")[0].lower() == "memory":
            raise ConfigError(
                f"--storage is {self.storage!r}, which each process has for itself: what one writes, no other finds. "
                "Leave it out, so that files lie in the state folder, or give the URL of a bucket: s3://bucket/prefix."
            )
        self._check_sharding()

    def _check_sharding(self) -> None:
        if self.shard_base != "always":
            return
        if self.train_workers == 1:
            raise ConfigError(
                "shard_base is 'always', but train_workers is 1: there is nobody to share the base model with. Start "
                "with --train-workers 2 or more, or without --shard-base."
            )
        if self.device == "mps":
            raise ConfigError(
                "shard_base is 'always', but the device is 'mps', where layers cannot be gathered. Use --device cpu, "
                "or leave --shard-base out."
            )

    @property
    def sampler_bounds(self) -> Bounds:
        most = self.sample_workers if self.most_sample_workers is None else self.most_sample_workers
        return Bounds(self.sample_workers, most)

    @property
    def database_url(self) -> str:
        """The same for all processes: a relative file is one of the folder that this one was started in."""
        if not self.database:
            return f"sqlite:///{self.state.absolute() / DATABASE_FILE}"
        scheme, _, file = self.database.partition(":///")
        if scheme.startswith("sqlite") and file not in ("", ":memory:"):
            return f"{scheme}:///{Path(file).absolute()}"
        return self.database

    @property
    def checkpoints(self) -> Path:
        return self.state / "checkpoints"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def check_ray_address(address: str) -> None:
    if "://" in address:
        raise ConfigError(
            f"--ray is {address!r}, and this server is no Ray Client: start it on a node of the cluster, with --ray "
            "auto or --ray HOST:PORT."
        )
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ConfigError(f"--ray is {address!r}; give HOST:PORT of the cluster's head, or auto.")


def is_loopback(host: str) -> bool:
    """Whether this name or address always means the machine that it is used on."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
