"""The dashboard: files that a browser gets as they are, without a key; what they show, they ask the API for.

Nothing is built and nothing comes from elsewhere. The policy that is sent along lets a browser run no script but these,
whatever a name or a sample may hold.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from mimetypes import guess_type

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.server.routes._call import Services, reply_plain
from tinsmith.server.store import StoreUnavailableError

_PAGE = "index.html"
_KINDS = (".css", ".js", ".svg")
_ASKED, _ANY = b'data-key="asked"', b'data-key="any"'
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304: a new release is seen at once
}


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> _File:
        return cls(content, guess_type(name)[0] or "text/plain", f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def routes(services: Services) -> list[Route]:
    async def page(request: Request) -> Response:
        return _page(await _needs_key(services)).answer(request)

    def file(request: Request) -> Response:
        found = _files().get(request.path_params["name"])
        if found is None:
            return reply_plain({"detail": "There is no such file."}, 404)
        return found.answer(request)

    return [Route("/", page), Route("/web/{name}", file)]


async def _needs_key(services: Services) -> bool:
    """If nobody can say, who knows a key may try it."""
    try:
        return await asyncio.get_running_loop().run_in_executor(services.storing, services.authority.needs_key)
    except (StoreUnavailableError, TimeoutError):
        return True


@cache
def _page(needs_key: bool) -> _File:
    """The page says itself whether it has to ask for a key, so that it need not find out by being refused."""
    content = files(__package__).joinpath(_PAGE).read_bytes()
    return _File.of(_PAGE, content if needs_key else content.replace(_ASKED, _ANY))


@cache
def _files() -> dict[str, _File]:
    """By name, so that no path that is asked for ever reaches the disk."""
    found = (file for file in files(__package__).iterdir() if file.name.endswith(_KINDS))
    return {file.name: _File.of(file.name, file.read_bytes()) for file in found}
