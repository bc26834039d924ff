"""One linear layer, many adapters: each adapter adds its low-rank product to its own rows of a packed batch.

    Site        what one adapter adds to one (possibly fused) linear layer
    LoraRows    which rows of a packed batch use which adapter
    linear      x W^T + b, and scale * (x A^T) B^T on the rows of each adapter

A layer that computes several projections of one input at once (q, k and v; gate and up) is one site: the A matrices of
its parts lie on top of each other and make one product; each part has its own B.

Gradients of A and B are added to the adapter's float32 buffers during the backward pass itself. Autograd sees only the
activations, so a batch of many adapters costs no bookkeeping per tensor.

Letters: T rows of the batch, P parts of a site, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from tinsmith.server.engine.products import Matrix
from tinsmith.server.engine.steps import has_kernels

# One product with all adapters at once, most of it masked away, costs less than a few small products for each adapter
# as long as rows times their mean rank stay below this. Measured on a CPU with 2 to 32 adapters of rank 8 and 32;
# decoding is mostly below, training far above.
STACKED_BELOW = {torch.float32: 512, torch.bfloat16: 4096}

FEW_ROWS = 64

# It wants a gradient and never gets one: so autograd records the first adapted layer, whose input (frozen embeddings)
# wants none, without computing a gradient for that input.
RECORDED = torch.zeros((), requires_grad=True)


@dataclass(frozen=True, eq=False)
class Site:
    """The weights of one adapter at one linear layer, in the dtype of the products, and where its gradients go."""

    a: Tensor  # [P * r, in]
    b: tuple[Tensor, ...]  # P of [out of the part, r]
    scale: float
    grad_a: Tensor | None = None  # float32, shaped as a
    grad_b: tuple[Tensor, ...] | None = None

    @property
    def rank(self) -> int:
        rank: int = self.b[0].shape[1]
        return rank

    @cached_property
    def packed(self) -> _Packed:
        """Of a frozen adapter, for decoding."""
        return _Packed(self)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Of A, its gradient, the B of up to three parts and their gradients, 0 for none: what kernels go by."""
        grads = self.grad_b or ()
        grad_a = 0 if self.grad_a is None else self.grad_a.data_ptr()
        b, grad_b = ([part.data_ptr() for part in parts] + [0] * (3 - len(parts)) for parts in (self.b, grads))
        return (self.a.data_ptr(), grad_a, *b, *grad_b)


class _Packed:
    """A site as two products: A with the scale, and the B of all parts as one matrix with zeros between them."""

    def __init__(self, site: Site) -> None:
        self.a = Matrix(site.a * site.scale)
        self.b = Matrix(torch.block_diag(*site.b))

    def product(self, x: Tensor) -> Tensor:
        return self.b.product(self.a.product(x))


class HasSites(Protocol):
    """An adapter: live (with gradients) or a frozen copy."""

    @property
    def sites(self) -> Mapping[str, Site]: ...


Placed: TypeAlias = tuple[int, int, Site]
"""Rows from start to end, and what their adapter adds at the layer in question."""

Segment: TypeAlias = tuple[int, int, HasSites | None]
"""Rows from start to end use this adapter; None is the base model."""


