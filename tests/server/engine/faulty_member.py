"""A member of a training group as it is, with an engine in which certain tokens are deadly, or only bad luck."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from tinsmith.server import member_process
from tinsmith.server.engine import engine as engine_module
from tinsmith.server.engine.batch import MicroBatch
from tinsmith.server.engine.channels import LostPeerError
from tinsmith.server.messages import MemberSettings

FAILS, IS_KILLED, STOPS, FILLS_MEMORY = 91, 92, 93, 94
"""Tokens at the head of a row; the last one does so in micro-batches of more than 300 tokens."""

real = engine_module.run_micro_batch


def run_micro_batch(model: Any, batch: MicroBatch, **options: Any) -> Any:
    done = real(model, batch, **options)
    for token in {int(example.tokens[0]) for example in batch.examples}:
        if token == FAILS:
            raise RuntimeError("broken")
        if token == IS_KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if token == STOPS:
            os.kill(os.getpid(), signal.SIGSTOP)
        if token == FILLS_MEMORY and batch.num_tokens > 300:
            raise torch.OutOfMemoryError("full")
    return done


def live(settings: MemberSettings) -> None:
    engine_module.run_micro_batch = run_micro_batch
    try:
        member_process.run(settings)
    except LostPeerError:
        os._exit(1)
