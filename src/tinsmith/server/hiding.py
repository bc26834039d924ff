"""Settings as text, for logs and debuggers, without what is secret in them."""

from __future__ import annotations

import msgspec

SECRET = ("api_keys", "database")
"""The URL of a database may have a password in it."""


class SecretsHidden(msgspec.Struct, frozen=True):
    def __repr__(self) -> str:
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        texts = (f"{name}={'<secret>' if name in SECRET and value else repr(value)}" for name, value in fields)
        return f"{type(self).__name__}({', '.join(texts)})"
