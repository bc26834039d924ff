"""Values that programs trip over."""

from __future__ import annotations

import struct
from contextlib import suppress
from random import Random

ESCAPES = (
    "..",
    "../../etc/passwd",
    "../" * 40 + "etc/passwd",
    "..\\..\\windows",
    "/etc/passwd",
    "//",
    ".",
    "%2e%2e%2f",
    "a/../../b",
    "tinker://../weights/x",
    "tinker://x/weights/../../secret",
    "tinker:///weights/",
    "file:///etc/passwd",
)
"""Names that would lead out of a folder."""

TEXTS = (
    "",
    " ",
    "\x00",
    "a\x00b",
    "\ud800",
    "\udfff\ud800",
    "\u202egnp.exe",
    "\ufeff",
    "e\u0301" * 50,
    "\U0001f600" * 100,
    "\uff11\uff12",
    "\u0661",
    "\u00b2",
    "\r\nX-Injected: yes",
    "'; DROP TABLE jobs; --",
    "%",
    "_%_",
    "{}",
    "{0.__class__}",
    "%s%n",
    "<script>",
    "null",
    "NaN",
    "-1",
    "1e400",
    "x" * 129,
    "x" * 5000,
    "x" * 70_000,
    "\u00e9" * 40_000,
    *ESCAPES,
)

NUMBERS = (
    "0", "-0", "1", "-1", "2", "255", "256", "1000", "1001", "1024", "1025", "65536", "2147483647", "2147483648",
    "-2147483649", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808",
    "-9223372036854775809", "18446744073709551616", "1" + "0" * 40, "1" + "0" * 400, "1" + "0" * 5000,
    "0.5", "1.0", "1.5", "-0.0", "1e-400", "5e-324", "1e38", "1e39", "1e308", "1e309", "-1e999", "NaN", "Infinity",
    "-Infinity", "0x10", "01", "1.", ".5", "+1", "1_000",
)  # fmt: skip
"""As they stand in JSON; some of them must not."""

_FLOATS = tuple(struct.pack("<I", bits) for bits in (0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001))


def text(random: Random, old: str) -> str:
    match random.randrange(6):
        case 0:
            return old + random.choice(TEXTS)
        case 1:
            return old[: random.randrange(len(old) + 1)]
        case 2:
            place = random.randrange(len(old) + 1)
            return old[:place] + chr(random.choice([0, 10, 127, 128, 0xD800, 0xFFFF, 0x10FFFF])) + old[place:]
        case 3:
            return random.choice([old.upper(), old.swapcase(), old[::-1], old * 2, f" {old} "])
    return random.choice(TEXTS)


def number(random: Random, old: float) -> str:
    """In the notation of JSON."""
    if random.random() < 0.3:
        with suppress(OverflowError):  # a half more than an integer beyond all floats
            return repr(old + random.choice([-1, 1, 0.5, 2**31, -(2**63)]))
    return random.choice(NUMBERS)


def integer(random: Random, bits: int, *, signed: bool = True) -> int:
    low = -(1 << bits - 1) if signed else 0
    high = low + (1 << bits) - 1
    return random.choice([0, 1, low, low + 1, high, high - 1, 1000, max(low, -1), random.randint(low, high)])


def double(random: Random) -> float:
    return random.choice([0.0, -0.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"), 1e39, 0.5])


def data(random: Random, old: bytes) -> bytes:
    """Bytes like the old ones, but not quite."""
    match random.randrange(9):
        case 0:
            return b""
        case 1:
            return old[: random.randrange(len(old) + 1)]
        case 2:
            return old + random.randbytes(random.randrange(1, 9))
        case 3:
            return flipped(random, old)
        case 4:
            return random.randbytes(random.choice([1, 3, 4, 8, 64, 4096]))
        case 5:
            return old * random.choice([2, 7, 200])
        case 6:
            return random.choice(_FLOATS) * (len(old) // 4)
        case 7:
            place = random.randrange(len(old) + 1)
            return old[:place] + random.randbytes(random.randrange(1, 5)) + old[place:]
    place = random.randrange(len(old) + 1)
    return old[:place] + old[place + random.randrange(1, 9) :]


def flipped(random: Random, old: bytes) -> bytes:
    """With one to eight bits turned over."""
    copy = bytearray(old)
    for _ in range(random.randrange(1, 9) if old else 0):
        copy[random.randrange(len(copy))] ^= 1 << random.randrange(8)
    return bytes(copy)
