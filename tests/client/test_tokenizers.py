"""Getting a tokenizer: where its files come from, and one load per process."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import pytest

from tests.support.hub import NOWHERE, Hub, run_python
from tests.support.tiny_tokenizer import CHATML_CONFIG, byte_level_bpe, cache_folder, write_folder
from tinsmith.client import tokenizers as module
from tinsmith.client.tokenizers import TokenizerSource, get_tokenizer
from tinsmith.errors import InvalidInputError, MissingExtraError, TokenizerError
from tinsmith.text.fast_tokenizer import Tokenizer

NO_CONNECTIONS = """
import socket
def refuse(*args, **kwargs):
    raise SystemExit(f"a connection was opened: {args}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""


@pytest.fixture(autouse=True)
def empty_process_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_loaded", module._LoadedOnce(capacity=32))


@pytest.fixture
def no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        pytest.fail(f"a connection was opened: {args}")

    for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


class Loads:
    """A loader that counts, and waits where a test says so."""

    def __init__(self) -> None:
        self.sources: list[TokenizerSource] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, source: TokenizerSource) -> Tokenizer:
        self.sources.append(source)
        assert self.go_on.wait(timeout=30)
        return Tokenizer(byte_level_bpe(), name_or_path=source.id)


def test_a_local_folder_or_file_works_as_model_name_and_as_tokenizer_id(tmp_path: Path, no_connections: None) -> None:
    folder = write_folder(tmp_path / "model")

    for tokenizer in (
        get_tokenizer(str(folder)),
        get_tokenizer("any/model", str(folder)),
        get_tokenizer("any/model", folder),
        get_tokenizer("any/model", folder / "tokenizer.json"),
    ):
        assert tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"


def test_a_relative_folder_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_connections: None
) -> None:
    write_folder(tmp_path / "Qwen" / "Qwen3-8B")
    monkeypatch.chdir(tmp_path)

    assert get_tokenizer("Qwen/Qwen3-8B").eos_token == "<|im_end|>"


def test_relative_folders_of_two_places_are_two_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "one" / "model")
    write_folder(tmp_path / "two" / "model", files={"tokenizer_config.json": {"eos_token": "<|endoftext|>"}})

    found = []
    for place in ("one", "two"):
        monkeypatch.chdir(tmp_path / place)
        found.append(get_tokenizer("model").eos_token)

    assert found == ["<|im_end|>", "<|endoftext|>"]


def test_a_folder_without_a_tokenizer_is_explained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))

    with pytest.raises(TokenizerError, match=r"has no tokenizer: .* Put the model's .* no folder is called so"):
        get_tokenizer(str(tmp_path))


def test_a_repository_without_a_tokenizer_is_explained(hub_cache: Path, no_connections: None) -> None:
    (cache_folder(hub_cache, "org/adapter") / "adapter_config.json").write_text("{}")

    with pytest.raises(TokenizerError, match=r"'org/adapter' has no tokenizer: .* made from as the tokenizer id"):
        get_tokenizer("org/adapter", offline=True)


def test_the_same_tokenizer_is_loaded_once() -> None:
    loads = Loads()

    first = get_tokenizer("Qwen/Qwen3-8B", loader=loads)
    assert get_tokenizer("Qwen/Qwen3-8B:peft", loader=loads) is first
    assert get_tokenizer("another name", "Qwen/Qwen3-8B", loader=loads) is first
    assert loads.sources == [TokenizerSource("Qwen/Qwen3-8B")]


def test_another_loader_is_not_answered_from_the_cache_of_the_first() -> None:
    one, two = Loads(), Loads()

    assert get_tokenizer("Qwen/Qwen3-8B", loader=one) is not get_tokenizer("Qwen/Qwen3-8B", loader=two)


def test_concurrent_first_calls_share_one_load() -> None:
    loads = Loads()
    loads.go_on.clear()
    all_here = threading.Barrier(8)

    def ask() -> Tokenizer:
        all_here.wait(timeout=30)
        return get_tokenizer("Qwen/Qwen3-8B", loader=loads)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask) for _ in range(7)]
        all_here.wait(timeout=30)
        loads.go_on.set()
        tokenizers = {id(answer.result(timeout=30)) for answer in answers}

    assert len(tokenizers) == len(loads.sources) == 1


