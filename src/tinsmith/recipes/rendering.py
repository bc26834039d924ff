"""From conversations to token ids, with the loss on the assistant's tokens alone.

Each answer is trained in exactly the context in which it would be sampled: the messages before it, as the model's own
template shows them when it asks for an answer. Answers whose contexts continue each other share one sequence. Where a
template shows earlier turns differently later on (some drop the reasoning of all answers but the last), each such
answer gets a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy

from tinsmith.errors import InvalidInputError
from tinsmith.recipes.examples import BadLine, Example, ExampleFile, check_each, numbered
from tinsmith.text.chat_template import apply_chat_template
from tinsmith.text.fast_tokenizer import Tokenizer
from tinsmith.types import Datum, ModelInput, TensorData


class Sequence(NamedTuple):
    tokens: list[int]
    answers: list[range]
    """Which of the tokens the model is to say."""

    @property
    def num_answer_tokens(self) -> int:
        return sum(map(len, self.answers))

    def datum(self) -> Datum:
        """Shifted by one: the weight of a token stands where it is predicted."""
        weights = numpy.zeros(len(self.tokens), numpy.float32)
        for answer in self.answers:
            weights[answer.start : answer.stop] = 1
        targets = numpy.array(self.tokens[1:], numpy.int64)
        return Datum(
            model_input=ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": TensorData.from_numpy(targets),
                "weights": TensorData.from_numpy(weights[1:]),
            },
        )


def render_file(
    tokenizer: Tokenizer,
    file: ExampleFile,
    max_context: int | None,
    max_length: int | None,
    on_example: Callable[[], object] = lambda: None,
) -> list[list[Sequence]]:
    """The sequences of each example. With `max_length` longer ones are cut; without, `max_context` is the limit."""

    def render_checked(_: int, example: Example) -> list[Sequence]:
        on_example()
        try:
            sequences = render(tokenizer, example)
        except InvalidInputError as error:  # of the template or the tokenizer
            raise BadLine(str(error)) from error
        if max_length is not None:
            return [_cut(sequence, max_length) for sequence in sequences]
        longest = max(len(sequence.tokens) - 1 for sequence in sequences)
        if max_context is not None and longest > max_context:
            raise BadLine(
                f"it has {longest} tokens; the model takes {max_context}. "
                f"Shorten it, or cut what is too long with --max-length {max_context}."
            )
        return sequences

    return check_each(file.path, numbered(file.examples), render_checked)


def render(tokenizer: Tokenizer, example: Example) -> list[Sequence]:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if example.is_chat and not has_template:
        raise BadLine('the model has no chat template, so it takes no "messages". Write "prompt" and "completion".')
    if not has_template:
        return [_continuation(tokenizer, *(message["content"] for message in example.messages))]
    merged: list[Sequence] = []
    for index, message in enumerate(example.messages):
        if message["role"] == "assistant":
            _add(merged, _answer(tokenizer, example, index))
    return merged


def _add(sequences: list[Sequence], later: Sequence) -> None:
    """An answer whose context begins with the last sequence takes that one in."""
    if sequences and later.tokens[: len(sequences[-1].tokens)] == sequences[-1].tokens:
        later = Sequence(later.tokens, sequences.pop().answers + later.answers)
    sequences.append(later)


def _continuation(tokenizer: Tokenizer, prompt: str, completion: str) -> Sequence:
    context = tokenizer.encode(prompt)
    whole = tokenizer.encode(prompt + completion)
    return _sequence(context, _said(tokenizer, context, whole, completion) + _end(tokenizer))


def _answer(tokenizer: Tokenizer, example: Example, index: int) -> Sequence:
    """One answer in its context, up to the end of its turn."""
    asked = _text(tokenizer, example, index, add_generation_prompt=True)
    told = _text(tokenizer, example, index + 1).rstrip()
    context, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (asked, told))
    if not told.startswith(asked):
        context = _shared_context(tokenizer, example, index, context, whole)
    said = _said(tokenizer, context, whole, told[len(asked) :])
    content = str(example.messages[index].get("content") or "").strip()
    if content and told.endswith(content):  # this template leaves it to the reader to end the last turn
        said = said + _end(tokenizer)
    return _sequence(context, said)


def _said(tokenizer: Tokenizer, context: list[int], whole: list[int], rest: str) -> list[int]:
    """What follows the context. If its end and the begin of the rest would share a token, the rest begins anew: a
    sampler sees the context as it is."""
    if whole[: len(context)] == context:
        return whole[len(context) :]
    return tokenizer.encode(rest, add_special_tokens=False)


def _shared_context(
    tokenizer: Tokenizer, example: Example, index: int, context: list[int], whole: list[int]
) -> list[int]:
    """Some templates begin an answer with more than they show later, such as the opening of a thought."""
    different = (at for at, (left, right) in enumerate(zip(context, whole, strict=False)) if left != right)
    shared = context[: next(different, len(whole))]
    before = tokenizer.encode(_text(tokenizer, example, index).rstrip(), add_special_tokens=False)
    if shared[: len(before)] != before:
        raise BadLine(
            f"the chat template shows the messages before messages[{index}] differently once the answer is there, so "
            "the answer cannot be told from the rest. Remove the line, or train a model with another template."
        )
    return shared


def _text(tokenizer: Tokenizer, example: Example, end: int, *, add_generation_prompt: bool = False) -> str:
    return apply_chat_template(
        tokenizer,
        example.messages[:end],
        tools=example.tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
    )


def _end(tokenizer: Tokenizer) -> list[int]:
    token_id = tokenizer.eos_token_id
    return [] if token_id is None else [token_id]


def _sequence(context: list[int], said: list[int]) -> Sequence:
    if not said or not context:
        raise BadLine("the tokenizer makes no tokens of the answer, or of what it answers. Remove the line.")
    return Sequence(context + said, [range(len(context), len(context) + len(said))])


def _cut(sequence: Sequence, max_length: int) -> Sequence:
    """The first tokens; one more than the model reads, because the last is only predicted."""
    end = max_length + 1
    answers = [range(each.start, min(each.stop, end)) for each in sequence.answers if each.start < end]
    if not answers:
        raise BadLine(
            f"nothing of the answer is within the first {max_length} tokens. Raise --max-length, or remove it."
        )
    return Sequence(sequence.tokens[:end], answers)
