"""Work beside the main stream is done when it has to be, on what was there when it was asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.server.engine.gpu.devices import DEVICE
from tinsmith.server.engine.gpu.aside import Aside

SIZE = 2**22
ROUNDS = 6


def add_slowly(total: Tensor, value: Tensor) -> None:
    for _ in range(50):
        total += value / 50


def test_all_is_there_afterwards_though_what_it_read_was_given_back() -> None:
    total = torch.zeros(SIZE, device=DEVICE)
    with Aside(total.device) as aside:
        for number in range(ROUNDS):
            value = torch.full((SIZE,), float(number), device=DEVICE)
            aside.do(lambda value: add_slowly(total, value), value)
            del value
            torch.full((SIZE,), float("nan"), device=DEVICE)  # where the memory was given back, it lies there now
            aside.end_round()
    assert torch.allclose(total, torch.full_like(total, float(sum(range(ROUNDS)))))


def test_it_is_done_before_what_comes_after_an_error() -> None:
    total, value = torch.zeros(SIZE, device=DEVICE), torch.ones(SIZE, device=DEVICE)

    def work() -> None:
        with Aside(total.device) as aside:
            aside.do(lambda value: add_slowly(total, value), value)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert torch.allclose(total, value)
