"""The whole API in one table."""

from __future__ import annotations

from tinsmith.server import routes
from tinsmith.server.openai import completions as openai
from tinsmith.server.routes._call import Endpoint

ENDPOINTS: tuple[Endpoint, ...] = (*routes.ENDPOINTS, *openai.ENDPOINTS)
