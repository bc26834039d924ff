"""`tinsmith checkpoint export`: a checkpoint as a folder that other tools load."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from tinsmith.cli import shown
from tinsmith.cli.checkpoint_download import fetch
from tinsmith.cli.connect import Server
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit_json, emit_properties, note
from tinsmith.cli.params import CHECKPOINT_PATH
from tinsmith.cli.progress import Bar

if TYPE_CHECKING:
    from tinsmith.types import ExternalWeightsUrlsResponse

PEFT, MERGED = "peft", "merged"
ARCHIVE = "archive.tar"
ON_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")


@click.command("export")
@click.argument("path", type=CHECKPOINT_PATH)
@click.option(
    "--to", "form", type=click.Choice([PEFT, MERGED]), required=True, help="An adapter, or a model that needs none."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FOLDER",
    help="The folder to make; it appears when it is complete.",
)
@click.option(
    "--base",
    metavar="MODEL",
    help="The base model, as a folder or a hub id; else the one that the checkpoint names.",
)
@click.option("--force", is_flag=True, help="Replace the folder if it is not empty, once the new one is complete.")
@click.pass_obj
def export(options: Options, path: str, form: str, output: Path, base: str | None, force: bool) -> None:
    """Make a PEFT adapter or a whole model of a checkpoint.

    \b
    peft     adapter_model.safetensors and adapter_config.json, for `peft`, vLLM and others
    merged   the base model with the adapter added to its weights, for whatever loads a model folder

    For a merged model the base is looked for in --base, in the folder that a server on this machine has it from, and
    then, by its name, as a folder here and on the Hugging Face Hub or in its cache (HF_HOME, HF_HUB_OFFLINE). It is
    read and written piece by piece, in its own number format, and its size is no matter for memory.

    Training and exported checkpoints work with every server. Sampler weights can be fetched from Tinsmith's own server
    only; the hosted service does not hand them out. Adapters of mixture-of-experts layers are refused.
    """
    from tinsmith.export import new_folder

    target = output.expanduser().absolute()
    with new_folder(target, force=force) as folder, tempfile.TemporaryDirectory(dir=folder.parent) as name:
        adapter_folder = Path(name)
        with Server(options) as server:
            _fetch(server, path, adapter_folder)
            served = _served_folder(server, path) if form == MERGED and base is None else None
        base_model = base or _named_base(adapter_folder)
        result: dict[str, Any] = {"checkpoint_path": path, "format": form, "destination": str(target)}
        result["base_model"] = base_model
        if form == PEFT:
            _write_peft(adapter_folder, folder, base_model, path)
        else:
            base_folder = served or _find(base_model)
            result["base_folder"] = str(base_folder)
            _write_merged(adapter_folder, base_folder, folder, base_model, path)
        result["size_bytes"] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    _tell(options, result)


def _tell(options: Options, result: Mapping[str, Any]) -> None:
    if options.wants_json:
        emit_json(result)
        return
    titles = {
        "checkpoint_path": "Checkpoint Path",
        "format": "Format",
        "destination": "Exported to",
        "base_model": "Base Model",
        "base_folder": "Base Weights",
    }
    rows = [(title, str(result[key])) for key, title in titles.items() if key in result]
    emit_properties("Checkpoint Export", [*rows, ("Total Size", shown.size(result["size_bytes"]))])


# --- the adapter -----------------------------------------------------------------------------------------------------


def _fetch(server: Server, path: str, folder: Path) -> None:
    from tinsmith.types import ParsedCheckpointTinkerPath

    if ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type == "sampler":
        _fetch_archive(server, path, folder)
    else:
        fetch(server, path, folder)


def _fetch_archive(server: Server, path: str, folder: Path) -> None:
    """Sampler weights, all in one file: the API has had no other way to them, and newer servers need not have this."""
    import tarfile

    from tinsmith.client.download import download_files
    from tinsmith.errors import APIError, NotFoundError

    connection = server.connection

    async def signed() -> ExternalWeightsUrlsResponse:
        return await _archive_url(server, path)

    try:
        server.wait(connection.run(lambda: download_files(connection, signed, folder, label=path)))
    except NotFoundError as error:
        raise CommandFailed(
            f"{path} cannot be fetched",
            f"Sampler weights come from servers of Tinsmith only, and they must be there. ({error})",
            "Export a training checkpoint (.../weights/..., made by save_state) of the same run instead: "
            f"tinsmith checkpoint list --run-id {path.split('/')[2]}",
        ) from error
    try:
        with tarfile.open(folder / ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
    except tarfile.TarError as error:
        raise APIError(f"The archive of {path} cannot be read: {error}") from error
    (folder / ARCHIVE).unlink()


async def _archive_url(server: Server, path: str) -> ExternalWeightsUrlsResponse:
    import msgspec

    from tinsmith.client.connection import Call
    from tinsmith.client.transport import Traffic
    from tinsmith.types import ExternalWeightsUrlsResponse

    _, _, run_id, kind, name = path.split("/")
    place = f"/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/archive"
    answer = msgspec.json.decode((await server.connection.call(Call("GET", place, traffic=Traffic.REST))).body)
    return ExternalWeightsUrlsResponse.from_builtins({"urls": {ARCHIVE: answer["url"]}, "expires": answer["expires"]})


# --- the base --------------------------------------------------------------------------------------------------------


def _named_base(adapter_folder: Path) -> str:
    from tinsmith.export.adapter import Adapter

    name = Adapter(adapter_folder).base_model
    if not name:
        raise CommandFailed("The checkpoint does not say what its base model is.", remedy="Name it with --base.")
    return name


def _served_folder(server: Server, path: str) -> Path | None:
    """Where a server on this machine has the base from: the very weights that the adapter was trained on."""
    from tinsmith.client.connection import Call
    from tinsmith.errors import APIStatusError
    from tinsmith.types import GetInfoRequest, GetInfoResponse
    from tinsmith.wire import json as wire_json

    if urlsplit(server.config.base_url).hostname not in ON_THIS_MACHINE:
        return None
    asked = Call("POST", "/api/v1/get_info", wire_json.encode(GetInfoRequest(model_id=path.split("/")[2])))
    try:
        info = server.wait(server.connection.run(lambda: server.connection.call_for(GetInfoResponse, asked)))
    except APIStatusError:  # the run may be somebody else's, and only the checkpoint public
        return None
    folder = Path(info.model_data.tokenizer_id or "")
    return folder if folder.is_absolute() and folder.is_dir() else None


def _find(base_model: str) -> Path:
    from tinsmith.errors import ConfigError
    from tinsmith.server.models import find, parse_source

    try:
        source = parse_source(base_model)
        if not source.is_folder:
            note(f"Looking for {base_model} on the Hugging Face Hub and in its cache ...")
        return find(source)
    except ConfigError as error:
        raise CommandFailed(
            f"There are no base weights of {base_model!r}", str(error), "Name a folder or a hub id with --base."
        ) from error


# --- the folder ------------------------------------------------------------------------------------------------------


def _write_peft(adapter: Path, folder: Path, base_model: str, path: str) -> None:
    from tinsmith.export import write_peft

    found = Path(base_model).expanduser()
    write_peft(adapter, folder, base_model=str(found.absolute()) if found.is_dir() else base_model, origin=path)


def _write_merged(adapter: Path, base_folder: Path, folder: Path, base_model: str, path: str) -> None:
    from tinsmith.export import write_merged

    with Bar(counts_bytes=True) as bar:
        write_merged(adapter, base_folder, folder, base_model=base_model, origin=path, on_progress=bar.report)
