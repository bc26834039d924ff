"""Talking to a model: the real program at a real terminal or in a pipe, a real server, a tiny random model."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tinsmith
from tests.cli.program import COMMAND, SECONDS, Program, Terminal, environment, variables_of
from tests.end_to_end.serving import KEY, ServerProcess
from tests.server.tiny_models import save_model
from tests.support.server import FakeServer
from tests.support.tiny_tokenizer import CHATML_CONFIG, byte_level_bpe, write_folder
from tinsmith.cli.chat_answers import Answer, end_of_turn
from tinsmith.cli.chat_lines import History
from tinsmith.text.fast_tokenizer import Tokenizer
from tinsmith.text.tokenizer_folder import read_tokenizer

TALKING, MUTE = "tiny/talking", "tiny/mute"
CONTEXT = 8192
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GREEDY = ("--temperature", "0")
SHORT = (*GREEDY, "--max-tokens", "40")

# A terminal's own interrupt key works only in a process whose terminal it is.
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template and one without; seen from this folder, both have a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    backend = byte_level_bpe()
    configs = {TALKING: {**CHATML_CONFIG, "chat_template": TEMPLATE}, MUTE: CHATML_CONFIG}
    for name, config in configs.items():
        folder = write_folder(root / name, backend, {"tokenizer_config.json": config})
        save_model(folder, "qwen3", vocab_size=backend.get_vocab_size(), max_position_embeddings=CONTEXT)
    return root


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[ServerProcess]:
    served = {name: models / name for name in (TALKING, MUTE)}
    with ServerProcess(tmp_path_factory.mktemp("state"), served) as server:
        yield server


@pytest.fixture
def user(running: ServerProcess, models: Path, home: Path) -> Program:
    return Program(models, **variables_of(running.url, KEY), TINSMITH_STATE=str(home), HF_HUB_OFFLINE="1")


@pytest.fixture
def tokenizer(models: Path) -> Tokenizer:
    return read_tokenizer(models / TALKING / "tokenizer.json", name=TALKING)


# --- in a pipe -------------------------------------------------------------------------------------------------------


def test_every_line_is_a_message_and_its_answer_is_what_one_call_gives(
    user: Program, running: ServerProcess, tokenizer: Tokenizer
) -> None:
    done = user("chat", *SHORT, input="Hello\nAnd now?\n")
    assert done.code == 0, done
    with tinsmith.ServiceClient(base_url=running.url, api_key=KEY) as client:
        sampler = client.create_sampling_client(base_model=TALKING)
        first = in_one_call(sampler, tokenizer, ["Hello"])
        second = in_one_call(sampler, tokenizer, ["Hello", first, "And now?"])
    assert done.out == "".join(text if text.endswith("\n") else f"{text}\n" for text in (first, second))
    assert "\x1b" not in done.out + done.err
    assert done.err == 2 * "(cut off after 40 tokens; --max-tokens allows more)\n"


def in_one_call(sampler: tinsmith.SamplingClient, tokenizer: Tokenizer, said: Sequence[str]) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(said)]
    prompt = tinsmith.types.ModelInput.from_ints(tinsmith.apply_chat_template(tokenizer, messages))
    params = tinsmith.types.SamplingParams(max_tokens=40, temperature=0)
    (sequence,) = sampler.sample(prompt, 1, params).result().sequences
    return tokenizer.decode(sequence.tokens, skip_special_tokens=True)


def documents(out: str) -> list[dict[str, str | int]]:
    return [json.loads(line) for line in out.splitlines()]


def test_json_is_one_object_per_answer(user: Program, tokenizer: Tokenizer) -> None:
    done = user("-f", "json", "chat", *SHORT, input="Hello\n\nAgain\n")
    assert done.code == 0, done
    first, second = documents(done.out)
    assert list(first) == ["user", "assistant", "stop_reason", "prompt_tokens", "tokens"]
    assert (first["user"], first["stop_reason"], first["tokens"]) == ("Hello", "length", 40)
    assert first["prompt_tokens"] == len(
        tinsmith.apply_chat_template(tokenizer, [{"role": "user", "content": "Hello"}])
    )
    assert (second["user"], second["stop_reason"]) == ("Again", "length")


def test_an_answer_ends_at_the_end_of_a_turn(user: Program) -> None:
    """At a high temperature every token is as likely as the others, so the one that ends a turn comes soon."""
    done = user("-f", "json", "chat", "--temperature", "100", "--seed", "5", "--max-tokens", "8000", input="Hi\n")
    (answer,) = documents(done.out)
    assert answer["stop_reason"] == "stop"
    assert 0 < int(answer["tokens"]) < 8000
    assert "<|im_end|>" not in str(answer["assistant"])


def test_a_seed_gives_the_same_answers_again(user: Program) -> None:
    def answers(seed: str) -> str:
        done = user("chat", "--temperature", "1", "--seed", seed, "--max-tokens", "20", input="Hello\nHello\n")
        assert done.code == 0, done
        return done.out

    assert answers("7") == answers("7") != answers("8")


def test_commands_change_what_the_model_is_told(user: Program, tokenizer: Tokenizer) -> None:
    """The prompt's length tells what was in it."""
    lines = ["Hello", "/reset", "Hello", "/undo", "Hello", "/system Be brief.", "/undo", "Hello", "/quit", "Hello"]
    done = user("-f", "json", "chat", *SHORT, input="\n".join(lines))
    assert (done.code, len(documents(done.out))) == (0, 4)
    lengths = [document["prompt_tokens"] for document in documents(done.out)]
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    plain, with_system = (len(tinsmith.apply_chat_template(tokenizer, each)) for each in (told[1:], told))
    assert lengths == [plain, plain, plain, with_system]
    given_at_once = user("-f", "json", "chat", *SHORT, "--system", "Be brief.", input="Hello\n")
    assert documents(given_at_once.out)[0]["prompt_tokens"] == with_system


