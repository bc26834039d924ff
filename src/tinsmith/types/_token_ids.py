"""Token ids, held as they travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self, cast, overload

import msgspec
import numpy as np
import numpy.typing as npt

from tinsmith.types._packing import packed


class TokenIds(Sequence[int]):
    """Token ids as 32-bit integers. To read it is like a list, and it is equal to one; it cannot be changed.

    It takes an eighth of a list's memory, and is sent as it is.
    """

    __slots__ = ("packed",)

    packed: bytes
    """Little-endian."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @classmethod
    def of(cls, tokens: object) -> Self | None:
        """From a plain list. None for anything else, be it wrong or only unusual: then another must judge.

        Packing checks the list too, in the time that a check alone would take.
        """
        if isinstance(tokens, cls):
            return tokens
        ids = packed(tokens, "i") if isinstance(tokens, list | tuple) else None
        if ids is None:
            return None
        lowest = np.frombuffer(ids, "<i4").min()
        # Booleans pack as 0 and 1, so only where there are such ids must one look for them.
        return cls(ids) if lowest > 1 or (lowest >= 0 and _are_ints(tokens)) else None

    def tolist(self) -> list[int]:
        return cast("list[int]", self._array().tolist())

    def _array(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.packed, "<i4")

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self._array(), dtype) if copy else np.asarray(self._array(), dtype)

    def __len__(self) -> int:
        return len(self.packed) // 4

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return cast("int | list[int]", self._array()[index].tolist())

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Sequence[int]) -> list[int]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.packed == other.packed
        return self.tolist() == other if isinstance(other, list) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.packed)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenIds, (self.packed,)

    def __repr__(self) -> str:
        return repr(self.tolist())


def _are_ints(tokens: object) -> bool:
    try:
        msgspec.convert(tokens, list[int])
    except msgspec.ValidationError:
        return False
    return True
