"""How a database written by an earlier release becomes one of this release.

Alembic finds the steps in `versions/`. Each is a plain module that never changes once it was released.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError

from tinsmith.errors import ConfigError


def upgrade(connection: sa.Connection, revision: str = "head") -> None:
    """Bring the database to a revision, by default the newest, within the transaction of `connection`."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        raise ConfigError(
            f"This database was written by a newer Tinsmith ({error}). Upgrade this installation, or use another state "
            "folder or database."
        ) from error
