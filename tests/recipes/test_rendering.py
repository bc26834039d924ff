"""The loss is on what the assistant says, in the context in which it would say it, and on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.embedded import embedded_folder, session_cache
from tests.support.tiny_tokenizer import byte_level_bpe
from tinsmith.errors import InvalidInputError
from tinsmith.recipes.examples import BadLine, Example, ExampleFile
from tinsmith.recipes.rendering import Sequence, render, render_file
from tinsmith.text.chat_template import apply_chat_template
from tinsmith.text.fast_tokenizer import Tokenizer
from tinsmith.text.tokenizer_folder import read_tokenizer

PLAIN = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

FORGETS_THOUGHTS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
"""As Qwen3 does: only the last answer shows its thoughts, and shows them even if there are none."""

OPENS_A_THOUGHT = PLAIN.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
LEAVES_THE_END_OPEN = """\
{%- for message in messages %}
    {{- message.role + ': ' + message.content | trim }}{{ '<|im_end|>\\n' if not loop.last or message.role == 'user' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}
"""
CHANGES_THE_PAST = """\
{%- for message in messages %}{{- loop.revindex ~ message.role + message.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '0assistant' }}{% endif %}
"""

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "And café?"},
    {"role": "assistant", "content": "naïve\n\n你好", "reasoning_content": "a fox"},
]


def tokenizer_with(template: str | None) -> Tokenizer:
    return Tokenizer(
        byte_level_bpe(), name_or_path="tiny", special_tokens_map={"eos_token": "<|im_end|>"}, chat_template=template
    )


def weighted_text(tokenizer: Tokenizer, sequence: Sequence) -> list[str]:
    """What the loss is on, decoded from what is sent to the server; one text for each run of weighted tokens."""
    datum = sequence.datum()
    targets, weights = (datum.loss_fn_inputs[name].tolist() for name in ("target_tokens", "weights"))
    assert list(datum.model_input.to_ints()) == sequence.tokens[:-1]
    assert targets == sequence.tokens[1:]
    assert set(weights) <= {0.0, 1.0}
    assert sum(weights) == sequence.num_answer_tokens
    runs: list[list[int]] = []
    for before, weight, target in zip([0.0, *weights], weights, targets, strict=False):
        if weight and not before:
            runs.append([])
        if weight:
            runs[-1].append(target)
    return [tokenizer.decode(run) for run in runs]


def context_of_last(tokenizer: Tokenizer, sequence: Sequence) -> list[int]:
    return sequence.tokens[: sequence.answers[-1].start]


def asked(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """What a sampler would be given."""
    return apply_chat_template(tokenizer, messages)


def test_all_answers_of_a_conversation_count_with_the_ends_of_their_turns() -> None:
    tokenizer = tokenizer_with(PLAIN)
    (sequence,) = render(tokenizer, Example(1, CHAT))
    assert weighted_text(tokenizer, sequence) == ["It is 7.<|im_end|>", "naïve\n\n你好<|im_end|>"]
    assert context_of_last(tokenizer, sequence) == asked(tokenizer, CHAT[:4])
    assert tokenizer.decode(sequence.tokens) == apply_chat_template(
        tokenizer, CHAT, tokenize=False, add_generation_prompt=False
    ).removesuffix("\n")


def test_answers_that_look_different_later_are_each_trained_as_they_would_be_sampled() -> None:
    tokenizer = tokenizer_with(FORGETS_THOUGHTS)
    first, second = render(tokenizer, Example(1, CHAT))
    assert weighted_text(tokenizer, first) == ["<think>\n\n</think>\n\nIt is 7.<|im_end|>"]
    assert weighted_text(tokenizer, second) == ["<think>\na fox\n</think>\n\nnaïve\n\n你好<|im_end|>"]
    assert context_of_last(tokenizer, first) == asked(tokenizer, CHAT[:2])
    assert context_of_last(tokenizer, second) == asked(tokenizer, CHAT[:4])


def test_a_thought_that_the_template_opens_but_does_not_show_is_no_part_of_the_context() -> None:
    tokenizer = tokenizer_with(OPENS_A_THOUGHT)
    (sequence,) = render(tokenizer, Example(1, CHAT))
    assert weighted_text(tokenizer, sequence) == ["It is 7.<|im_end|>", "naïve\n\n你好<|im_end|>"]
    deep = [*CHAT[:2], {"role": "assistant", "content": "<think>\nHm.\n</think>7"}]
    (sequence,) = render(tokenizer, Example(1, deep))
    assert weighted_text(tokenizer, sequence) == ["Hm.\n</think>7<|im_end|>"]
    assert context_of_last(tokenizer, sequence) == asked(tokenizer, deep[:2])


def test_an_end_that_the_template_leaves_out_is_added() -> None:
    tokenizer = tokenizer_with(LEAVES_THE_END_OPEN)
    (sequence,) = render(tokenizer, Example(1, CHAT))
    assert weighted_text(tokenizer, sequence) == ["It is 7.<|im_end|>", "naïve\n\n你好<|im_end|>"]


def test_an_answer_that_would_share_a_token_with_its_context_begins_with_one_of_its_own() -> None:
    tokenizer = tokenizer_with(PLAIN.replace("assistant\\n", "the quick bro"))
    messages = [CHAT[1], {"role": "assistant", "content": "wn fox"}]
    merged = PLAIN.replace("message.role + '\\n'", "('the quick bro' if message.role == 'assistant' else message.role)")
    tokenizer.chat_template = merged.replace("assistant\\n", "the quick bro")
    (sequence,) = render(tokenizer, Example(1, messages))
    whole = apply_chat_template(tokenizer, messages, add_generation_prompt=False)
    assert whole[: len(asked(tokenizer, messages[:1]))] != asked(tokenizer, messages[:1]), "nothing would be shared"
    assert weighted_text(tokenizer, sequence) == ["wn fox<|im_end|>"]
    assert context_of_last(tokenizer, sequence) == asked(tokenizer, messages[:1])


def test_a_template_that_rewrites_what_was_asked_is_refused() -> None:
    with pytest.raises(BadLine, match=r"the messages before messages\[1\] differently once the answer is there"):
        render(tokenizer_with(CHANGES_THE_PAST), Example(1, CHAT[1:3]))


def test_a_prompt_with_its_completion_is_plain_text_only_without_a_template() -> None:
    pair = Example(1, [{"role": "user", "content": "The quick"}, {"role": "assistant", "content": " fox"}], None, False)
    tokenizer = tokenizer_with(None)
    (sequence,) = render(tokenizer, pair)
    assert tokenizer.decode(sequence.tokens) == "The quick fox<|im_end|>"
    assert weighted_text(tokenizer, sequence) == [" fox<|im_end|>"]
    tokenizer = tokenizer_with(PLAIN)
    (sequence,) = render(tokenizer, pair)
    assert context_of_last(tokenizer, sequence) == asked(tokenizer, pair.messages[:1])
    with pytest.raises(BadLine, match='the model has no chat template, so it takes no "messages"'):
        render(tokenizer_with(None), Example(1, CHAT))


def test_what_is_too_long_is_refused_or_cut() -> None:
    tokenizer = tokenizer_with(PLAIN)
    file = ExampleFile(Path("data"), "", [Example(4, CHAT)])
    ((whole,),) = render_file(tokenizer, file, None, None)
    length = len(whole.tokens) - 1
    assert render_file(tokenizer, file, length, None) == [[whole]], "it just fits"
    with pytest.raises(InvalidInputError, match=f"data, line 4: it has {length} tokens; the model takes {length - 1}"):
        render_file(tokenizer, file, length - 1, None)
    first, second = whole.answers
    ((cut,),) = render_file(tokenizer, file, None, second.start + 1)
    assert cut == Sequence(whole.tokens[: second.start + 2], [first, range(second.start, second.start + 2)])
    ((cut,),) = render_file(tokenizer, file, None, first.start)
    assert cut.answers == [range(first.start, first.start + 1)]
    with pytest.raises(InvalidInputError, match="nothing of the answer is within the first"):
        render_file(tokenizer, file, None, first.start - 1)


@pytest.mark.parametrize(
    ("messages", "template", "told"),
    [
        (CHAT, "{{ raise_exception('no system here') }}", "no system here"),
        ([CHAT[1], {"role": "assistant", "content": "\ud800"}], PLAIN, "lone surrogates"),
    ],
)
def test_what_template_or_tokenizer_refuse_is_the_lines_fault(
    messages: list[dict[str, Any]], template: str, told: str
) -> None:
    file = ExampleFile(Path("data"), "", [Example(1, CHAT[1:3]), Example(2, messages)])
    with pytest.raises(InvalidInputError, match=f"data, line 2: .*{told}"):
        render_file(tokenizer_with(template), file, None, None)


def test_the_template_of_the_real_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = embedded_folder(session_cache(tmp_path_factory))
    tokenizer = read_tokenizer(folder / "tokenizer.json", name="SmolLM2")
    (sequence,) = render(tokenizer, Example(1, CHAT))
    assert weighted_text(tokenizer, sequence) == ["It is 7.<|im_end|>", "naïve\n\n你好<|im_end|>"]
    assert context_of_last(tokenizer, sequence) == asked(tokenizer, CHAT[:4])
