"""`tinsmith chat`: talk to a model or a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from tinsmith.cli.chat_answers import Answer, Messages, Model, Settings
from tinsmith.cli.chat_lines import is_interactive, messages
from tinsmith.cli.connect import Server
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_text, note
from tinsmith.cli.params import CHECKPOINT_PATH, sampling_options

if TYPE_CHECKING:
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.types import SupportedModel

COMMANDS = """\
/reset         begin a new conversation
/system TEXT   say how the model shall behave; without a text, take that back
/undo          forget the last message and its answer
/help          show this
/quit          leave; so does Ctrl-D"""
KEYS = """\
Ctrl-C stops an answer, and at the prompt the chat. A line that ends with a backslash goes on in the next one; one that
begins with a space is never a command."""
HELP = f"""\
Talk to a base model or a checkpoint.

\b
{COMMANDS}

{KEYS} Messages are kept in ~/.tinsmith/chat_history.

Without a terminal every line of standard input is a message, and only answers are printed; with --format json, one
object per answer. The first error ends such a chat."""


@click.command("chat", help=HELP)
@click.argument("checkpoint", type=CHECKPOINT_PATH, required=False)
@click.option("--model", metavar="MODEL", help="A base model; the server's first, if nothing is named.")
@click.option("--system", metavar="TEXT", help="How the model shall behave.")
@sampling_options(max_tokens=1024, temperature=0.7)
@click.option("--tokenizer", metavar="ID", help="A hub id or folder, if the model's name does not lead to one.")
@click.option("--no-history", is_flag=True, help="Do not keep what you type for the arrow keys of the next chat.")
@click.pass_obj
def command(
    options: Options,
    checkpoint: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    tokenizer: str | None,
    no_history: bool,
) -> None:
    if model and checkpoint:
        raise click.UsageError("Give either CHECKPOINT or --model.")
    settings = Settings(max_tokens, temperature, top_p, seed)
    with Server(options) as server:
        with server.patience():
            talking_to = _open(server, model, checkpoint, tokenizer, settings)
        chat = Chat(talking_to, system or "", wants_json=options.wants_json)
        if is_interactive():
            note(f"{checkpoint or talking_to.name}. /help shows the commands, Ctrl-D leaves.")
        for text in messages(keep_history=not no_history):
            if not chat.take(text):
                return
        if is_interactive():
            note("")  # the shell's prompt shall not follow ours


class Chat:
    """A conversation, and what its owner does with it."""

    def __init__(self, model: Model, system: str, *, wants_json: bool) -> None:
        self._model = model
        self._system = system
        self._turns: list[tuple[str, str]] = []
        self._wants_json = wants_json
        self._is_interactive = is_interactive()

    def take(self, text: str) -> bool:
        """Does what a line asks for; False when the chat is over."""
        if text.startswith("/"):
            return self._obey(*text.partition(" ")[::2])
        if text.strip():
            self._reply_or_explain(text)
        return True

    def _obey(self, command: str, argument: str) -> bool:
        match command:
            case "/reset":
                self._turns.clear()
                self._confirm("A new conversation.")
            case "/undo":
                del self._turns[-1:]
                self._confirm(f"Messages that are remembered: {len(self._turns)}.")
            case "/system":
                self._system = argument.strip()
                self._confirm("From now on." if self._system else "Taken back.")
            case "/help":
                note(f"{COMMANDS}\n\n{KEYS}")
            case "/quit" | "/exit":
                return False
            case _:
                self._fail(
                    CommandFailed(
                        f"There is no command {command}",
                        remedy="/help lists them. A space before it makes it part of a message.",
                    )
                )
        return True

    def _confirm(self, text: str) -> None:
        if self._is_interactive:
            note(text)

    def _reply_or_explain(self, text: str) -> None:
        from tinsmith.errors import TinkerError

        try:
            self._reply(text)
        except KeyboardInterrupt:  # before there was anything of an answer
            if not self._is_interactive:
                raise
            note("(stopped)")
        except (CommandFailed, TinkerError) as error:
            self._fail(error)

    def _fail(self, error: CommandFailed | Exception) -> None:
        """A person can try something else; a program should notice."""
        from tinsmith.cli.failures import explain

        if not self._is_interactive:
            raise error
        note(f"Error: {explain(error)}")

    def _reply(self, text: str) -> None:
        prompt, answer = self._model.begin(self._messages(text))
        try:
            for part in self._model.write(prompt, answer):
                self._show(part)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
        finally:
            self._end(answer)
        if answer.text:
            self._turns.append((text, answer.text))
        if self._wants_json:
            emit(json.dumps(_document(text, answer)) + "\n")
        self._explain_end(answer)

    def _messages(self, text: str) -> Messages:
        return list(_messages(self._system, self._turns, text))

    def _show(self, part: str) -> None:
        if part and not self._wants_json:
            emit_text(part)

    def _end(self, answer: Answer) -> None:
        if not self._wants_json and (self._is_interactive or answer.text) and not answer.text.endswith("\n"):
            emit("\n")

    def _explain_end(self, answer: Answer) -> None:
        reasons = {
            "interrupted": "(stopped)",
            "length": f"(cut off after {len(answer.tokens)} tokens; --max-tokens allows more)",
            "context": f"(cut off: the context of {self._model.name} is full; /reset begins a new conversation)",
        }
        if answer.stop_reason in reasons:
            note(reasons[answer.stop_reason])


def _messages(system: str, turns: list[tuple[str, str]], text: str) -> Iterator[dict[str, str]]:
    if system:
        yield {"role": "system", "content": system}
    for question, answer in turns:
        yield {"role": "user", "content": question}
        yield {"role": "assistant", "content": answer}
    yield {"role": "user", "content": text}


def _document(text: str, answer: Answer) -> dict[str, str | int]:
    return {
        "user": text,
        "assistant": answer.text,
        "stop_reason": answer.stop_reason,
        "prompt_tokens": answer.num_prompt_tokens,
        "tokens": len(answer.tokens),
    }


# --- who is talked to ------------------------------------------------------------------------------------------------


def _open(
    server: Server, model: str | None, checkpoint: str | None, tokenizer_id: str | None, settings: Settings
) -> Model:
    from tinsmith.client.tokenizers import get_tokenizer
    from tinsmith.errors import InvalidInputError, TokenizerError

    models = _sampleable(server)
    sampler = _of_checkpoint(server, checkpoint) if checkpoint else _of_model(server, model or _first(server, models))
    name = sampler.get_base_model()
    try:
        tokenizer = get_tokenizer(name, tokenizer_id) if tokenizer_id else sampler.get_tokenizer()
        context = models[name].max_context_length if name in models else None
        return Model(name, sampler, tokenizer, context, settings)
    except (InvalidInputError, TokenizerError) as error:
        raise CommandFailed(
            f"{name} cannot be talked to",
            str(error),
            "Name a tokenizer with a chat template, as a hub id or a folder, with --tokenizer; or use "
            "`tinsmith sample`, which needs no template.",
        ) from error


def _sampleable(server: Server) -> dict[str, SupportedModel]:
    found = server.service.get_server_capabilities().supported_models
    return {model.model_name: model for model in found if model.model_name and model.sampleable is not False}


def _first(server: Server, models: dict[str, SupportedModel]) -> str:
    if not models:
        raise CommandFailed(
            f"The server at {server.config.base_url} names no model that can be sampled.",
            remedy="Name one with --model, or a checkpoint.",
        )
    return next(iter(models))


def _of_model(server: Server, name: str) -> SamplingClient:
    return server.service.create_sampling_client(base_model=name).result()


def _of_checkpoint(server: Server, path: str) -> SamplingClient:
    from tinsmith.types import ParsedCheckpointTinkerPath

    kind = ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type
    if kind == "sampler":
        return server.service.create_sampling_client(model_path=path).result()
    if kind == "training":
        note(f"{path} is a training checkpoint; it is loaded into a new run to be sampled.")
        return server.service.create_training_client_from_state(path).save_weights_and_get_sampling_client().result()
    raise CommandFailed(
        f"{path} is an export, which is there to be downloaded.",
        remedy="Name sampler weights (.../sampler_weights/...) or a training checkpoint (.../weights/...) of its run: "
        f"{server.program} checkpoint list --run-id {path.split('/')[2]}",
    )