def test_a_line_that_ends_with_a_backslash_goes_on(user: Program) -> None:
    done = user("-f", "json", "chat", *SHORT, input="One\\\ntwo\\\nthree\n /not a command\n")
    assert [document["user"] for document in documents(done.out)] == ["One\ntwo\nthree", " /not a command"]


def test_in_a_pipe_the_first_error_ends_the_chat(user: Program) -> None:
    done = user("-f", "json", "chat", *SHORT, input="Hello\n/nonsense\nHello\n")
    assert (done.code, len(documents(done.out))) == (1, 1)
    assert done.err.splitlines()[-2:] == [
        "Error: There is no command /nonsense",
        "/help lists them. A space before it makes it part of a message.",
    ]


def test_a_full_context_is_told_with_its_remedy(user: Program) -> None:
    too_long = user("chat", *SHORT, input=f"{'?!' * CONTEXT}\n")
    assert too_long.code == 1
    assert too_long.err.startswith("Error: The conversation is too long\nWith this message it has ")
    assert f"{TALKING} takes {CONTEXT}" in too_long.err
    assert "Begin a new one with /reset" in too_long.err
    nearly = user("-f", "json", "chat", *SHORT, input=f"{'?!' * (CONTEXT // 2 - 20)}\n")
    (answer,) = documents(nearly.out)
    assert answer["stop_reason"] == "context"
    assert int(answer["tokens"]) + int(answer["prompt_tokens"]) == CONTEXT
    assert "/reset begins a new conversation" in nearly.err


