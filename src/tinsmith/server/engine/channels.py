"""The ways between the processes of a training group: messages and tensors, each wait with an end.

    open_meeting, find_meeting    where the processes of a group find each other
    Group                         what they have in common, once all of them are there
    Channel                       from this process to another one and back

The processes trust each other, and whoever can reach the addresses that they listen at could join: those of one machine
for a group on one machine, those of a network of its own for others.

Messages and tensors on the host go through gloo. Tensors of a GPU go through NCCL where the group has it, and otherwise
through the host. Receivers know what comes next: of a tensor they were told in a message before it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tinsmith.errors import ConfigError
from tinsmith.server.engine.engine import choose_device

Backend = Literal["gloo", "nccl"]

_FOREVER = timedelta(days=3650).total_seconds()
_POLL_SECONDS = 0.0005
_NO_MESSAGE = 0
"""As a length: the sender only says that it is there."""


class LostPeerError(RuntimeError):
    """Another process of the group is gone, or does not answer. The group cannot be used any more."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"Rank {rank} of the training group is lost: {why}. The group has to be started again.")
        self.rank = rank


def choose_backend(device: str, size: int) -> Backend:
    """For a group of which `size` processes are on this machine, each with a GPU of its own, if it has one at all."""
    if choose_device(device).type != "cuda":
        return "gloo"
    if torch.cuda.device_count() < size:
        raise ConfigError(
            f"A training group of {size} processes needs as many GPUs, and torch finds {torch.cuda.device_count()}; "
            "start it with fewer --train-workers, or with --device cpu."
        )
    return "nccl"


def open_meeting(host: str, *, seconds: float) -> Any:
    """The store in which the processes of a group find each other, held by the leader; its `port` is any free one."""
    # Left to itself, the store would listen to all networks of this machine.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


def find_meeting(host: str, port: int, *, seconds: float) -> Any:
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))


def gloo_options(host: str, seconds: float) -> Any:
    """For a process that listens at one address alone; left to itself, gloo would take any."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=seconds)
    return options


class Group:
    def __init__(
        self, meeting: Any, rank: int, size: int, host: str, backend: Backend = "gloo", *, seconds: float
    ) -> None:
        """Returns when all are there; `seconds` is how long that may take, the loading of models included.

        `host` is the address at which the others find this process.
        """
        on_host = gloo_options(host, seconds)
        self._by_device = {"cpu": dist.ProcessGroupGloo(dist.PrefixStore("gloo", meeting), rank, size, on_host)}
        if backend == "nccl":
            on_gpus = dist.ProcessGroupNCCL.Options()
            on_gpus._timeout = timedelta(seconds=seconds)
            self._by_device["cuda"] = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", meeting), rank, size, on_gpus)

    def carries(self, tensor: Tensor) -> bool:
        """Whether it can travel as it is."""
        return tensor.device.type in self._by_device

    def start_sending(self, tensor: Tensor, rank: int) -> Any:
        return self._by_device[tensor.device.type].send([tensor], rank, 0)

    def start_receiving(self, tensor: Tensor, rank: int) -> Any:
        return self._by_device[tensor.device.type].recv([tensor], rank, 0)


class Channel:
    """What is sent is on its way until `settle`.

    A transfer is over when both sides have asked for it: if both settle before they receive, both wait.

    `seconds` is how long the other side may be silent while it works; without it, as long as there is a connection.
    """

    def __init__(self, group: Group, rank: int, *, seconds: float | None = None) -> None:
        self.rank = rank
        self._group = group
        self._seconds = _FOREVER if seconds is None else seconds
        self._sending: list[tuple[Any, Tensor]] = []

    def send(self, message: bytes) -> None:
        self._start(torch.tensor([len(message)]))
        self._start(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def send_tensor(self, tensor: Tensor) -> None:
        self._start(tensor if self._group.carries(tensor) else tensor.cpu())

    def beat(self) -> None:
        """Says that we are still at it."""
        self._start(torch.tensor([_NO_MESSAGE]))

    def receive(self, on_beat: Callable[[], None] = lambda: None) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self._receive_into(length)
        while length.item() == _NO_MESSAGE:
            on_beat()
            self._receive_into(length)
        body = torch.empty(int(length), dtype=torch.uint8)
        self._receive_into(body)
        return bytes(body.numpy())

    def receive_tensor(self, into: Tensor) -> None:
        if self._group.carries(into):
            self._receive_into(into)
            return
        received = torch.empty_like(into, device="cpu")
        self._receive_into(received)
        into.copy_(received)

    def settle(self) -> None:
        """Until the other side has taken everything that was sent."""
        while self._sending:
            self._finish(*self._sending.pop(0))

    def _start(self, tensor: Tensor) -> None:
        self._sending.append((self._asked(self._group.start_sending, tensor), tensor))

    def _receive_into(self, tensor: Tensor) -> None:
        self._finish(self._asked(self._group.start_receiving, tensor), tensor)

    def _asked(self, operation: Callable[[Tensor, int], Any], tensor: Tensor) -> Any:
        try:
            return operation(tensor, self.rank)
        except RuntimeError as error:
            raise LostPeerError(self.rank, "its connection is closed") from error

    def _finish(self, work: Any, tensor: Tensor) -> None:
        started = time.monotonic()
        try:
            if tensor.is_cuda:
                self._poll(work, started + self._seconds)
            else:
                work.wait(timedelta(seconds=self._seconds))
        except RuntimeError as error:
            was_silent = time.monotonic() - started >= self._seconds
            why = f"it has been silent for {self._seconds:g} s" if was_silent else "its connection is closed"
            raise LostPeerError(self.rank, why) from error

    def _poll(self, work: Any, deadline: float) -> None:
        """NCCL has no wait that ends: its own puts the device in line, and a timer of its own kills the process."""
        while not work.is_completed():
            if time.monotonic() >= deadline:
                raise RuntimeError("NCCL did not complete a transfer")
            time.sleep(_POLL_SECONDS)
        work.wait()
