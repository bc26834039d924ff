"""Download URLs that carry their own proof: whoever has one may read that one thing until it expires, without a key."""

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
    seconds = str(int(expires.timestamp()))
    signature = call.services.authority.secret.signature(_statement(path, seconds))
    query = urlencode({"expires": seconds, "signature": signature})
    return f"{call.request.base_url}{quote(path, safe='/:')}?{query}"


def check_signature(call: Call, path: str) -> None:
    expires = call.request.query_params.get("expires", "")
    signature = call.request.query_params.get("signature", "")
    if not call.services.authority.secret.has_signed(_statement(path, expires), signature):
        raise status_error(403, "This URL was not made by this server, or was changed. Ask for a new one.")
    if int(expires) < datetime.now(UTC).timestamp():
        raise status_error(403, "This URL has expired. Ask for a new one.")


def _statement(path: str, expires: str) -> str:
    return f"read {path} until {expires}"
