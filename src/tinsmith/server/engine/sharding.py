"""The frozen matrices of every layer in shards over a training group, whole only while they are used.

    ShardedLayers    the shards of this process; gathers layers, and frees them
    Turns            which passes all processes of a group make together

torch's FSDP2 holds the shards, gathers them and frees what it gathered. When it does so is decided here, by a list: all
processes have to gather the same layers in the same order, also one that has no rows for a pass, and one that met an
error in the middle of it. What a process has not gathered by the end of its work, it gathers then, for the others.

Norms, biases, embedding and unembedding are whole everywhere: they are small beside the layers, or wanted all the time.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tinsmith.server.engine.batch import MicroBatch
from tinsmith.server.engine.products import Matrix


class BrokenShardsError(RuntimeError):
    """Nothing can be gathered any more."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            f"The shards of the base model could not be gathered, since a process of the group is lost or does not "
            f"answer ({cause}). The group has to be started again."
        )


class Turns(NamedTuple):
    """How often all go through the layers together: so many passes forward alone, then so many that also go back."""

    num_forward: int
    num_back: int

    @classmethod
    def of(cls, shares: Iterable[Sequence[MicroBatch]]) -> Self:
        """Enough for everybody's micro-batches."""
        numbers = [(len(batches), sum(batch.backward for batch in batches)) for batches in shares]
        return cls(max(total - back for total, back in numbers), max(back for _, back in numbers))

    @property
    def passes(self) -> list[bool]:
        return [False] * self.num_forward + [True] * self.num_back

    def placed(self, batches: Sequence[MicroBatch]) -> list[MicroBatch | None]:
        """One process's own in their passes, of which it may have nothing to do with some."""
        forward, back = ([batch for batch in batches if batch.backward is goes_back] for goes_back in (False, True))
        padded = [
            list(zip_longest(range(number), own))
            for number, own in ((self.num_forward, forward), (self.num_back, back))
        ]
        return [batch for turns in padded for _, batch in turns]


