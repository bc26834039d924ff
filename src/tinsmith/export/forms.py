"""What a checkpoint can be exported to."""

from __future__ import annotations

from tinsmith.export.adapter import Adapter
from tinsmith.export.base import BaseModel
from tinsmith.export.card import Story
from tinsmith.export.files import NewFile
from tinsmith.export.gguf_file import gguf_files
from tinsmith.export.merge import merged_files
from tinsmith.export.peft import peft_files

PEFT, MERGED, GGUF = FORMS = ("peft", "merged", "gguf")


def export_files(form: str, adapter: Adapter, base: BaseModel | None, story: Story) -> list[NewFile]:
    """The files of an export. All that can be wrong with it is found here, but for sums that do not fit their format.

    All forms but PEFT need the base.
    """
    if form == PEFT:
        return peft_files(adapter, story.checked())
    if base is None:
        raise ValueError(f"{form} needs a base")
    return (gguf_files if form == GGUF else merged_files)(adapter, base, story.checked())
