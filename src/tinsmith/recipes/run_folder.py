"""The folder of a training run: how far it came, and what was measured on the way.

state.json      settings, last saved step, where its state is; replaced as a whole, so that it is never half written
metrics.jsonl   one line per step; lines after the last saved step are dropped when the run goes on from there
lock            held by the process that trains
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from tinsmith.errors import ConfigError, InvalidInputError

STATE, METRICS, LOCK = "state.json", "metrics.jsonl", "lock"
_ELSEWHERE = "Begin anew with --restart, or choose another --output."


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What state.json holds."""

    settings: dict[str, Any]
    """All that decides what is computed. A run with others is another run."""
    run_id: str
    """The same for all parts of a run that was interrupted."""
    step: int = 0
    state_path: str | None = None
    """Weights and optimizer after that step, on the server."""
    sampler_path: str | None = None
    """Set once the run is finished."""

    @property
    def is_finished(self) -> bool:
        return self.sampler_path is not None


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / METRICS

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only one process at a time trains into a folder; the system lets go of it however that process ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("w") as file:
            try:
                _lock(file.fileno())
            except BlockingIOError as error:
                raise ConfigError(
                    f"Another process trains into {self.path}. End it, or choose another --output."
                ) from error
            yield

    def open(self, settings: Mapping[str, Any], *, restart: bool) -> RunState:
        """Where the run stands: at the last saved step, or at the begin of a new one."""
        state = None if restart else self._read()
        if state is None or state.step == 0:
            state = RunState(settings=dict(settings), run_id=uuid4().hex)
            self.write(state)
        else:
            self._check_same(state.settings, settings)
        self._drop_metrics_after(state.step)
        return state

    def write(self, state: RunState) -> None:
        self._replace(STATE, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def recorded(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a process that was killed may have left half of one."""
        found = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def _read(self) -> RunState | None:
        try:
            return msgspec.json.decode((self.path / STATE).read_bytes(), type=RunState)
        except FileNotFoundError:
            if self.metrics.exists():
                raise ConfigError(
                    f"{self.metrics} is there, but no {STATE} beside it: no run of ours. {_ELSEWHERE}"
                ) from None
            return None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.path / STATE} cannot be read ({error}). {_ELSEWHERE}") from error

    def _check_same(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [
            f"{name}: {then.get(name)!r} then, {now.get(name)!r} now"
            for name in {**then, **now}
            if then.get(name) != now.get(name)
        ]
        if changed:
            told = "\n".join(f"  {each}" for each in changed)
            raise InvalidInputError(
                f"{self.path} holds a run with other settings, which cannot go on with these:\n{told}\n"
                f"Run it as it was. {_ELSEWHERE}",
                field="output",
            )

    def _drop_metrics_after(self, step: int) -> None:
        kept = [record for record in self.recorded() if step and record["step"] <= step]
        self._replace(METRICS, "".join(json.dumps(record) + "\n" for record in kept).encode())

    def _replace(self, name: str, content: bytes) -> None:
        draft = self.path / f"{name}.new"
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path / name)


def _locker() -> Callable[[int], None]:
    try:
        import fcntl
    except ImportError:  # Windows
        return lambda descriptor: None
    return lambda descriptor: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


_lock = _locker()
