"""Alembic runs this file for every command; the connection comes from `upgrade`."""

from __future__ import annotations

from alembic import context

from tinsmith.server.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
