"""From a draft to a request that is wrong somewhere: in a field, its bytes, its encoding, its headers or its path."""

from __future__ import annotations

import re
from random import Random
from typing import Any
from urllib.parse import quote

import zstandard

from tests.fuzz import messages, trees, values
from tests.fuzz.drafts import CHOICES, DRAFTS, Draft, is_message
from tests.fuzz.world import DOOMED_KEY, KEY, TOKEN, Case, World
from tinsmith.wire import tar

PROTOBUF, JSON = "application/x-protobuf", "application/json"
_AS_IT_IS = 0.1

TYPES = (
    JSON, PROTOBUF, "", "text/plain", "application/json; charset=utf-16", "APPLICATION/JSON", "application/json;;;",
    "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "a" * 4000, "application/x-protobuf,json",
)  # fmt: skip
ENCODINGS = ("zstd", "ZSTD", "gzip", "br", "identity", "zstd, zstd", "", "x" * 3000, "deflate")
CREDENTIALS = (
    "", " ", "tml-", "tml-unknown", "eyJ", "eyJ.a.b", "eyJhbGciOiJub25lIn0.e30.", "eyJ" + "A" * 3000, "x" * 6000,
    "tml-\xff", "null", KEY + "x", KEY[:-1], KEY.upper(), "Bearer " + KEY,
)  # fmt: skip
HEADERS = (
    ("accept", "application/x-protobuf"), ("accept", "x" * 5000), ("accept", "\xff"), ("accept-encoding", "gzip;q=x"),
    ("content-length", "0"), ("content-length", "5"), ("content-length", "99999999999"),
    ("x-idempotency-key", "\xff" * 300), ("x-tinker-weights-access-token", TOKEN), ("host", ""), ("host", "a b"),
    ("host", "evil.example/x?"), ("x-forwarded-for", "' OR 1=1"), ("range", "bytes=0-"), ("range", "bytes=-"),
    ("range", "bytes=" + "0-1," * 500), ("if-range", "x"), ("x-tinker-request-iteration", "NaN"), ("expect", "x"),
    ("x-api-key", "tml-unknown"), ("cookie", "x" * 4000), ("x-forwarded-proto", "javascript"),
)  # fmt: skip


def case(world: World, random: Random) -> Case:
    """The next request; the same state of `random` bends in the same way."""
    name = random.choice(CHOICES)
    if random.random() < _AS_IT_IS:
        return valid(name, world, random)
    draft = DRAFTS[name](world, random)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        _bend_content(draft, world, random)
    body, headers = _body(draft), _headers(name, draft)
    if random.random() < 0.3:
        body, headers = _bend_bytes(body, headers, random, is_message(draft))
    if random.random() < 0.2:
        headers = _bend_headers(headers, random)
    return _finished(name, draft, body, headers)


def valid(name: str, world: World, random: Random) -> Case:
    """A request of this endpoint as it should be."""
    draft = DRAFTS[name](world, random)
    return _finished(name, draft, _body(draft), _headers(name, draft))


# --- what the request says -------------------------------------------------------------------------------------------


def _bend_content(draft: Draft, world: World, random: Random) -> None:
    if draft.parts and (draft.body is None or random.random() < 0.5):
        _bend_text(draft.parts, world, random)
    elif draft.query and random.random() < 0.7:
        _bend_text(draft.query, world, random)
    elif is_message(draft):
        draft.body = messages.mutate(draft.body, random)
    elif isinstance(draft.body, bytes):
        draft.body = values.data(random, draft.body)
    elif draft.body is not None:
        draft.body = _bent_tree(draft.body, world, random)
    else:
        draft.query[values.text(random, "limit")] = values.text(random, "1")


def _bend_text(texts: dict[str, str], world: World, random: Random) -> None:
    name = random.choice(list(texts))
    foreign = world.foreign.get(name.replace("run_id", "model_id").replace("sampler_id", "sampling_session_id"))
    escape = random.choice(values.ESCAPES)
    texts[name] = random.choice([foreign or escape, escape, values.text(random, texts[name])])


