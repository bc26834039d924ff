"""Adapters as folders that other tools load: a PEFT adapter, or a model with the adapter merged in.

tensor_files    safetensors files, read and written in blocks
numbers         the number formats in them, to float32 and back
adapter         what a downloaded checkpoint holds
base            the model it was trained on
merge           their sum, shard by shard
card            README.md
folders         whole, or not at all

It needs numpy and neither torch nor a server, so weights of the hosted service can be exported on any machine.
"""

from tinsmith.export.folders import new_folder
from tinsmith.export.merge import write_merged
from tinsmith.export.peft import write_peft

__all__ = ["new_folder", "write_merged", "write_peft"]