class LoraRows:
    """Which rows of a packed batch use which adapter; rows of one adapter lie together."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segment for segment in segments if segment[2] is not None)
        self.num_rows = segments[-1][1] if segments else 0
        self.sites = [(start, end, adapter.sites) for start, end, adapter in self.segments if adapter is not None]
        self._stacks: dict[str, _Stack] = {}
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._book: Any = None

    def regrouped(self, segments: Sequence[Segment]) -> LoraRows:
        """The same adapters, in the same order, over other rows: what was prepared for them is kept."""
        rows = LoraRows(segments)
        if [id(sites) for _, _, sites in rows.sites] == [id(sites) for _, _, sites in self.sites]:
            rows._stacks = self._stacks
        return rows

    def slice(self, start: int, end: int) -> LoraRows:
        """The part of these rows that a chunk of the batch needs, counted from its own beginning."""
        cut = [(max(first, start) - start, min(last, end) - start, adapter) for first, last, adapter in self.segments]
        part = LoraRows([(first, last, adapter) for first, last, adapter in cut if first < last])
        part._book = self._book
        return part

    def additions(self, name: str, x: Tensor) -> Additions | None:
        """What the adapters add to a layer with the input x; None if nothing."""
        at = self.at(name)
        if not at:
            return None
        grouped: Additions | None = self.grouped(name, x)
        return Looped(at) if grouped is None else grouped

    def grouped(self, name: str, x: Tensor) -> Any:
        """The same for the kernels of a GPU, which take all adapters at once; None where others are to be used.

        In float32 they would do without tensor cores, which the libraries know how to do better.
        """
        if not (x.is_cuda and has_kernels()) or x.dtype == torch.float32:
            return None
        return self.book(x.device).grouped(name, self.sites)

    def book(self, device: torch.device) -> Any:
        """Where the matrices of the adapters lie, for the kernels of a GPU."""
        if self._book is None:
            from tinsmith.server.engine.gpu.lora import AddressBook

            self._book = AddressBook([sites for _, _, sites in self.sites], device)
        return self._book

    def of_all_rows(self) -> Mapping[str, Site] | None:
        """What the one adapter of all rows adds, if there is one."""
        if len(self.sites) != 1 or self.sites[0][:2] != (0, self.num_rows):
            return None
        return self.sites[0][2]

    def at(self, name: str) -> list[Placed]:
        return [(start, end, sites[name]) for start, end, sites in self.sites if name in sites]

    def stack(self, name: str) -> _Stack:
        if name not in self._stacks:
            self._stacks[name] = _Stack([site for _, _, site in self.at(name)])
        return self._stacks[name]

    def mask(self, num_rows: int, stack: _Stack, at: Sequence[Placed]) -> Tensor:
        """Layers with the same adapters share their mask: making it anew would cost more than the products."""
        key = (num_rows, len(stack.parts), *(number for start, _, site in at for number in (start, site.rank)))
        if key not in self._masks:
            self._masks[key] = stack.mask(num_rows, at)
        return self._masks[key]


class RowsOnDevice(Protocol):
    """Another way to say which rows use which adapter: for decoding on a GPU, where the host does not know."""

    def linear(self, x: Tensor, matrix: Matrix, name: str) -> Tensor:
        """As `linear` below."""

    def gated_silu(self, x: Tensor, gate_up: Matrix, name: str) -> Tensor:
        """silu(gate) * up of the two parts of a linear layer: [T, in] -> [T, F]"""

    def turned_heads(
        self,
        x: Tensor,
        qkv: Matrix,
        name: str,
        num_q: int,
        num_kv: int,
        weight: Tensor | None,
        eps: Tensor,
        turn: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, K, D], as `steps.turn_heads` makes them of a linear layer's output."""


AnyRows: TypeAlias = LoraRows | RowsOnDevice


def linear(x: Tensor, matrix: Matrix, lora: AnyRows | None, name: str) -> Tensor:
    """The frozen layer for all rows, plus what each adapter adds to its own: [T, in] -> [T, out]."""
    if lora is not None and not isinstance(lora, LoraRows):
        return lora.linear(x, matrix, name)
    at = [] if lora is None else lora.at(name)
    is_live = bool(at) and at[0][2].grad_a is not None
    if torch.is_grad_enabled() and (is_live or x.requires_grad):
        recorded: Tensor = _LoraLinear.apply(x, RECORDED, matrix, lora, name)
        return recorded
    y = matrix.product(x)
    if lora is None or not at:
        return y
    if (grouped := lora.grouped(name, x)) is not None:
        grouped.add(y, x)
    elif not is_live and _is_alone(x, at):
        y += at[0][2].packed.product(x)
    # Frozen adapters were found finite. In one product a NaN of a live one would spread: zero times NaN is NaN.
    elif not is_live and _is_small(x, at):
        stack = lora.stack(name)
        add_stacked(y, x, stack, lora.mask(x.shape[0], stack, at))
    else:
        add_looped(y, x, at)
    return y


def _is_alone(x: Tensor, at: Sequence[Placed]) -> bool:
    """Whether one adapter adds to all of a few rows."""
    start, end, _ = at[0]
    return start == 0 and end == x.shape[0] <= FEW_ROWS


def _is_small(x: Tensor, at: Sequence[Placed]) -> bool:
    total_rank = sum(site.rank for _, _, site in at)
    return len(at) > 1 and len(x) * total_rank < STACKED_BELOW.get(x.dtype, 0) * len(at)


def add_looped(y: Tensor, x: Tensor, at: Sequence[Placed]) -> list[Tensor]:
    """Add each adapter's product to its rows of y, one adapter after the other; returns the scaled x A^T of each."""
    inner = []
    for start, end, site in at:
        xa = torch.mm(x[start:end], site.a.t()).mul_(site.scale)
        for part, (columns, b) in enumerate(_parts(site)):
            y[start:end, columns].addmm_(_of_part(xa, part, site.rank), b.t())
        inner.append(xa)
    return inner


