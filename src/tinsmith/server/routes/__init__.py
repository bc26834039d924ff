"""The API, one file per noun and one short function per endpoint: decode, check, store, reply."""

from __future__ import annotations

from tinsmith.server.routes import (
    admin,
    checkpoints,
    curves,
    dashboard,
    exports,
    futures,
    imports,
    models,
    runs,
    sampling,
    service,
    sessions,
    training,
    weights,
)
from tinsmith.server.routes._call import Endpoint

ENDPOINTS: tuple[Endpoint, ...] = (
    *service.ENDPOINTS,
    *sessions.ENDPOINTS,
    *models.ENDPOINTS,
    *training.ENDPOINTS,
    *weights.ENDPOINTS,
    *sampling.ENDPOINTS,
    *futures.ENDPOINTS,
    *runs.ENDPOINTS,
    *checkpoints.ENDPOINTS,
    *exports.ENDPOINTS,
    *imports.ENDPOINTS,
    *admin.ENDPOINTS,
    *curves.ENDPOINTS,
    *dashboard.ENDPOINTS,
)
