"""Download URLs that carry their own proof: whoever has one may read that one thing until it expires, without a key.

They end earlier with the key that they were made with, and with what that key may read.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode

from tinsmith.server.routes._call import Call, status_error


def expiry_of_urls(call: Call) -> datetime:
    """When URLs made now expire."""
    lifetime = timedelta(seconds=call.services.config.url_lifetime_seconds)
    return (datetime.now(UTC) + lifetime).replace(microsecond=0)


def signed_url(call: Call, path: str, expires: datetime) -> str:
    """`path` as the route sees it, without a slash in front."""
    key, seconds = call.caller.key, str(int(expires.timestamp()))
    signed = {"key": str(key.key_id) if key else "", "expires": seconds}
    signature = call.services.authority.secret.signature(_statement(path, **signed))
    query = urlencode({**signed, "signature": signature})
    return f"{call.request.base_url}{quote(path, safe='/:')}?{query}"


async def reader_of(call: Call, path: str) -> str:
    """The owner of the key that this URL was made with: what that key may read now, the URL may."""
    key, expires, signature = (call.request.query_params.get(name, "") for name in ("key", "expires", "signature"))
    if not call.services.authority.secret.has_signed(_statement(path, key, expires), signature):
        raise status_error(403, "This URL was not made by this server, or was changed. Ask for a new one.")
    if int(expires) < datetime.now(UTC).timestamp():
        raise status_error(403, "This URL has expired. Ask for a new one.")
    owner = await owner_of_key(call)
    if owner is None:
        raise status_error(403, "The key that this URL was made with was revoked. Ask for a new one with another.")
    return owner


async def owner_of_key(call: Call) -> str | None:
    """Whose key a URL, which `reader_of` has seen, was made with; `None` once it was revoked."""
    key = call.request.query_params["key"]
    return await call.stored(call.services.authority.owner_of, int(key) if key else None)


def _statement(path: str, key: str, expires: str) -> str:
    return f"read {path} with key {key} until {expires}"