def test_sampler_weights_and_training_checkpoints_can_be_talked_to_but_no_exports(
    user: Program, running: ServerProcess
) -> None:
    with tinsmith.ServiceClient(base_url=running.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client(TALKING, rank=4, seed=1)
        sampler = trainer.save_weights_for_sampler("one").result().path
        training = trainer.save_state("one").result().path
        exported = trainer.save_weights_external("one").result().path
    plain = user("chat", *SHORT, input="Hello\n")
    for path in (sampler, training):
        done = user("chat", path, *SHORT, input="Hello\n")
        assert (done.code, done.out) == (0, plain.out), "the adapter has learnt nothing yet"
    assert f"{training} is a training checkpoint; it is loaded into a new run to be sampled." in done.err
    refused = user("chat", exported, *SHORT, input="Hello\n")
    assert (refused.code, refused.out) == (1, "")
    assert "is an export, which is there to be downloaded" in refused.err
    assert user("chat", sampler, "--model", TALKING, input="Hello\n").code == 2


def test_a_model_without_a_chat_template_is_told_with_the_remedy(user: Program, models: Path) -> None:
    mute = user("chat", "--model", MUTE, input="Hello\n")
    assert (mute.code, mute.out) == (1, "")
    assert f"Error: {MUTE} cannot be talked to\nThere is no chat template" in mute.err
    assert "with --tokenizer" in mute.err
    helped = user("chat", "--model", MUTE, "--tokenizer", models / TALKING, *SHORT, input="Hello\n")
    assert helped.code == 0, helped


def test_a_model_whose_tokenizer_cannot_be_had_is_told_with_the_remedy(server: FakeServer, home: Path) -> None:
    done = Program(home, **variables_of(server.url), HF_HUB_OFFLINE="1")("chat", input="Hello\n")
    assert (done.code, done.out) == (1, "")
    assert "Error: tiny/model-1 cannot be talked to\nNo tokenizer for 'tiny/model-1'" in done.err
    assert "with --tokenizer" in done.err


def test_an_interrupted_pipe_ends_with_130(user: Program) -> None:
    endless = ("chat", *GREEDY, "--max-tokens", "100000")
    with user.start(*endless, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("Hello\n")
        process.stdin.flush()
        assert process.stdout.read(1), "an answer begins while it is being written"
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 130, err
    assert "Traceback" not in err


# --- at a terminal ---------------------------------------------------------------------------------------------------


class Person(Terminal):
    """Somebody who waits for the prompt, types a line, and reads the answer."""

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self._descriptor, text.encode())

    def at_the_prompt(self) -> str:
        """What was shown until the program waits for a line."""
        end = time.monotonic() + SECONDS
        while not re.search(r"(^|\n|h)> $", self.seen):
            assert time.monotonic() < end, f"there is no prompt, but: {self.seen!r}"
            assert self._read(), f"the program ended, with: {self.seen!r}"
        return re.sub(r"\x1b\[\?2004[hl]|\r", "", self.seen)

    def leave(self) -> None:
        """Ctrl-C, until it is heard: one that comes just before a program begins to read a line is not."""
        for _ in range(3):
            self.type("\x03")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(SECONDS / 3)
                return

    def gone(self) -> int:
        while self._read():
            pass
        return self.process.wait(SECONDS)


@contextmanager
def person(user: Program, home: Path, url: str, *arguments: str) -> Iterator[Person]:
    """All three streams are the terminal."""
    ours, theirs = pty.openpty()
    variables = {**variables_of(url, KEY), "TINSMITH_STATE": str(home)}
    command = [sys.executable, "-c", TAKE_TERMINAL, str(COMMAND), "chat", *arguments]
    try:
        with subprocess.Popen(
            command,
            env=environment(home, **variables),
            cwd=user.home,
            text=True,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        ) as process:
            os.close(theirs)
            try:
                yield Person(process, ours)
            finally:
                process.kill()
    finally:
        os.close(ours)


def test_a_person_talks_asks_for_help_and_leaves(user: Program, running: ServerProcess, home: Path) -> None:
    with person(user, home, running.url, *SHORT) as somebody:
        assert f"{TALKING}. /help shows the commands" in somebody.at_the_prompt()
        somebody.type("Hello\n")
        plain = user("chat", *SHORT, input="Hello\n").out
        shown = somebody.at_the_prompt()
        assert shown.startswith(f"Hello\n{printed(plain)}")
        somebody.type("/help\n")
        assert "/system TEXT   say how" in somebody.at_the_prompt()
        somebody.type("/what\n")
        assert "Error: There is no command /what" in somebody.at_the_prompt()
        somebody.type("/undo\n")
        assert "Messages that are remembered: 0." in somebody.at_the_prompt()
        somebody.type("Hello\n")
        assert printed(plain) in somebody.at_the_prompt()
        somebody.type("\x04")
        assert somebody.gone() == 0


def printed(text: str) -> str:
    """As a terminal is given it: nothing in a model's text can steer it."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)


def test_ctrl_c_stops_an_answer_and_at_the_prompt_the_chat(user: Program, running: ServerProcess, home: Path) -> None:
    with person(user, home, running.url, *GREEDY, "--max-tokens", "100000") as somebody:
        somebody.at_the_prompt()
        somebody.type("Hello\n")
        somebody.wait_for("Hello\r\n")
        for _ in range(3):  # piece by piece, and no end in sight
            already = len(somebody.seen)
            while len(somebody.seen) <= already:
                assert somebody._read()
        somebody.type("\x03")
        assert "(stopped)" in somebody.at_the_prompt()
        somebody.type("/undo\n")
        assert "Messages that are remembered: 0." in somebody.at_the_prompt(), "what was said so far had been kept"
        somebody.leave()
        assert somebody.gone() == 130
        assert "Traceback" not in somebody.seen


def test_lines_of_an_earlier_chat_are_at_the_arrow_keys_unless_not_wanted(
    user: Program, running: ServerProcess, home: Path
) -> None:
    with person(user, home, running.url, *SHORT) as somebody:
        somebody.at_the_prompt()
        somebody.type("/system Be brief.\n")
        somebody.at_the_prompt()
        somebody.type("/quit\n")
        assert somebody.gone() == 0
    file = home / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with person(user, home, running.url, "--no-history") as somebody:
        somebody.at_the_prompt()
        somebody.type("/reset\n")
        somebody.at_the_prompt()
        somebody.type("\x04")
        assert somebody.gone() == 0
    assert file.read_text() == '"/system Be brief."\n"/quit"\n'
    with person(user, home, running.url) as somebody:
        somebody.at_the_prompt()
        somebody.type("\x1b[A\x1b[A")
        somebody.wait_for("system Be brief.")
        somebody.type("\n")
        assert "From now on." in somebody.at_the_prompt()
        somebody.type("/quit\n")
        assert somebody.gone() == 0


def test_a_history_that_cannot_be_kept_is_no_reason_to_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = History(tmp_path / "file" / "chat_history")
    (tmp_path / "file").touch()
    history.recall()
    history.add("one")
    history.add("two")
    assert capsys.readouterr().err.count("The history of this chat is not kept") == 1


def test_a_long_history_forgets_its_oldest_lines(tmp_path: Path) -> None:
    file = tmp_path / "chat_history"
    file.write_text("".join(f"{json.dumps(str(number))}\n" for number in range(2001)))
    History(file).recall()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [str(n) for n in range(1001, 2001)]


# --- text from tokens ------------------------------------------------------------------------------------------------

BACKEND = byte_level_bpe()


@given(text=st.text(), data=st.data())
def test_no_half_character_is_ever_shown(text: str, data: st.DataObject) -> None:
    text = text.encode("utf-8", "ignore").decode()
    tokens = BACKEND.encode(text).ids
    whole = BACKEND.decode(tokens)
    answer = Answer(BACKEND.decode, 0)
    shown = []
    while tokens:
        size = data.draw(st.integers(1, len(tokens)))
        shown.append(answer.add(tokens[:size]))
        assert whole.startswith("".join(shown))
        tokens = tokens[size:]
    shown.append(answer.end("stop"))
    assert "".join(shown) == answer.text == whole


def test_bytes_that_are_no_character_are_shown_in_the_end() -> None:
    answer = Answer(BACKEND.decode, 0)
    first_byte_only = BACKEND.encode("🦊").ids[:1]
    assert (answer.add(first_byte_only), answer.end("length")) == ("", "\N{REPLACEMENT CHARACTER}")


def test_a_turn_ends_with_the_end_of_text_or_what_the_template_puts_there(tokenizer: Tokenizer) -> None:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>")}
    assert end_of_turn(tokenizer) == {ids["<|im_end|>"]}
    tokenizer.eos_token = "<|endoftext|>"
    assert end_of_turn(tokenizer) == set(ids.values())
