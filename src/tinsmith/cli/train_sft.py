"""`tinsmith train sft`: teaches a model the answers of a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connect import Server
from tinsmith.cli.errors import CommandFailed, did_you_mean
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_json, note
from tinsmith.cli.params import Number

if TYPE_CHECKING:
    from tinsmith.recipes.settings import Settings
    from tinsmith.recipes.sft import Outcome
    from tinsmith.recipes.sinks import Sink
    from tinsmith.types import SupportedModel

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 128 - len("-000050")
"""Checkpoints have up to 128 characters, and those of the training state end with their step."""


@click.command("sft")
@click.argument("data", type=_FILE)
@click.option("--model", metavar="MODEL", help="The base model; the server's, if it has only one.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where metrics.jsonl and what is needed to go on are kept; DATA-sft here by default.",
)
@click.option("--restart", is_flag=True, help="Begin anew, whatever the folder holds.")
@click.option("--name", metavar="NAME", help="What the checkpoints are called; the name of DATA by default.")
@click.option("--rank", type=click.IntRange(min=1), default=32, show_default=True, metavar="N", help="Of the adapter.")
@click.option(
    "--learning-rate",
    "--lr",
    type=Number(min=0, min_open=True),
    default=5e-4,
    show_default=True,
    metavar="X",
    help="At its height. Small models take more (1e-3 with 135M parameters), large ones less (2e-4 with 70B).",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=8, show_default=True, metavar="N", help="Examples in a step."
)
@click.option(
    "--epochs", type=click.IntRange(min=1), metavar="N", help="How often to go through the data.  [default: 3]"
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="How many steps to take, instead of --epochs.")
@click.option(
    "--schedule",
    type=click.Choice(["cosine", "linear", "constant"]),
    default="cosine",
    show_default=True,
    help="How the learning rate falls to 0, or that it does not.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Steps in which the learning rate rises to its height.",
)
@click.option(
    "--eval-split",
    type=Number(min=0, max=1, max_open=True),
    default=0.0,
    show_default=True,
    metavar="FRACTION",
    help="The share of the examples that is held out and measured.",
)
@click.option("--eval-data", type=_FILE, metavar="FILE", help="Examples to measure, instead of --eval-split.")
@click.option(
    "--eval-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps between two measurements; one per epoch by default, and always one before and one at the end.",
)
@click.option(
    "--save-every",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    metavar="N",
    help="Steps after which the state is saved; the latest is kept.",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Cut longer examples to so many tokens. Without it, one that is too long for the model is refused.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Of the first weights, the order of the examples and the split.",
)
@click.option("--wandb", metavar="PROJECT", help="Send the metrics to this project at Weights & Biases, too.")
@click.option("--trackio", metavar="PROJECT", help="Send the metrics to this project of trackio, too.")
@click.pass_obj
def sft(
    options: Options,
    /,
    data: Path,
    model: str | None,
    output: Path | None,
    restart: bool,
    name: str | None,
    eval_data: Path | None,
    wandb: str | None,
    trackio: str | None,
    **settings: Any,
) -> None:
    """Teach a model the answers in DATA, a JSONL file.

    \b
    Each line is a conversation, or a prompt with its completion; a file holds one of both kinds:
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr!"}]}
    {"prompt": "Hi", "completion": "Arr!"}

    Conversations are told to the model in its own chat template, and so are prompts and completions, as a message of
    the user and the answer. For a model without a template they are plain texts that follow each other. The loss is
    taken on what the assistant says and on the end of its turns, and on nothing else.

    After an interruption the same command goes on from the last saved state. Ctrl-C saves one first; a second Ctrl-C
    leaves at once.
    """
    _check_alternatives(settings, eval_data)
    checkpoints = _named_after(data) if name is None else _checked_name(name)
    from tinsmith.cli.train_watch import Watch
    from tinsmith.recipes.examples import read_examples
    from tinsmith.recipes.sft import train

    sinks = _sinks(wandb, trackio)
    training = read_examples(data)
    held_out = read_examples(eval_data) if eval_data else None
    folder = output or Path(f"{data.stem}-sft")
    with Server(options, session_name=data.stem if name is None else name) as server:
        found = _model(server, model)
        chosen = _settings(settings, model=found.model_name, name=checkpoints)
        with Watch() as watch:
            outcome = train(
                server.patient_service,
                training,
                chosen,
                folder,
                eval_data=held_out,
                max_context=found.max_context_length,
                restart=restart,
                sinks=sinks,
                listener=watch,
            )
    if not outcome.state.is_finished:
        raise KeyboardInterrupt
    _show(options, outcome, folder, chosen.name)


def _check_alternatives(settings: dict[str, Any], eval_data: Path | None) -> None:
    if settings["epochs"] and settings["steps"]:
        raise click.UsageError("Give either --epochs or --steps.")
    if settings["eval_split"] and eval_data:
        raise click.UsageError("Give either --eval-split or --eval-data.")


def _named_after(data: Path) -> str:
    return _NOT_IN_NAMES.sub("-", data.stem).lstrip("._-")[:_LONGEST_NAME] or "sft"


def _checked_name(name: str) -> str:
    """Now, or the server would refuse it when the first state is saved, and what was trained until then is lost."""
    usable = _NOT_IN_NAMES.sub("-", name)
    if not usable[:1].isalnum() or len(usable) > _LONGEST_NAME:
        raise click.BadParameter(
            f"{name[:_LONGEST_NAME]!r} cannot name checkpoints. Use up to {_LONGEST_NAME} letters, digits, dots, "
            "dashes and underscores, beginning with a letter or digit.",
            param_hint="--name",
        )
    return usable


def _sinks(wandb: str | None, trackio: str | None) -> list[Sink]:
    from tinsmith.recipes.sinks import TRACKIO, WANDB, Sink

    return [Sink(package, project, note) for package, project in ((WANDB, wandb), (TRACKIO, trackio)) if project]


def _model(server: Server, name: str | None) -> SupportedModel:
    with server.patience():
        models = server.service.get_server_capabilities().supported_models
    trainable = {model.model_name: model for model in models if model.model_name and model.trainable is not False}
    if name is None and len(trainable) == 1:
        (name,) = trainable
    if name not in trainable:
        problem = f"cannot train {name!r}." if name else f"has {len(trainable)} models."
        choice = f"{did_you_mean(name or '', trainable)}Choose one with --model: {', '.join(trainable)}"
        raise CommandFailed(f"The server at {server.config.base_url} {problem}", remedy=choice if trainable else "")
    return trainable[name]


def _settings(given: dict[str, Any], **more: Any) -> Settings:
    from tinsmith.recipes.settings import Settings

    return Settings(**{key: value for key, value in given.items() if value is not None}, **more)


def _show(options: Options, outcome: Outcome, folder: Path, name: str) -> None:
    state, losses, eval_losses = outcome.state, outcome.losses(), outcome.losses("eval_loss")
    metrics = folder / "metrics.jsonl"
    if options.wants_json:
        emit_json(
            {
                "steps": state.step,
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "first_eval_loss": eval_losses[0] if eval_losses else None,
                "last_eval_loss": eval_losses[-1] if eval_losses else None,
                "sampler_path": state.sampler_path,
                "state_path": state.state_path,
                "metrics": str(metrics),
            }
        )
        return
    evaluated = f", eval loss {eval_losses[0]:.3f} -> {eval_losses[-1]:.3f}" if eval_losses else ""
    emit(
        f"{state.step} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}{evaluated}\n"
        f"Sampler weights  {state.sampler_path}\n"
        f"Training state   {state.state_path}\n"
        f"Metrics          {metrics}\n"
        f"\nNext:\n"
        f"  {options.program} chat {state.sampler_path}\n"
        f"  {options.program} checkpoint export {state.state_path} --to peft --output {name}\n"
    )
