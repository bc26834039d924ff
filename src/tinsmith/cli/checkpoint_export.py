"""`tinsmith checkpoint export`: a checkpoint as a folder that other tools load."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
    from tinsmith.client.rest import ExportForm
    from tinsmith.export import Adapter
    from tinsmith.types import ExternalWeightsUrlsResponse

PEFT, MERGED, GGUF = FORMS = ("peft", "merged", "gguf")
ARCHIVE = "archive.tar"


@click.command("export")
@click.argument("path", type=CHECKPOINT_PATH)
@click.option("--to", "form", type=click.Choice(FORMS), required=True, help="An adapter, or a model that needs none.")
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
    help="The base model, as a folder or a hub id; merges here, and not on the server.",
)
@click.option("--data-note", default="", metavar="TEXT", help="What the model card says of the data it was trained on.")
@click.option("--force", is_flag=True, help="Replace the folder if it is not empty, once the new one is complete.")
@click.pass_obj
def export(options: Options, path: str, form: str, output: Path, base: str | None, data_note: str, force: bool) -> None:
    """Make a PEFT adapter or a whole model of a checkpoint, with a model card.

    \b
    peft     adapter_model.safetensors and adapter_config.json, for `peft`, vLLM and others
    merged   the base model with the adapter added to its weights, for whatever loads a model folder
    gguf     the same as one file for llama.cpp, Ollama and LM Studio, in the base's own number format

    A server of Tinsmith makes the export itself, from the very weights that the adapter was trained on. With --base,
    and of other servers, the adapter is fetched and merged here. The base is then looked for, by its name, as a folder
    here and on the Hugging Face Hub or in its cache (HF_HOME, HF_HUB_OFFLINE). Models are read and written piece by
    piece, and their size is no matter for memory.

    Training and exported checkpoints work with every server. Sampler weights can be fetched from Tinsmith's own server
    only; the hosted service does not hand them out. Adapters of mixture-of-experts layers are refused.
    """
    target = output.expanduser().absolute()
    result: dict[str, Any] = {"checkpoint_path": path, "format": form, "destination": str(target)}
    with Server(options) as server:
        made = None if base else _made_by_server(server, path, form, target, data_note, force)
        result |= made or _made_here(server, path, form, target, base, data_note, force)
    result["size_bytes"] = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    _tell(options, result)


def _made_by_server(
    server: Server, path: str, form: str, target: Path, data_note: str, force: bool
) -> dict[str, str] | None:
    """What the result says of the base; nothing if the server makes no exports."""
    from tinsmith.errors import UnsupportedByServerError

    with server.patience() as stop_waiting, Bar(counts_bytes=True) as bar:

        def on_bytes(file: str, done: int, total: int | None) -> None:
            stop_waiting()
            bar.report(file, done, total)

        making = server.rest.export_checkpoint(
            path, target, cast("ExportForm", form), data_note=data_note, force=force, on_bytes=on_bytes
        )
        try:
            making.result()
        except UnsupportedByServerError:
            return None
    return {"base_model": server.wait(server.rest.get_weights_info_by_tinker_path(path)).base_model}


def _made_here(
    server: Server, path: str, form: str, target: Path, base: str | None, data_note: str, force: bool
) -> dict[str, str]:
    from tinsmith.export import Adapter, BaseModel, Story, export_files, new_folder, write_files

    with new_folder(target, force=force) as folder, tempfile.TemporaryDirectory(dir=folder.parent) as name:
        _fetch(server, path, Path(name))
        adapter = Adapter(Path(name))
        base_model = base or _named_base(adapter)
        base_folder = None if form == PEFT else _find(base_model)
        story = Story(_absolute(base_model) if form == PEFT else base_model, path, data_note)
        with Bar(counts_bytes=True) as bar:
            model = None if base_folder is None else BaseModel(base_folder)
            write_files(export_files(form, adapter, model, story), folder, bar.report)
    return {"base_model": base_model, **({"base_folder": str(base_folder)} if base_folder else {})}


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
            f"{server.program} checkpoint list --run-id {path.split('/')[2]}",
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


def _named_base(adapter: Adapter) -> str:
    if not adapter.base_model:
        raise CommandFailed("The checkpoint does not say what its base model is.", remedy="Name it with --base.")
    return adapter.base_model


def _absolute(base_model: str) -> str:
    """For those who load the adapter from another folder."""
    found = Path(base_model).expanduser()
    return str(found.absolute()) if found.is_dir() else base_model


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