def test_a_slow_load_does_not_hold_up_another_model() -> None:
    slow, quick = Loads(), Loads()
    slow.go_on.clear()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get_tokenizer, "slow/model", loader=slow)
        assert get_tokenizer("quick/model", loader=quick).name_or_path == "quick/model"
        slow.go_on.set()
        assert waiting.result(timeout=30).name_or_path == "slow/model"


def test_the_least_recently_used_of_33_is_forgotten() -> None:
    loads = Loads()

    for number in range(32):
        get_tokenizer(f"model-{number}", loader=loads)
    get_tokenizer("model-0", loader=loads)
    get_tokenizer("model-32", loader=loads)
    assert len(loads.sources) == 33

    get_tokenizer("model-0", loader=loads)
    assert len(loads.sources) == 33
    get_tokenizer("model-1", loader=loads)
    assert len(loads.sources) == 34


def test_a_failed_load_is_tried_again_at_the_next_call() -> None:
    outcomes: list[Any] = [TokenizerError("first"), KeyboardInterrupt(), Tokenizer(byte_level_bpe())]

    def loader(source: TokenizerSource) -> Tokenizer:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    with pytest.raises(TokenizerError, match="first"):
        get_tokenizer("some/model", loader=loader)
    with pytest.raises(KeyboardInterrupt):
        get_tokenizer("some/model", loader=loader)
    assert len(get_tokenizer("some/model", loader=loader)) > 0


def test_those_who_wait_for_a_load_learn_that_it_failed() -> None:
    started, go_on = threading.Event(), threading.Event()

    def loader(source: TokenizerSource) -> Tokenizer:
        started.set()
        assert go_on.wait(timeout=30)
        raise TokenizerError("gone")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(get_tokenizer, "some/model", loader=loader)
        assert started.wait(timeout=30)
        second = pool.submit(get_tokenizer, "some/model", loader=loader)
        go_on.set()
        assert isinstance(first.exception(timeout=30), TokenizerError)
        assert isinstance(second.exception(timeout=30), TokenizerError)


def test_a_forked_child_does_not_wait_for_a_load_of_its_parent() -> None:
    printed = run_python(
        """
import os, threading, warnings
from tinsmith.client.tokenizers import get_tokenizer
warnings.simplefilter("ignore")
parent, started, go_on = os.getpid(), threading.Event(), threading.Event()
def loader(source):
    if os.getpid() == parent:
        started.set()
        go_on.wait(60)
    return "loaded"
thread = threading.Thread(target=get_tokenizer, args=("some/model",), kwargs={"loader": loader})
thread.start()
started.wait(60)
child = os.fork()
if child == 0:
    os._exit(0 if get_tokenizer("some/model", loader=loader) == "loaded" else 1)
print(os.waitpid(child, 0)[1])
go_on.set()
thread.join()
"""
    )
    assert printed == "0"


def test_offline_finds_what_the_hugging_face_cache_holds(hub_cache: Path, no_connections: None) -> None:
    write_folder(cache_folder(hub_cache, "org/tiny"))

    tokenizer = get_tokenizer("org/tiny/variant:2", offline=True)

    assert (tokenizer.name_or_path, tokenizer.eos_token) == ("org/tiny", "<|im_end|>")


def test_offline_says_which_files_to_place_where(hub_cache: Path, no_connections: None) -> None:
    with pytest.raises(TokenizerError) as caught:
        get_tokenizer("org/tiny", offline=True)

    assert str(caught.value) == (
        f"No tokenizer for 'org/tiny': its files are not, or not all, in the Hugging Face cache {hub_cache}, and "
        "offline nothing is downloaded. Run `hf download org/tiny --include 'tokenizer.json' --include "
        "'tokenizer_config.json' --include 'special_tokens_map.json' --include 'chat_template.jinja' --include "
        "'chat_template.json' --include 'additional_chat_templates/*.jinja'` where there is a connection and copy the "
        "folder models--org--tiny from the cache there into the cache here; or put tokenizer.json and "
        "tokenizer_config.json into a folder and pass that as the tokenizer id."
    )


def test_offline_names_the_pinned_commit_of_a_model_with_its_own_code(hub_cache: Path, no_connections: None) -> None:
    with pytest.raises(TokenizerError, match=r"--revision f831ab66814297da540d832a5235f8e904f29d06 .*'\*\.py'"):
        get_tokenizer("moonshotai/Kimi-K3", offline=True)


