"""Adapters in the forms that other tools load: a PEFT adapter, or a model with the adapter merged in.

files           what an export consists of, made while it is read
tensor_files    safetensors files, read and written in blocks
numbers         the number formats in them, to float32 and back
adapter         what a checkpoint, or an adapter made elsewhere, holds
base            the model it was trained on
peft            the adapter as other tools name it
merge           the sum of base and adapter, shard by shard
gguf_file       that sum in the form of llama.cpp, tensor by tensor
gguf_model      what llama.cpp must know of a model to run it
gguf_vocab      and of its tokenizer
card            README.md
folders         whole, or not at all

It needs numpy (and `gguf` for GGUF) and neither torch nor a server, so weights of the hosted service can be exported
on any machine.
"""

from tinsmith.export.adapter import Adapter
from tinsmith.export.base import BaseModel
from tinsmith.export.card import Story
from tinsmith.export.files import NewFile, write_files
from tinsmith.export.folders import new_folder
from tinsmith.export.forms import FORMS, GGUF, MERGED, PEFT, export_files

__all__ = [
    "FORMS",
    "GGUF",
    "MERGED",
    "PEFT",
    "Adapter",
    "BaseModel",
    "NewFile",
    "Story",
    "export_files",
    "new_folder",
    "write_files",
]
