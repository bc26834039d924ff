"""`tinsmith checkpoint import`: an adapter that was made elsewhere becomes a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from tinsmith.cli.connect import Server
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit_json, emit_properties

NAME = "imported"


@click.command("import")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--base", required=True, metavar="MODEL", help="The base model, by the name that the server has for it.")
@click.option("--name", default=NAME, show_default=True, metavar="NAME", help="The name of the checkpoint.")
@click.pass_obj
def import_adapter(options: Options, folder: Path, base: str, name: str) -> None:
    """Make a checkpoint of a PEFT adapter: adapter_model.safetensors and adapter_config.json in FOLDER.

    It computes what it computed before, and can be trained further, sampled from and exported. Its optimizer starts
    anew. LoRA adapters for attention, MLP and output layers are taken, with rank stabilisation and ranks of their own;
    DoRA, trained biases and whole trained modules are refused. Only Tinsmith's own server can do this.
    """
    with Server(options) as server:
        path = server.wait(server.rest.import_adapter(folder, base, name))
    if options.wants_json:
        emit_json({"checkpoint_path": path, "base_model": base, "source": str(folder)})
    else:
        rows = [("Checkpoint Path", path), ("Base Model", base), ("Imported from", str(folder))]
        emit_properties("Checkpoint Import", rows)
