"""Where snapshots of live models lie: `STATE/snapshots/`, laid out as checkpoints are, one for each model.

They are not checkpoints: nobody can name, load or list them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.store import ids


def snapshot_path(model_id: str, seq_id: int) -> str:
    """That of the model as it was after this operation."""
    return ids.tinker_path(model_id, "weights", str(seq_id))


def tidy_snapshots(root: Path, current: Mapping[str, int]) -> None:
    """Removes what a killed process left: half a snapshot, or the one before. `current` is what the store knows."""
    folders = CheckpointFolders(root)
    folders.tidy()
    known = {folders.folder(snapshot_path(model_id, seq_id)) for model_id, seq_id in current.items()}
    for folder in root.glob("*/weights/*"):
        if folder not in known:
            shutil.rmtree(folder)
    runs = {folder.parent.parent for folder in known}
    for run in root.glob("*"):
        if run not in runs:
            shutil.rmtree(run)
