"""README.md of an exported folder: what it is, where it comes from, how to load it."""

from __future__ import annotations

import re
from pathlib import Path

from tinsmith.export.adapter import Adapter

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

_PEFT = """---
{base_model}library_name: peft
tags:
- lora
- tinker
tinker_path: {origin}
---

# A LoRA adapter for {base}

| | |
| --- | --- |
| base model | `{base}` |
| rank | {rank} |
| trained modules | {modules} |
| checkpoint | `{origin}` |

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{base}")
model = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto")
model = PeftModel.from_pretrained(model, "PATH_OF_THIS_FOLDER")
```
{warning}"""

_TIED = """
This adapter changes the output matrix (`lm_head`). Where the base uses its embedding as that matrix, `merge_and_unload`
would change the embedding too: use the adapter as it is, or a folder made by `tinsmith checkpoint export --to merged`.
"""

_MERGED = """---
{base_model}library_name: transformers
pipeline_tag: text-generation
tags:
- tinker
tinker_path: {origin}
---

# {base}, fine-tuned

| | |
| --- | --- |
| base model | `{base}` |
| adapter | LoRA of rank {rank}, merged into the weights |
| trained modules | {modules} |
| checkpoint | `{origin}` |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH_OF_THIS_FOLDER")
model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER", dtype="auto")
```
"""


def peft_card(adapter: Adapter, base_model: str, origin: str) -> str:
    return _filled(_PEFT, adapter, base_model, origin)


def merged_card(adapter: Adapter, base_model: str, origin: str) -> str:
    return _filled(_MERGED, adapter, base_model, origin)


def write_card(folder: Path, text: str) -> None:
    (folder / "README.md").write_text(text, encoding="utf-8")


def _filled(template: str, adapter: Adapter, base_model: str, origin: str) -> str:
    return template.format(
        base_model=f"base_model: {base_model}\n" if _HUB_ID.fullmatch(base_model) else "",
        base=base_model,
        rank=adapter.rank,
        modules=", ".join(sorted({f"`{module.rpartition('.')[2]}`" for module in adapter.pairs})),
        origin=origin,
        warning=_TIED if adapter.changes_head else "",
    )