class ShardedLayers:
    """`take` the matrices of each layer when it is loaded. Then, for passes that all processes know of:

        with layers.together(passes):
            layers.next_pass()      before each of them
            layers.enter, leave     around each layer, by the model

    Passes that the others do not know of are `announced` to them first.
    """

    def __init__(self, mesh: Any, wait_for_all: Callable[[], None]) -> None:
        """`mesh` is FSDP2's."""
        self._mesh = mesh
        self.wait_for_all = wait_for_all
        """To be called when all layers were taken: loading may take others longer than anything later."""
        self._layers: list[_Layer] = []
        self.norms: list[float] = []
        """Of each matrix, as this process has read it: what it gathers later is a mixture of what all have read."""
        self._passes: deque[bool] = deque()
        self._steps: deque[int] = deque()
        """Of this pass: the layers that are still to be gathered, in order."""
        self._goes_back = False
        self._whole: int | None = None
        self._is_in_step = False
        self._broken_by: BaseException | None = None
        self.keeps_others_waiting = False
        """Whether there was no memory even for their sake: then only the end of this process tells them."""
        self.announce: Callable[[], None] = lambda: None
        """Called before a pass forward of which the other processes have not been told."""

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def take(self, matrices: Sequence[Matrix]) -> None:
        """Keep a shard of each, of the next layer; from now on they are empty until they are gathered."""
        self.norms += [float(torch.linalg.vector_norm(matrix.plain(), dtype=torch.float64)) for matrix in matrices]
        self._layers.append(_Layer(matrices, self._mesh))

    @property
    def gathered_bytes(self) -> int:
        """What it takes to have a layer whole while the next one comes, which is laid out anew when it is there."""
        return 3 * max(layer.whole_bytes for layer in self._layers)

    @property
    def is_broken(self) -> bool:
        """Whether another process did not give its shards, so that nothing can be gathered any more."""
        return self._broken_by is not None

    # --- which layers, in which order ---

    @property
    def is_in_step(self) -> bool:
        """Whether the others are told of what is being computed."""
        return self._is_in_step

    @contextmanager
    def together(self, passes: Iterable[bool]) -> Iterator[None]:
        """For each pass, whether it goes back, too. All its layers are gathered, whatever is made of them in here."""
        if self._broken_by is not None:
            raise BrokenShardsError(self._broken_by)
        self._passes, self._is_in_step = deque(passes), True
        try:
            yield
        except BaseException as error:
            # They hold what was computed so far, and the others' gathers need room.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            self._is_in_step = False
            if self._broken_by is None:
                self._keep_up()

    @contextmanager
    def announced(self) -> Iterator[None]:
        """A pass forward, of which the others hear now."""
        self.announce()
        with self.together([False]):
            self.next_pass()
            yield

    def next_pass(self) -> None:
        self._finish_pass()
        self._goes_back = self._passes.popleft()
        last = len(self._layers) - 1
        # The last layer stays whole until the way back.
        self._steps = deque([*range(last + 1), *(range(last - 1, -1, -1) if self._goes_back else ())])

    def _keep_up(self) -> None:
        try:
            while self._passes:
                self.next_pass()
            self._finish_pass()
        except torch.OutOfMemoryError as error:
            self._broken_by, self.keeps_others_waiting = error, True
            raise BrokenShardsError(error) from error

    def _finish_pass(self) -> None:
        while self._steps:
            self._gather_next()
        self._free()

    # --- around a layer ---

    def enter(self, index: int, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self._have_whole(index)
        if delta is None or not torch.is_grad_enabled():
            return x, delta  # the first layer has nothing before it to go back to: the end of the pass frees it
        entered: tuple[Tensor, Tensor] = _Enter.apply(x, delta, self)
        return entered

    def leave(self, index: int, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        if not (self._goes_back and index == len(self._layers) - 1):
            self._free()
        if not torch.is_grad_enabled():
            return x, delta
        left: tuple[Tensor, Tensor] = _Leave.apply(x, delta, self, index)
        return left

    def _have_whole(self, index: int) -> None:
        while self._whole != index:
            if not self._steps:
                raise AssertionError(f"layer {index} is not on the list of this pass")
            self._gather_next()

    def _gather_next(self) -> None:
        """Make the next layer of the list whole; the one after it is on its way then."""
        self._free()
        # Sampling computes in inference mode, whose tensors could not be used in training.
        with torch.inference_mode(False), self._noticing_what_breaks():
            self._layers[self._steps[0]].gather()
            self._whole = self._steps.popleft()
            if self._steps:
                self._layers[self._steps[0]].start_gathering()

    def _free(self) -> None:
        if self._whole is not None:
            self._layers[self._whole].free()
            self._whole = None

    @contextmanager
    def _noticing_what_breaks(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise  # nothing of it was lost: it is tried again when there is more room
        except RuntimeError as error:
            self._broken_by = error
            raise BrokenShardsError(error) from error


class _Layer:
    def __init__(self, matrices: Sequence[Matrix], mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        self._matrices = matrices
        weights = [nn.Parameter(matrix.plain(), requires_grad=False) for matrix in matrices]
        self.whole_bytes: int = sum(weight.nbytes for weight in weights)
        module = _Weights(weights)
        del weights
        self._weights: Any = fully_shard(module, mesh=mesh)
        self._let_go()

    def start_gathering(self) -> None:
        self._weights.unshard(async_op=True)

    def gather(self) -> None:
        """Waits for it, if it is on its way."""
        self._weights.unshard()
        for matrix, weight in zip(self._matrices, self._weights.weights, strict=True):
            matrix.hold(weight)

    def free(self) -> None:
        self._let_go()
        self._weights.reshard()

    def _let_go(self) -> None:
        for matrix in self._matrices:
            matrix.let_go()


class _Weights(nn.Module):  # type: ignore[misc]
    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)


class _Enter(torch.autograd.Function):  # type: ignore[misc]
    """What lies before a layer: on the way back, the layer is done with here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, layers: ShardedLayers) -> tuple[Tensor, Tensor]:
        ctx.layers = layers
        ctx.set_materialize_grads(False)
        return x, delta

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, ddelta: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        ctx.layers._free()
        return dx, ddelta, None


class _Leave(torch.autograd.Function):  # type: ignore[misc]
    """What lies behind a layer: on the way back, the layer is needed from here on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, layers: ShardedLayers, index: int) -> tuple[Tensor, Tensor]:
        ctx.layers, ctx.index = layers, index
        ctx.set_materialize_grads(False)
        return x, delta

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, ddelta: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        ctx.layers._have_whole(ctx.index)
        return dx, ddelta, None, None
