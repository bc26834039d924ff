"""`tinsmith checkpoint push-hf`: a checkpoint as a PEFT adapter on the Hugging Face Hub."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tinsmith.cli.checkpoint_download import fetch
from tinsmith.cli.connect import Server
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit_json, emit_properties, note
from tinsmith.cli.params import CHECKPOINT_PATH

if TYPE_CHECKING:
    from huggingface_hub import HfApi

README = "README.md"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
NOT_FOR_THE_HUB = (".tinker_path", "checkpoint_complete")
MAX_NAME = 96
ORIGIN = re.compile(r"^tinker_path: (\S+)$", re.MULTILINE)


class Upload(NamedTuple):
    """Where to, and which files."""

    repo_id: str
    public: bool
    revision: str | None
    commit_message: str | None
    create_pr: bool
    allow_patterns: Sequence[str]
    ignore_patterns: Sequence[str]


@click.command("push-hf")
@click.argument("path", type=CHECKPOINT_PATH)
@click.option("-r", "--repo", metavar="REPO", help="Such as USER/NAME; made from the model and the run by default.")
@click.option("--public", is_flag=True, help="Make a public repository, or agree to upload to one.")
@click.option("--revision", metavar="BRANCH", help="The branch to upload to.")
@click.option("--commit-message", metavar="TEXT", help="What the commit says.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead.")
@click.option("--allow-pattern", multiple=True, metavar="PATTERN", help="Only files that match; repeatable.")
@click.option("--ignore-pattern", multiple=True, metavar="PATTERN", help="No files that match; repeatable.")
@click.option("--no-model-card", is_flag=True, help="Do not write a README.md where there is none.")
@click.pass_obj
def push_hf(
    options: Options,
    path: str,
    repo: str | None,
    public: bool,
    revision: str | None,
    commit_message: str | None,
    create_pr: bool,
    allow_pattern: Sequence[str],
    ignore_pattern: Sequence[str],
    no_model_card: bool,
) -> None:
    """Upload a training or exported checkpoint to the Hugging Face Hub."""
    hub = _hub()
    user = _user(hub)
    with Server(options) as server, tempfile.TemporaryDirectory(prefix="tinsmith-") as name:
        run = server.wait(server.rest.get_training_run_by_tinker_path(path, "accessible"))
        repo_id = repo or f"{user}/{_repo_name(run.base_model, run.training_run_id)}"
        upload = Upload(repo_id, public, revision, commit_message, create_pr, allow_pattern, ignore_pattern)
        has_card = _check_repo(hub, upload, path)
        folder = Path(name)
        fetch(server, path, folder)
        _check_adapter(folder, path)
        if not (no_model_card or has_card):
            _write_card(folder, path, repo_id, run.base_model)
        _send(hub, upload, folder)
    _tell(options, path, upload)


def _hub() -> HfApi:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        from tinsmith.errors import MissingExtraError

        raise MissingExtraError("huggingface_hub", "tokenizers", "Uploading to the Hugging Face Hub") from error
    return HfApi()


def _user(hub: HfApi) -> str:
    with _explained("You are not logged in at the Hugging Face Hub", "Run `hf auth login`, or set HF_TOKEN."):
        return str(hub.whoami()["name"])


def _repo_name(base_model: str, run_id: str) -> str:
    name = re.sub(r"[^\w.-]+", "-", f"tinker-{base_model.rpartition('/')[2]}-{run_id}")
    return re.sub(r"[.-]{2,}", "-", name)[:MAX_NAME].strip(".-")


def _check_repo(hub: HfApi, upload: Upload, path: str) -> bool:
    """Whether the repository has a model card; refuses one that holds something else, or shows it to everybody."""
    from huggingface_hub.errors import RepositoryNotFoundError

    with _explained("The Hugging Face Hub cannot be used", "Check --repo and the rights of your token."):
        try:
            is_private = hub.repo_info(upload.repo_id).private
        except RepositoryNotFoundError:
            return False
        card = _existing_card(hub, upload)
    if not is_private and not upload.public:
        raise CommandFailed(
            f"The repository {upload.repo_id} is public.", remedy="Add --public if everybody may see this checkpoint."
        )
    origin = ORIGIN.search(card)
    if origin and origin[1] != path:
        raise CommandFailed(
            f"The repository {upload.repo_id} holds another checkpoint, {origin[1]}.",
            remedy="Name another one with --repo, or remove the line 'tinker_path' from its README.md.",
        )
    return bool(card)


def _existing_card(hub: HfApi, upload: Upload) -> str:
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    try:
        file = hub.hf_hub_download(upload.repo_id, README, revision=upload.revision)
    except (EntryNotFoundError, RevisionNotFoundError):
        return ""
    return Path(str(file)).read_text(encoding="utf-8")


def _check_adapter(folder: Path, path: str) -> None:
    if (folder / ADAPTER_CONFIG).exists() and any((folder / name).exists() for name in ADAPTER_WEIGHTS):
        return
    names = ", ".join(sorted(file.name for file in folder.iterdir() if file.name not in NOT_FOR_THE_HUB))
    raise CommandFailed(
        f"{path} is no PEFT adapter: its files are {names}.",
        remedy=f"An adapter has {ADAPTER_CONFIG} and {' or '.join(ADAPTER_WEIGHTS)}. Encrypted files must be decrypted "
        "first and uploaded by hand.",
    )


def _write_card(folder: Path, path: str, repo_id: str, base_model: str) -> None:
    from tinsmith.export import Story, write_files
    from tinsmith.export.adapter import read_json
    from tinsmith.export.card import Learned, peft_card

    learned = Learned.of_config(read_json(folder / ADAPTER_CONFIG))
    write_files([peft_card(learned, Story(base_model, path, place=repo_id))], folder)


def _send(hub: HfApi, upload: Upload, folder: Path) -> None:
    note(f"Uploading to {upload.repo_id} ...")
    with _explained("The upload failed", "Check --repo, the rights of your token, and the connection."):
        hub.create_repo(upload.repo_id, private=not upload.public, exist_ok=True)
        if upload.revision and not upload.create_pr:
            hub.create_branch(upload.repo_id, branch=upload.revision, exist_ok=True)
        hub.upload_folder(
            repo_id=upload.repo_id,
            folder_path=folder,
            commit_message=upload.commit_message,
            revision=upload.revision,
            create_pr=upload.create_pr,
            allow_patterns=list(upload.allow_patterns) or None,
            ignore_patterns=[*NOT_FOR_THE_HUB, *upload.ignore_patterns],
        )


def _tell(options: Options, path: str, upload: Upload) -> None:
    result: dict[str, Any] = {"checkpoint_path": path, "repo_id": upload.repo_id}
    if upload.revision:
        result["revision"] = upload.revision
    result["public"] = upload.public
    if options.wants_json:
        emit_json(result)
        return
    titles = {"checkpoint_path": "Checkpoint Path", "repo_id": "Repository", "revision": "Revision", "public": "Public"}
    rows = [(titles[key], {True: "Yes", False: "No"}.get(value, value)) for key, value in result.items()]
    emit_properties(f"Uploaded: {upload.repo_id}", rows)


@contextmanager
def _explained(headline: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except CommandFailed:
        raise
    except Exception as error:  # the hub's library lets through those of whatever HTTP library it uses
        raise CommandFailed(headline, str(error).strip().partition("\n")[0], remedy) from error
