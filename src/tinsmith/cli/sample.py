"""`tinsmith sample`: what a model says."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tinsmith.cli.connect import Server
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_json, emit_text
from tinsmith.cli.params import CHECKPOINT_PATH, sampling_options

if TYPE_CHECKING:
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.text.fast_tokenizer import Tokenizer
    from tinsmith.types import SampledSequence

STDIN = "-"


@click.command("sample")
@click.argument("prompt")
@click.option("--model", metavar="MODEL", help="A base model; the server's, if it has only one.")
@click.option("--checkpoint", type=CHECKPOINT_PATH, metavar="PATH", help="Saved weights instead of a base model.")
@sampling_options(max_tokens=128, temperature=1.0)
@click.option(
    "--num-samples",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="How many continuations.",
)
@click.option("--special-tokens", is_flag=True, help="Show the special token that ends a text, too.")
@click.pass_obj
def command(
    options: Options,
    prompt: str,
    model: str | None,
    checkpoint: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    num_samples: int,
    special_tokens: bool,
) -> None:
    """Let a model or a checkpoint continue a text.

    PROMPT goes to the model as it is, without a chat template; - reads it from standard input.
    """
    if model and checkpoint:
        raise click.UsageError("Give either --model or --checkpoint.")
    from tinsmith.types import ModelInput, SamplingParams

    text = sys.stdin.read() if prompt == STDIN else prompt
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with Server(options) as server, server.patience():
        sampler = _sampler(server, model, checkpoint)
        tokenizer = sampler.get_tokenizer()
        tokens = ModelInput.from_ints(tokenizer.encode(text))
        sequences = sampler.sample(tokens, num_samples, params).result().sequences
    samples = [
        {
            "text": tokenizer.decode(each.tokens if special_tokens else _without_end(tokenizer, each)),
            "tokens": list(each.tokens),
            "stop_reason": each.stop_reason,
        }
        for each in sequences
    ]
    if options.wants_json:
        emit_json({"prompt": text, "samples": samples})
        return
    for number, sample in enumerate(samples, start=1):
        if num_samples > 1:
            emit(f"--- {number} of {num_samples} ---\n")
        emit_text(f"{sample['text']}\n")


def _without_end(tokenizer: Tokenizer, sequence: SampledSequence) -> Sequence[int]:
    """Without the token by which the model says that it is done; others, such as those of a template, are told."""
    last = sequence.tokens[-1:]
    is_special = tokenizer.decode(last) and not tokenizer.decode(last, skip_special_tokens=True)
    return sequence.tokens[:-1] if is_special and sequence.stop_reason == "stop" else sequence.tokens


def _sampler(server: Server, model: str | None, checkpoint: str | None) -> SamplingClient:
    if checkpoint:
        return server.service.create_sampling_client(model_path=checkpoint).result()
    return server.service.create_sampling_client(base_model=model or _only_model(server)).result()


def _only_model(server: Server) -> str:
    found = server.service.get_server_capabilities().supported_models
    names = [model.model_name for model in found if model.model_name and model.sampleable is not False]
    if len(names) != 1:
        raise CommandFailed(
            f"The server at {server.config.base_url} has {len(names)} models.",
            remedy=f"Choose one with --model: {', '.join(names)}" if names else "",
        )
    return names[0]