def _bent_tree(body: Any, world: World, random: Random) -> Any:
    named = [name for name in (*world.foreign, "source_path", "model_path") if isinstance(body, dict) and name in body]
    if named and random.random() < 0.15:
        name = random.choice(named)
        return {**body, name: world.foreign.get(name, world.foreign["path"])}
    return trees.mutate(body, random)


def _body(draft: Draft) -> bytes:
    if is_message(draft):
        return bytes(draft.body.SerializeToString(deterministic=True))
    if isinstance(draft.body, bytes):
        return draft.body
    return b"" if draft.body is None else trees.encode(draft.body)


# --- how it is written -----------------------------------------------------------------------------------------------


def _headers(name: str, draft: Draft) -> list[tuple[str, str]]:
    key = DOOMED_KEY if name.startswith(("DELETE /api/v1/auth", "DELETE /dashboard/api/keys")) else KEY
    kind = PROTOBUF if is_message(draft) else tar.CONTENT_TYPE if isinstance(draft.body, bytes) else JSON
    return [("content-type", kind), ("x-api-key", key), *draft.headers.items()]


def _bend_bytes(
    body: bytes, headers: list[tuple[str, str]], random: Random, is_protobuf: bool
) -> tuple[bytes, list[tuple[str, str]]]:
    if random.random() < 0.4:
        return _compressed(body, random), [*headers, ("content-encoding", "zstd")]
    return (messages.tampered if is_protobuf else values.data)(random, body), headers


def _compressed(body: bytes, random: Random) -> bytes:
    frame = zstandard.compress(body)
    match random.randrange(8):
        case 0:
            return values.data(random, frame)
        case 1:
            return frame + frame
        case 2:
            return zstandard.compress(bytes(random.choice([2**20, 2**24, 2**26])))  # of a few kilobytes
        case 3:
            return b"\x50\x2a\x4d\x18\xff\xff\xff\xff" + frame  # a frame to be skipped, of 4 GiB
        case 4:
            settings = zstandard.ZstdCompressionParameters(window_log=random.choice([24, 27, 30]), write_content_size=0)
            compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
            return compressor.compress(body) + compressor.flush()
        case 5:
            return frame[:4] + bytes([0b11 << 6]) + frame[5:]  # a wrong descriptor: another length of the content
        case 6:
            return zstandard.compress(frame)
    return frame


def _bend_headers(headers: list[tuple[str, str]], random: Random) -> list[tuple[str, str]]:
    match random.randrange(6):
        case 0:
            return [(name, random.choice(TYPES) if name == "content-type" else value) for name, value in headers]
        case 1:
            return [*headers, ("content-encoding", random.choice(ENCODINGS))]
        case 2:
            return [(name, random.choice(CREDENTIALS) if name == "x-api-key" else value) for name, value in headers]
        case 3:
            return [pair for pair in headers if pair[0] != random.choice(["x-api-key", "content-type"])]
        case 4:
            return [*headers, *(("x-filler", "y" * 50),) * random.choice([1, 90])]
    return [*headers, random.choice(HEADERS)]


def _finished(name: str, draft: Draft, body: bytes, headers: list[tuple[str, str]]) -> Case:
    method, _, template = name.partition(" ")

    def filled(found: re.Match[str]) -> str:
        return _quoted(draft.parts[found[1]], "/:" if found[1].endswith(":path") else ":")

    target = re.sub(r"{([\w:]+)}", filled, template)
    if draft.query:
        target += "?" + "&".join(f"{_quoted(key)}={_quoted(value)}" for key, value in draft.query.items())
    return Case(name, method, target, tuple(headers), body, draft.claim)


def _quoted(text: str, safe: str = "") -> str:
    return quote(text.encode("utf-8", "surrogatepass")[:8000], safe=safe + "%" if text.startswith("%2") else safe)
