"""README.md of an export: what it is, where it comes from, how to load it."""

from __future__ import annotations

import html
import json
import re
from typing import NamedTuple

from tinsmith.errors import InvalidInputError
from tinsmith.export.adapter import Adapter
from tinsmith.export.files import NewFile

LONGEST_NOTE = 4000

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
| base model | `{base}` |
| adapter | {adapter} |
| rank | {rank} |
| alpha | {alpha} |
| trained modules | {modules} |
{steps}| checkpoint | `{origin}` |

## Data

{data}

## Use

{use}"""

_NO_NOTE = "Nothing was noted about the data that this model was trained on."

_WITH_PEFT = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({base})
model = AutoModelForCausalLM.from_pretrained({base}, dtype="auto")
model = PeftModel.from_pretrained(model, "PATH_OF_THIS_FOLDER")
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


class Story(NamedTuple):
    """What an export says of itself, besides what is in the adapter."""

    base_model: str
    """A hub id, or whatever the server calls it."""
    origin: str
    """The checkpoint's path."""
    data_note: str = ""

    def checked(self) -> Story:
        if len(self.data_note) > LONGEST_NOTE:
            raise InvalidInputError(
                f"The data note has {len(self.data_note):,} characters; at most {LONGEST_NOTE:,} fit the card. "
                "Shorten it, or link to a longer one.",
                field="data_note",
            )
        return self


def peft_card(adapter: Adapter, story: Story) -> NewFile:
    use = _WITH_PEFT.format(base=json.dumps(story.base_model)) + (_TIED if adapter.changes_head else "")
    return _card(adapter, story, f"A LoRA adapter for {story.base_model}", "peft", ("lora", "tinker"), "LoRA", use)


def merged_card(adapter: Adapter, story: Story) -> NewFile:
    title, merged = f"{story.base_model}, fine-tuned", "LoRA, merged into the weights"
    return _card(adapter, story, title, "transformers", ("tinker",), merged, _WITH_TRANSFORMERS)


def gguf_card(adapter: Adapter, story: Story, file: str) -> NewFile:
    title, merged = f"{story.base_model}, fine-tuned, as GGUF", "LoRA, merged into the weights"
    use = _WITH_LLAMA_CPP.format(file=file)
    return _card(adapter, story, title, "gguf", ("gguf", "llama.cpp", "tinker"), merged, use)


def _card(
    adapter: Adapter, story: Story, title: str, library: str, tags: tuple[str, ...], kind: str, use: str
) -> NewFile:
    base, steps = story.base_model, adapter.steps
    text = _CARD.format(
        base_model=f"base_model: {base}\n" if _HUB_ID.fullmatch(base) else "",
        library=library,
        tags="\n".join(f"- {tag}" for tag in tags),
        origin=story.origin,
        title=title,
        base=base,
        adapter=kind,
        rank=adapter.rank,
        alpha=f"{adapter.alpha:g}",
        modules=", ".join(sorted({f"`{module.rpartition('.')[2]}`" for module in adapter.pairs})),
        steps="" if steps is None else f"| optimizer steps | {steps} |\n",
        # Pages that show a card run what it holds: a note is text.
        data=html.escape(story.data_note.strip(), quote=False) or _NO_NOTE,
        use=use,
    )
    return NewFile.holding("README.md", text)
