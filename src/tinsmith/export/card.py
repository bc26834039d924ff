"""README.md of an export: what it is, where it comes from, how to load it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from tinsmith.errors import InvalidInputError
from tinsmith.export.adapter import HEAD, Adapter, is_positive
from tinsmith.export.files import NewFile

LONGEST_NOTE = 4000
_NOTE_WIDTH = 100

_MODULE = re.compile(r"[\w.]+", re.ASCII)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

_CARD = """---
{base_model}library_name: {library}
pipeline_tag: text-generation
tags:
{tags}
tinker_path: {origin}
---

# {title}

| | |
| --- | --- |
{rows}
{unpacked}
## Data

{data}

## Use

{use}"""

_UNPACKED = """
The base weights that it was trained on are those of {base} unpacked from 4 bits. They differ a little from those on
the hub, with which an adapter computes slightly different numbers; `tinsmith checkpoint export --to merged` makes a
folder that holds the very weights.
"""

_NO_NOTE = "Nothing was noted about the data that this model was trained on."

_WITH_PEFT = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({base})
model = AutoModelForCausalLM.from_pretrained({base}, dtype="auto")
model = PeftModel.from_pretrained(model, {place})
```
"""

_TIED = """
This adapter changes the output matrix (`lm_head`). Where the base uses its embedding as that matrix, `merge_and_unload`
would change the embedding too: use the adapter as it is, or a folder made by `tinsmith checkpoint export --to merged`.
"""

_WITH_TRANSFORMERS = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH_OF_THIS_FOLDER")
model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER", dtype="auto")
```
"""

_WITH_LLAMA_CPP = """```bash
llama-cli -m {file}
llama-server -m {file}
llama-quantize {file} smaller.gguf Q4_K_M
```
"""


class Learned(NamedTuple):
    """What a card says of an adapter."""

    rank: int | None
    alpha: float | None
    modules: frozenset[str]
    steps: int | None = None

    @classmethod
    def of(cls, adapter: Adapter) -> Learned:
        modules = frozenset(module.rpartition(".")[2] for module in adapter.pairs)
        return cls(adapter.rank, adapter.alpha, modules, adapter.steps)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Learned:
        """Of an adapter that need not be one of ours: whatever its settings say plainly."""
        rank, alpha, modules = (config.get(name) for name in ("r", "lora_alpha", "target_modules"))
        names = [name for name in modules if isinstance(name, str)] if isinstance(modules, list) else []
        return cls(
            rank if isinstance(rank, int) and is_positive(rank) else None,
            alpha if is_positive(alpha) else None,
            frozenset(name for name in names if _MODULE.fullmatch(name)),
        )


class Story(NamedTuple):
    """What an export says of itself, besides what is in the adapter."""

    base_model: str
    """A hub id, or whatever the server calls it."""
    origin: str
    """The checkpoint's path."""
    data_note: str = ""
    is_unpacked: bool = False
    """Whether the base has weights that were unpacked from 4 bits, and not those of the hub."""
    place: str = "PATH_OF_THIS_FOLDER"
    """Where the export will be loaded from."""

    def checked(self) -> Story:
        if len(self.data_note) > LONGEST_NOTE:
            raise InvalidInputError(
                f"The data note has {len(self.data_note):,} characters; at most {LONGEST_NOTE:,} fit the card. "
                "Shorten it, or link to a longer one.",
                field="data_note",
            )
        return self


def peft_card(learned: Learned, story: Story) -> NewFile:
    use = _WITH_PEFT.format(base=json.dumps(story.base_model), place=json.dumps(story.place))
    use += _TIED if HEAD in learned.modules else ""
    title = f"A LoRA adapter for {_code(story.base_model)}"
    return _card(learned, story, title, "peft", ("lora", "tinker"), "LoRA", use)


def merged_card(learned: Learned, story: Story) -> NewFile:
    title, merged = f"{_code(story.base_model)}, fine-tuned", "LoRA, merged into the weights"
    return _card(learned, story, title, "transformers", ("tinker",), merged, _WITH_TRANSFORMERS)


def gguf_card(learned: Learned, story: Story, file: str) -> NewFile:
    title, merged = f"{_code(story.base_model)}, fine-tuned, as GGUF", "LoRA, merged into the weights"
    use = _WITH_LLAMA_CPP.format(file=file)
    return _card(learned, story, title, "gguf", ("gguf", "llama.cpp", "tinker"), merged, use)


def _card(
    learned: Learned, story: Story, title: str, library: str, tags: tuple[str, ...], kind: str, use: str
) -> NewFile:
    base = story.base_model
    rows = {
        "base model": _code(base),
        "adapter": kind,
        "rank": learned.rank,
        "alpha": None if learned.alpha is None else f"{learned.alpha:g}",
        "trained modules": ", ".join(_code(module) for module in sorted(learned.modules)) or None,
        "optimizer steps": learned.steps,
        "checkpoint": _code(story.origin),
    }
    text = _CARD.format(
        base_model=f"base_model: {base}\n" if _HUB_ID.fullmatch(base) else "",
        library=library,
        tags="\n".join(f"- {tag}" for tag in tags),
        origin=story.origin,
        title=title,
        rows="\n".join(_row(name, value) for name, value in rows.items() if value is not None),
        unpacked=_UNPACKED.format(base=_code(base)) if story.is_unpacked else "",
        data=_verbatim(story.data_note) or _NO_NOTE,
        use=use,
    )
    return NewFile.holding("README.md", text)


def _row(name: str, value: object) -> str:
    """A bar would begin another cell, even in code."""
    cell = str(value).replace("|", r"\|")
    return f"| {name} | {cell} |"


# Pages that show a card run what it holds, but nothing in code. Names and notes are text.


def _code(text: str) -> str:
    """On one line, and without what would end it."""
    line = " ".join(text.replace("`", "'").split())
    return f"`{line}`"


def _verbatim(text: str) -> str:
    """Code by its indentation, which nothing in it can end; pages do not fold the lines of code."""
    fold = textwrap.TextWrapper(_NOTE_WIDTH, break_long_words=False, break_on_hyphens=False).wrap
    folded = "\n".join("\n".join(fold(line)) for line in text.strip().splitlines())
    return textwrap.indent(folded, "    ")