@pytest.mark.parametrize("name", ["a/b/c/d", "two words", "org/"])
def test_a_name_that_no_hub_can_have_is_refused(name: str, no_connections: None) -> None:
    with pytest.raises(InvalidInputError, match="neither an existing folder nor a hub id"):
        get_tokenizer(name)


def test_the_variables_of_hugging_face_are_honoured(tmp_path: Path) -> None:
    write_folder(cache_folder(tmp_path / "home" / "hub", "org/tiny"))
    write_folder(cache_folder(tmp_path / "cache", "org/other"))
    code = NO_CONNECTIONS + "from tinsmith.client.tokenizers import get_tokenizer\n"

    home = run_python(
        code + "print(get_tokenizer('org/tiny').eos_token)", HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1"
    )
    cache = run_python(
        code + "print(get_tokenizer('org/other').eos_token)", HF_HUB_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1"
    )
    assert home == cache == "<|im_end|>"


def test_the_offline_variable_is_as_good_as_the_argument(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(TokenizerError, match=r"in the Hugging Face cache .*, and offline nothing is downloaded"):
        get_tokenizer("org/tiny")


def test_nothing_optional_is_imported_before_it_is_needed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    optional = "{'tokenizers', 'huggingface_hub', 'transformers', 'jinja2', 'numpy', 'torch', 'tml_tokenizers'}"
    printed = run_python(
        f"""
import sys
from tinsmith.text.chat_template import apply_chat_template
from tinsmith.client.tokenizers import get_tokenizer
print(sorted({optional} & sys.modules.keys()))
get_tokenizer({str(folder)!r}).encode("The fox")
print(sorted({optional} & sys.modules.keys()))
"""
    )
    assert printed.splitlines() == ["[]", "['tokenizers']"]


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("tokenizers", r"Reading .*tokenizer\.json needs the package 'tokenizers'.*tinsmith\[tokenizers\]"),
        ("huggingface_hub", r"the tokenizer of 'org/tiny' needs the package 'huggingface_hub'.*tinsmith\[tokenizers\]"),
        ("transformers", r"the tokenizer of .* needs the package 'transformers'.*tinsmith\[transformers\]"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    older = tmp_path / "older"
    older.mkdir()
    (older / "vocab.json").write_text("{}")
    names = {
        "tokenizers": str(write_folder(tmp_path / "model")),
        "huggingface_hub": "org/tiny",
        "transformers": str(older),
    }

    with pytest.raises(MissingExtraError, match=remedy):
        get_tokenizer(names[package])


def test_tml_models_need_their_own_package() -> None:
    with pytest.raises(TokenizerError, match=r"'TML/model' comes with the package 'tml_tokenizers'.*'tml-renderers'"):
        get_tokenizer("TML/model")


def test_tml_models_take_the_tokenizer_of_their_package_or_else_the_hub(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, no_connections: None
) -> None:
    from types import ModuleType

    package, inner = ModuleType("tml_tokenizers"), ModuleType("tml_tokenizers.tinker_tokenizers")
    theirs = Tokenizer(byte_level_bpe())
    inner.get_tinker_tokenizer = {"TML/model": theirs}.get  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tml_tokenizers", package)
    monkeypatch.setitem(sys.modules, "tml_tokenizers.tinker_tokenizers", inner)
    write_folder(cache_folder(hub_cache, "TML/other"))

    assert get_tokenizer("TML/model") is theirs
    assert get_tokenizer("TML/other", offline=True).name_or_path == "TML/other"


def test_a_model_without_tokenizer_json_is_read_by_transformers(tmp_path: Path, no_connections: None) -> None:
    byte_level_bpe().model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))

    tokenizer = get_tokenizer(str(tmp_path))

    assert type(tokenizer).__module__.startswith("transformers.")
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    assert tokenizer.name_or_path == str(tmp_path)


def test_code_in_a_local_folder_is_refused_without_asking_on_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a b c")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["code.Mine", None]}}))
    (tmp_path / "code.py").write_text("raise SystemExit('the code was run')")

    with pytest.raises(TokenizerError, match=r"trust_remote_code.*pass a function as loader="):
        get_tokenizer(str(tmp_path))