def add_stacked(y: Tensor, x: Tensor, stack: _Stack, mask: Tensor) -> None:
    """The same sum as `add_looped` in one product for A and one for each part of B, for batches of few rows."""
    xa = torch.mm(x, stack.a.t()).mul_(mask)
    for part, (columns, b) in enumerate(stack.parts):
        y[:, columns].addmm_(_of_part(xa, part, b.shape[1]), b.t())


class _Stack:
    """Several adapters of one site side by side: the columns of each part lie together, adapter after adapter."""

    def __init__(self, sites: Sequence[Site]) -> None:
        num_parts = len(sites[0].b)
        self.a = torch.cat([site.a.unflatten(0, (num_parts, site.rank)) for site in sites], dim=1).flatten(0, 1)
        b = [torch.cat(parts, dim=1) for parts in zip(*(site.b for site in sites), strict=True)]
        self.parts = list(zip(_columns(b), b, strict=True))

    def mask(self, num_rows: int, at: Sequence[Placed]) -> Tensor:
        """The scale where a row meets its own adapter, zero elsewhere: [T, P * sum of ranks]."""
        num_parts = len(self.parts)
        mask = self.a.new_zeros(num_rows, num_parts, self.a.shape[0] // num_parts)
        first = 0
        for start, end, site in at:
            mask[start:end, :, first : first + site.rank] = site.scale
            first += site.rank
        return mask.flatten(1)


class Additions(Protocol):
    """What adapters add to one layer of a packed batch, and the way back."""

    def add(self, y: Tensor, x: Tensor) -> list[Tensor]:
        """Add to y [T, out] what the adapters make of x [T, in]; returns what the way back needs."""

    def add_gradients(self, x: Tensor, inner: Sequence[Tensor], dy: Tensor, dx: Tensor | None) -> None:
        """Add the gradients of A and B to the adapters' buffers, and that of x, if it is wanted, to dx."""


class Looped:
    """One adapter after the other."""

    def __init__(self, at: Sequence[Placed]) -> None:
        self._at = at

    def add(self, y: Tensor, x: Tensor) -> list[Tensor]:
        return add_looped(y, x, self._at)

    def add_gradients(self, x: Tensor, inner: Sequence[Tensor], dy: Tensor, dx: Tensor | None) -> None:
        for (start, end, site), xa in zip(self._at, inner, strict=True):
            dxa = add_gradients(site, x[start:end], xa, dy[start:end])
            if dx is not None:
                dx[start:end].addmm_(dxa, site.a)


class _LoraLinear(torch.autograd.Function):  # type: ignore[misc]
    """`linear` with its backward pass written out: W needs no gradient, and those of A and B go to their buffers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, matrix: Matrix, lora: LoraRows | None, name: str) -> Tensor:
        y = matrix.product(x)
        # After the product, which keeps a GPU busy meanwhile.
        additions = lora.additions(name, x) if lora else None
        ctx.save_for_backward(*([x, *additions.add(y, x)] if additions else ()))
        ctx.matrix = matrix
        ctx.additions = additions
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        dx = ctx.matrix.gradient(dy) if ctx.needs_input_grad[0] else None
        if ctx.additions:
            x, *inner = ctx.saved_tensors
            ctx.additions.add_gradients(x, inner, dy, dx)
        return dx, None, None, None, None


def add_gradients(site: Site, x: Tensor, xa: Tensor, dy: Tensor) -> Tensor:
    """Add dA and dB to the adapter's buffers; returns the scaled gradient of x A^T, from which dx follows."""
    assert site.grad_a is not None
    assert site.grad_b is not None
    dxa = torch.empty_like(xa)
    for part, ((columns, b), grad_b) in enumerate(zip(_parts(site), site.grad_b, strict=True)):
        dy_part = dy[:, columns]
        _of_part(dxa, part, site.rank).copy_(torch.mm(dy_part, b))
        _accumulate(grad_b, dy_part.t(), _of_part(xa, part, site.rank))
    dxa.mul_(site.scale)
    _accumulate(site.grad_a, dxa.t(), x)
    return dxa


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))


def _parts(site: Site) -> Iterator[tuple[slice, Tensor]]:
    return zip(_columns(site.b), site.b, strict=True)


def _columns(b: Sequence[Tensor]) -> Iterator[slice]:
    """Where the outputs of each part lie among those of the fused layer."""
    first = 0
    for part in b:
        yield slice(first, first + part.shape[0])
        first += part.shape[0]


def _of_part(xa: Tensor, part: int, rank: int) -> Tensor:
    return xa[:, part * rank : (part + 1) * rank]
