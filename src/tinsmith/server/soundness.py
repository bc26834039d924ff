"""Whether an engine works: some errors of a GPU stay until the process ends, and weights may not fit their config."""

from __future__ import annotations

import numpy as np

from tinsmith.server.engine.adapters import AdapterSpec
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.engine import Engine


class BrokenEngineError(RuntimeError):
    """The engine fails at everything. Only a new process helps."""


def try_engine(engine: Engine) -> None:
    """A forward and backward pass over one token, with whatever error that gives."""
    adapter = engine.create_adapter(AdapterSpec(rank=1, seed=0))
    token, weight = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.float32)
    engine.forward_backward([TrainRow(adapter, token, "cross_entropy", {"target_tokens": token, "weights": weight})])


def check_engine(engine: Engine) -> None:
    """To be called after an error that should not be: whether it was the job's alone, or the engine is lost."""
    try:
        try_engine(engine)
    except Exception as error:
        raise BrokenEngineError(f"The engine does not work any more: {error}") from error