OWN_CODE = '''
from transformers import PreTrainedTokenizer

class TikTokenTokenizer(PreTrainedTokenizer):
    """One id per character, from a file as the real one reads its ranks, with templates in code."""
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **kwargs):
        self.characters = open(vocab_file).read()
        super().__init__(**kwargs)

    vocab_size = property(lambda self: len(self.characters))
    def get_vocab(self): return {character: i for i, character in enumerate(self.characters)}
    def _tokenize(self, text): return list(text)
    def _convert_token_to_id(self, token): return self.characters.index(token)
    def _convert_id_to_token(self, index): return self.characters[index]
    def convert_tokens_to_string(self, tokens): return "".join(tokens)
    def apply_chat_template(self, conversation, tools=None, tokenize=True, return_dict=True, **kwargs):
        text = f"{conversation[0]['content']}{len(tools)}"
        return self.encode(text, add_special_tokens=False) if tokenize else text
'''


def test_a_pinned_model_runs_the_code_of_its_pinned_commit_only(tmp_path: Path) -> None:
    pinned = cache_folder(tmp_path / "hub", "moonshotai/Kimi-K2-Thinking", "612681931a8c906ddb349f8ad0f582cb552189cd")
    (pinned / "tokenization_kimi.py").write_text(OWN_CODE)
    (pinned / "tiktoken.model").write_text("abc123")
    (pinned / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}})
    )
    (pinned / "config.json").write_text(
        json.dumps({"model_type": "kimi", "auto_map": {"AutoConfig": "configuration_kimi.Config"}})
    )
    (pinned / "configuration_kimi.py").write_text("raise SystemExit('code that tokenizing does not need was run')")
    (pinned.parents[1] / "refs" / "main").write_text("1" * 40)

    printed = run_python(
        NO_CONNECTIONS
        + """
import json
from tinsmith.text.chat_template import apply_chat_template
from tinsmith.client.tokenizers import get_tokenizer
tokenizer = get_tokenizer("moonshotai/Kimi-K2-Thinking:peft", offline=True)
messages = [{"role": "user", "content": "ab"}]
print(json.dumps([
    tokenizer.name_or_path, tokenizer.encode("abc"), tokenizer.decode([2, 1]),
    apply_chat_template(tokenizer, messages, tools=[{}]),
    apply_chat_template(tokenizer, messages, tools=[{}], tokenize=False),
]))
""",
        HF_HOME=str(tmp_path),
    )
    assert json.loads(printed) == ["moonshotai/Kimi-K2-Thinking", [0, 1, 2], "cb", [0, 1, 3], "ab1"]


def test_online_only_the_files_of_the_tokenizer_are_fetched(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "made",
        files={"tokenizer_config.json": CHATML_CONFIG, "chat_template.jinja": "{{ messages[0].content }}"},
    )
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub = Hub("org/tiny", files | {"model.safetensors": b"x", "README.md": b"x"})
    code = """
from tinsmith.client.tokenizers import get_tokenizer
from tinsmith.errors import TokenizerError
tokenizer = get_tokenizer("org/tiny")
print(tokenizer.eos_token, tokenizer.chat_template)
for name in ("org/gated", "org/none"):
    try:
        get_tokenizer(name)
    except TokenizerError as error:
        print(error)
"""
    with hub.served() as address:
        printed = run_python(code, HF_ENDPOINT=address, HF_HOME=str(tmp_path / "home"))

    assert hub.fetched == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    tokenizer, gated, missing = printed.splitlines()
    assert tokenizer == "<|im_end|> {{ messages[0].content }}"
    assert gated.startswith("No tokenizer for 'org/gated': its repository is gated. Accept the terms")
    assert missing.startswith("No tokenizer for 'org/none': there is no such repository, or it is private.")


def test_a_hub_out_of_reach_is_reported_with_the_way_out(tmp_path: Path) -> None:
    code = """
from tinsmith.client.tokenizers import get_tokenizer
from tinsmith.errors import TokenizerError
try:
    get_tokenizer("org/tiny")
except TokenizerError as error:
    print(error)
"""
    printed = run_python(code, HF_ENDPOINT=NOWHERE, HF_HOME=str(tmp_path))

    assert printed.startswith("No tokenizer for 'org/tiny': ")
    assert printed.endswith("Check the connection, or place the files yourself and use offline=True.")
