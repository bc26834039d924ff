"""Which tokenizer a model has, and one loaded copy of it per process.

A tokenizer turns text into ids and back, nothing more: `get_tokenizer` never applies a chat template. Whoever wants
the model's own template asks for it with `tinsmith.text.chat_template.apply_chat_template`.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from tinsmith.client.tokenizer_files import load_tokenizer
from tinsmith.errors import InvalidInputError, InvalidTypeError
from tinsmith.text.fast_tokenizer import Tokenizer

_UNGATED_LLAMA_3 = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"

# These models tokenize with code from their own repository, so each is held to one reviewed commit of it.
_PINNED_REVISIONS: Mapping[str, str] = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
    "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
}
_SAME_TOKENIZER_AS: Mapping[str, str] = {"moonshotai/Kimi-K2.5-Text-Only": "moonshotai/Kimi-K2.5"}


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a tokenizer comes from: a hub repository, a local folder or file, or the TML package."""

    id: str
    kind: Literal["hub", "local", "tml"] = "hub"
    revision: str | None = None
    needs_remote_code: bool = False


Loader: TypeAlias = Callable[[TokenizerSource], Tokenizer]


def _is_local(name: str) -> bool:
    return os.path.isdir(name) or (name.endswith(".json") and os.path.isfile(name))


def resolve_tokenizer(
    model_name: str,
    tokenizer_id: str | os.PathLike[str] | None = None,
    *,
    is_local: Callable[[str], bool] = _is_local,
) -> TokenizerSource:
    """Apply the naming rules, in order; the file system is asked through `is_local` only.

    What exists as a folder (or a `.json` file) is that folder, whatever the hub calls by the same name. Otherwise
    everything after the first `:` is dropped, and a model name without a tokenizer id is mapped to its repository.
    """
    given = _text("tokenizer_id", tokenizer_id) if tokenizer_id else _text("model_name", model_name)
    name = given.split(":", 1)[0]
    for path in (given, name):
        if is_local(path):
            return TokenizerSource(path, "local")
    if not name or os.path.isabs(given) or name.startswith((".", "~")):
        raise InvalidInputError(
            f"There is no tokenizer at {given!r}: no such folder or .json file. "
            "Pass a folder that holds a tokenizer.json, or a hub id such as 'Qwen/Qwen3-8B'.",
            field="tokenizer_id" if tokenizer_id else "model_name",
            value=given,
        )
    return _hub_source(name if tokenizer_id else _repository_of_model(name))


def known_here(tokenizer_id: str | None) -> str | None:
    """A tokenizer id as a server gives it, unless it is a folder of another machine: then the model's name must do."""
    is_elsewhere = tokenizer_id is not None and os.path.isabs(tokenizer_id) and not _is_local(tokenizer_id)
    return None if is_elsewhere else tokenizer_id


def _text(field: str, value: object) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise InvalidTypeError(f"{field} must be a str, not {type(value).__name__}.", field=field, value=value)
    return value


def _repository_of_model(model_name: str) -> str:
    if model_name.startswith("meta-llama/Llama-3"):
        return _UNGATED_LLAMA_3
    if model_name.count("/") == 2:  # org/model/variant
        return model_name.rpartition("/")[0]
    return model_name


def _hub_source(tokenizer_id: str) -> TokenizerSource:
    if tokenizer_id.startswith(("TML/", "thinkingmachines/")):
        return TokenizerSource(tokenizer_id, "tml")
    tokenizer_id = _SAME_TOKENIZER_AS.get(tokenizer_id, tokenizer_id)
    revision = _PINNED_REVISIONS.get(tokenizer_id)
    return TokenizerSource(tokenizer_id, revision=revision, needs_remote_code=revision is not None)


class _LoadedOnce:
    """The most recently used tokenizers. Callers that ask for the same one at the same time share one load."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._ready: OrderedDict[Hashable, Tokenizer] = OrderedDict()
        self._loading: dict[Hashable, Future[Tokenizer]] = {}

    def get(self, key: Hashable, load: Callable[[], Tokenizer]) -> Tokenizer:
        with self._lock:
            if key in self._ready:
                self._ready.move_to_end(key)
                return self._ready[key]
            awaited = self._loading.get(key)
            if awaited is None:
                promise = self._loading[key] = Future()
        return self._load(key, load, promise) if awaited is None else awaited.result()

    def _load(self, key: Hashable, load: Callable[[], Tokenizer], promise: Future[Tokenizer]) -> Tokenizer:
        try:
            tokenizer = load()
        except BaseException as error:  # others wait for this load and must learn however it ends
            with self._lock:
                self._loading.pop(key, None)
            promise.set_exception(error)
            raise
        with self._lock:
            self._loading.pop(key, None)
            self._ready[key] = tokenizer
            if len(self._ready) > self._capacity:
                self._ready.popitem(last=False)
        promise.set_result(tokenizer)
        return tokenizer

    def forget_loading(self) -> None:
        """In a forked child, no thread is left to finish what the parent was loading."""
        self._lock = threading.Lock()
        self._loading = {}


_loaded = _LoadedOnce(capacity=32)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loaded.forget_loading)


def get_tokenizer(
    model_name: str,
    tokenizer_id: str | os.PathLike[str] | None = None,
    *,
    offline: bool = False,
    loader: Loader | None = None,
) -> Tokenizer:
    """The tokenizer of a model, loaded once per process; blocks while it loads, and may be called from any thread.

    `tokenizer_id` (what a training run reports) goes before `model_name`; either may be a local folder or file.
    With `offline=True`, or HF_HUB_OFFLINE set, only local files and the Hugging Face cache are looked at.
    `loader` replaces the loading itself. Models that bring their own tokenizer code come as a `transformers`
    tokenizer, which has the methods of `Tokenizer` and more.
    """
    source = resolve_tokenizer(model_name, tokenizer_id)
    load = loader or partial(load_tokenizer, offline=offline)
    place = os.path.abspath(source.id) if source.kind == "local" else source.id
    return _loaded.get((place, source.revision, loader, offline), lambda: load(source))
