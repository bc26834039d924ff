"""Supervised fine-tuning: from a file of examples to sampler weights, and on from where an interrupted run stopped."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tinsmith.errors import InvalidInputError, NotFoundError, RequestFailedError
from tinsmith.recipes import plan
from tinsmith.recipes.examples import ExampleFile
from tinsmith.recipes.listener import Listener
from tinsmith.recipes.rendering import Sequence as TokenSequence
from tinsmith.recipes.rendering import render_file
from tinsmith.recipes.run import Run
from tinsmith.recipes.run_folder import RunFolder, RunState
from tinsmith.recipes.settings import Settings

if TYPE_CHECKING:
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.training import TrainingClient
    from tinsmith.recipes.sinks import Sink
    from tinsmith.text.fast_tokenizer import Tokenizer


class Outcome(NamedTuple):
    state: RunState
    records: Sequence[Mapping[str, Any]]
    """The lines of metrics.jsonl."""

    def losses(self, name: str = "loss") -> list[float]:
        return [record[name] for record in self.records if record.get(name) is not None]


class Corpus(NamedTuple):
    training: list[TokenSequence]
    held_out: list[TokenSequence]


def train(
    service: ServiceClient,
    data: ExampleFile,
    settings: Settings,
    output: Path,
    *,
    eval_data: ExampleFile | None = None,
    max_context: int | None = None,
    restart: bool = False,
    sinks: Sequence[Sink] = (),
    listener: Listener | None = None,
) -> Outcome:
    """Trains, or goes on with what `output` holds. An outcome that is not finished was stopped by the listener."""
    listener = listener or Listener()
    folder = RunFolder(output)
    with folder.held():
        state = folder.open(settings.identity(data, eval_data), restart=restart)
        if state.is_finished:
            listener.tell(f"The run in {output} was finished before. --restart would begin anew.")
            return Outcome(state, folder.recorded())
        trainer = _trainer(service, settings, state, listener)
        corpus = _corpus(trainer.get_tokenizer(), data, eval_data, settings, max_context, listener)
        run = Run(service, trainer, settings, *corpus, folder, state, sinks, listener)
        try:
            return Outcome(run.go(), folder.recorded())
        finally:
            for sink in sinks:
                sink.finish()


def _trainer(service: ServiceClient, settings: Settings, state: RunState, listener: Listener) -> TrainingClient:
    metadata = {"recipe": "sft", "name": settings.name}
    if state.state_path is None:
        return service.create_lora_training_client(
            settings.model, rank=settings.rank, seed=settings.seed, user_metadata=metadata
        ).result()
    listener.tell(f"Going on after step {state.step}, from {state.state_path}.")
    try:
        return service.create_training_client_from_state_with_optimizer(
            state.state_path, user_metadata=metadata
        ).result()
    except (NotFoundError, RequestFailedError) as error:
        raise InvalidInputError(
            f"The run cannot go on from {state.state_path}: {error} Check that the server and the key are those of the "
            "first part, or begin anew with --restart.",
            field="output",
        ) from error


def _corpus(
    tokenizer: Tokenizer,
    data: ExampleFile,
    eval_data: ExampleFile | None,
    settings: Settings,
    max_context: int | None,
    listener: Listener,
) -> Corpus:
    """What is trained and what is held out, the latter by whole examples, so that no turn is in both."""
    if settings.max_length and max_context and settings.max_length > max_context:
        raise InvalidInputError(
            f"max-length is {settings.max_length}; {settings.model} takes {max_context} tokens.", field="max_length"
        )

    def rendered(file: ExampleFile) -> list[list[TokenSequence]]:
        done = itertools.count(1)
        count = len(file.examples)
        return render_file(
            tokenizer, file, max_context, settings.max_length, lambda: listener.prepared(next(done), count)
        )

    examples = rendered(data)
    training, held_out = plan.split(examples, settings.eval_split, settings.seed)
    if settings.eval_split and not (training and held_out):
        raise InvalidInputError(
            f"An eval-split of {settings.eval_split:g} leaves {len(training)} of {len(examples)} examples for training "
            f"and {len(held_out)} for evaluation. Choose another, or give more examples.",
            field="eval_split",
        )
    if eval_data is not None:
        held_out = rendered(eval_data)
    return Corpus(_joined(training), _joined(held_out))


def _joined(examples: list[list[TokenSequence]]) -> list[TokenSequence]:
    return [sequence for example in examples for sequence in example]
