"""Requests over real connections to a real server, whose worker trains and samples a tiny model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from tests.end_to_end.serving import ServerProcess
from tests.fuzz import rules, values
from tests.fuzz.world import DOOMED_KEY, KEY, OTHER_KEY, TOKENIZER_FILES, Answer, Case, Send
from tests.support.tiny_tokenizer import byte_level_bpe, write_folder

BASE_MODEL = "tiny"
_END = b"\r\n\r\n"


class FuzzedServer(ServerProcess):
    @property
    def pid(self) -> int:
        return self._process.pid


@contextmanager
def real_server(folder: Path) -> Iterator[FuzzedServer]:
    from tests.server.tiny_models import save_model

    tokenizer = byte_level_bpe()
    model = save_model(folder / "model", "smollm2", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    write_folder(model, tokenizer, TOKENIZER_FILES)
    keys = [f"--api-key={key}" for key in (KEY, OTHER_KEY, DOOMED_KEY)]
    with FuzzedServer(folder / "state", {BASE_MODEL: model}, "--session-timeout=86400", *keys) as server:
        yield server


def sender(url: str) -> Send:
    async def send(case: Case) -> Answer:
        # Who waits for the rest of a body that was announced too long is told that there is none.
        return _parsed(await exchange(url, written(case), hang_up=rules.lies_about_its_length(case)))

    return send


def written(case: Case) -> bytes:
    """The request as it stands on the wire. A header of the case that tells another length is the only one."""
    lines = [f"{case.method} {case.target} HTTP/1.1", *(f"{name}: {value}" for name, value in case.headers)]
    names = {name for name, _ in case.headers}
    lines += [] if "host" in names else ["host: localhost"]
    lines += [] if "content-length" in names else [f"content-length: {len(case.body)}"]
    return "\r\n".join([*lines, "connection: close"]).encode("latin-1") + _END + case.body


async def exchange(url: str, request: bytes, *, hang_up: bool = False) -> bytes:
    """All that comes back until the server hangs up, which it may do while we still write.

    A client that hangs up has sent all it has, and gets no answer, or one that was on its way.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**26)
    try:
        writer.write(request)
        if hang_up:
            writer.write_eof()
        return await reader.read()
    except OSError:
        return b""
    finally:
        writer.close()


def _parsed(raw: bytes) -> Answer:
    if not raw:
        return rules.NO_ANSWER
    head, _, body = raw.partition(_END)
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(status.split()[1]), headers, body)


def torn(request: bytes, random: Random) -> bytes:
    """A request whose frame is broken: lines, lengths and chunks that do not fit."""
    head, _, body = request.partition(_END)
    match random.randrange(7):
        case 0:
            return values.data(random, head) + _END + body
        case 1:
            return request[: random.randrange(len(request))]
        case 2:
            return head.replace(b"HTTP/1.1", random.choice([b"HTTP/9.9", b"HTTP/1.0", b"", b"HTTP/2.0"])) + _END + body
        case 3:
            chunk = random.choice([b"5\r\nab", b"-1\r\nab\r\n", b"FFFFFFFFFFFFFFFF\r\nab", b"0\r\n\r\n", b"z\r\n"])
            return head + b"\r\ntransfer-encoding: chunked" + _END + chunk
        case 4:
            return head + b"\r\nx: " + b"y" * random.choice([10_000, 70_000, 200_000]) + _END + body
        case 5:
            return (
                head + random.choice([b"\r\ncontent-length: -1", b"\r\n: x", b"\r\n x", b"\r\n\x00: y"]) + _END + body
            )
    return random.randbytes(random.randrange(1, 3000))


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int | str = "self") -> int:
    """The memory of a process, as the system counts it."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
