"""The product of the halves of a triangle multiplication, also if each process holds some rows or columns of them.

The product of a channel needs the whole matrices of this channel and of no other. So an all-to-all exchanges rows for channels,
each process multiplies whole matrices of its channels as one GPU does, and another all-to-all exchanges channels for rows.
Outgoing and incoming edges, rows and columns differ in nothing but the order of axes.

A process sends 3 (P - 1) / P^2 of what one channels-first tensor of z's size takes, and receives as much. If the half b went
round in a ring, that would be (P - 1) / P, and for incoming edges one exchange or one sum over processes more.

Channels go in slices: while one slice is multiplied, the next one is received and the one before is sent back. So the memory
beside the process's share is that of the buffers of two slices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evoattn.core.devices import uncast
from evoattn.dispatch.autograd import once_differentiable
from evoattn.dispatch.distributed import Split
from evoattn.pair.checking import WIDENS

_SIDES = 8
"""The sides of the squares are multiples of this: batched products of other sides take up to five times as long."""

_SLICES, _SLICE_BYTES = 4, 1 << 26
"""At most so many slices, and so many bytes of a half in each at least: each slice costs the host three collectives.

Two H200 took 34, 38, 41 and 58 ms for a training step of a block of 1,024 residues in 1, 2, 4 and 8 slices, and 165, 161, 160
and 162 ms at 2,048, where a slice is four times as large. In one slice a process held 1.17 halves of one GPU's memory at 1,024.
"""

Finish = Callable[[], Tensor]
"""Waits for an exchange that was started, and returns what was received."""


def side(length: int) -> int:
    """The side of the squares for so many residues."""
    return length + -length % _SIDES


def _multiply(a: Tensor, b: Tensor, *, outgoing: bool) -> Tensor:
    """t[i,j] = sum over k of a[i,k] b[j,k] (outgoing) or a[k,i] b[k,j]. In float32 for float16, which cannot hold the sums."""
    a, b = (a, b.mT) if outgoing else (a.mT, b)
    return _multiply_wide(a, b) if a.dtype == torch.float16 else torch.bmm(a, b)


def _multiply_wide(a: Tensor, b: Tensor) -> Tensor:
    """The product of 16-bit matrices in float32."""
    has_kernel = a.is_cuda and WIDENS
    return torch.bmm(a, b, out_dtype=torch.float32) if has_kernel else torch.bmm(a.float(), b.float())


def _multiply_backward(dt: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, *, outgoing: bool) -> None:
    """Write the gradients of a and b.

    dt is float32 for float16 halves, as t is: where t leaves the range of float16, dt has fewer digits there, or none. So each
    matrix is multiplied by a power of two that brings its largest entry to 2^14, and the products are divided by it.
    """
    if dt.dtype != a.dtype:
        largest = dt.abs().amax((-2, -1), keepdim=True).clamp(min=2.0**-100)
        scale = torch.exp2(14 - largest.log2().ceil())
        dt = (dt * scale).to(a.dtype)
        pairs = ((dt, b), (dt.mT, a)) if outgoing else ((b, dt.mT), (a, dt))
        for out, pair in zip((da, db), pairs, strict=True):
            out.copy_(_multiply_wide(*pair) / scale)
    elif outgoing:
        torch.bmm(dt, b, out=da)
        torch.bmm(dt.mT, a, out=db)
    else:
        torch.bmm(b, dt.mT, out=da)
        torch.bmm(a, dt, out=db)


def forward(ab: Tensor, split: Split | None, *, outgoing: bool, save: bool) -> tuple[Tensor, list[Tensor]]:
    """Multiply halves.

    Args:
        ab: channels of both halves, a first, `[2 D, B, I, J]`, contiguous.
        split: how rows or columns of z `[B, I, J, C]` lie on the processes. None: ab has squares.
        outgoing: whether a[i,k] b[j,k] is summed over k, or a[k,i] b[k,j].
        save: whether the squares are wanted for the backward.

    Returns:
        The product `[D, B, I, J]` of this process's rows or columns, in float32 for float16. Then, for the backward, ab. With a
        split: for each slice of channels the squares a and b `[channels of this process, B, S, S]` that were multiplied, with
        S >= length.
    """
    if split is None:
        t = _multiply(*_halves(ab), outgoing=outgoing).view(-1, *ab.shape[1:])
        return t, [ab] if save else []
    a, b = ab.chunk(2)
    t = torch.empty_like(a, dtype=torch.float32 if ab.dtype == torch.float16 else ab.dtype)
    saved: list[Tensor] = []
    slices = _slices(a, split)
    coming = [_to_squares(x[slices[0]], split) for x in (a, b)]
    going: list[Finish] = []
    for here, following in itertools.zip_longest(slices, slices[1:]):
        squares = [finish() for finish in coming]
        if following is not None:
            coming = [_to_squares(x[following], split) for x in (a, b)]
        products = _multiply(*(x.flatten(0, 1) for x in squares), outgoing=outgoing).view(squares[0].shape)
        _finish(going)
        going = [_to_parts(products, t[here], split)]
        if save:
            saved += squares
    _finish(going)
    return t, saved


def backward(dt: Tensor, saved: Sequence[Tensor], split: Split | None, *, outgoing: bool) -> Tensor:
    """The gradient of the halves `[2 D, B, I, J]`, from that of the product, `[D, B, I, J]` in the dtype of the product."""
    if split is None:
        (ab,) = saved
        dab = torch.empty_like(ab)
        _multiply_backward(dt.flatten(0, 1), *_halves(ab), *_halves(dab), outgoing=outgoing)
        return dab
    dt = dt.contiguous()
    dab = dt.new_empty(2 * dt.shape[0], *dt.shape[1:], dtype=saved[0].dtype)
    da, db = dab.chunk(2)
    slices = _slices(dt, split)
    coming = _to_squares(dt[slices[0]], split)
    going: list[Finish] = []
    for here, following, a, b in itertools.zip_longest(slices, slices[1:], saved[::2], saved[1::2]):
        square = coming()
        if following is not None:
            coming = _to_squares(dt[following], split)
        gradients = torch.empty_like(a), torch.empty_like(b)
        _multiply_backward(*(x.flatten(0, 1) for x in (square, a, b, *gradients)), outgoing=outgoing)
        _finish(going)
        going = [_to_parts(x, half[here], split) for x, half in zip(gradients, (da, db), strict=True)]
    _finish(going)
    return dab


def multiply_exchanged(ab: Tensor, split: Split, *, outgoing: bool) -> Tensor:
    """`forward`, which autograd differentiates."""
    return _Product.apply(ab, split, outgoing)  # type: ignore[no-untyped-call, no-any-return]


class _Product(torch.autograd.Function):
    """The product t of halves ab."""

    @staticmethod
    def forward(ctx: Any, ab: Tensor, split: Split, outgoing: bool) -> Tensor:
        with uncast(ab.device):
            t, saved = forward(ab.contiguous(), split, outgoing=outgoing, save=ctx.needs_input_grad[0])
        ctx.save_for_backward(*saved)
        ctx.split, ctx.outgoing = split, outgoing
        return t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dt: Tensor) -> tuple[Tensor, None, None]:
        saved = ctx.saved_tensors
        with uncast(dt.device):
            return backward(dt, saved, ctx.split, outgoing=ctx.outgoing), None, None


def _halves(ab: Tensor) -> tuple[Tensor, Tensor]:
    """The halves a and b of `[2 D, B, P, P]`, as batches of squares."""
    a, b = ab.flatten(0, 1).chunk(2)
    return a, b


def _finish(going: list[Finish]) -> None:
    for finish in going:
        finish()


def _slices(x: Tensor, split: Split) -> list[slice]:
    """Ranges of the channels of parts x `[D, B, I, J]`, the same on all processes. Each process gets channels of each range, if
    there are as many as processes.
    """
    channels, lengths = x.shape[0], split.sizes(split.length)
    half = channels * x.shape[1] * split.length * lengths[0] * x.element_size()  # of the process that holds most
    count = max(1, min(_SLICES, channels // len(lengths), half // _SLICE_BYTES))
    ends = [channels * n // count for n in range(count + 1)]
    return [slice(*ends) for ends in itertools.pairwise(ends)]


def _to_squares(x: Tensor, split: Split) -> Finish:
    """Start to exchange the parts x `[d, B, I, J]`, of some channels d, for squares of the channels of this process."""
    channels, lengths = split.sizes(x.shape[0]), split.sizes(split.length)
    mine, line = channels[split.rank], x.shape[1] * split.length
    received = x.new_empty(mine * line * split.length)
    counts = [mine * line * length for length in lengths]
    sent = [count * line * lengths[split.rank] for count in channels]
    wait = _start(received, x.reshape(-1), counts, sent, split)

    def finish() -> Tensor:
        wait()
        sides = side(split.length)
        make = x.new_empty if sides == split.length else x.new_zeros  # what lies outside counts in sums
        square = make(mine, x.shape[1], sides, sides)
        for part, place in _runs(square, received, split):
            place.copy_(part)
        return square

    return finish


def _to_parts(square: Tensor, out: Tensor, split: Split) -> Finish:
    """Start to exchange squares of the channels of this process for its parts `out` of all of these channels, contiguous."""
    channels, lengths = split.sizes(out.shape[0]), split.sizes(split.length)
    mine, line = channels[split.rank], out.shape[1] * split.length
    sent = square.new_empty(mine * line * split.length)
    for part, place in _runs(square, sent, split):
        part.copy_(place)
    counts = [count * line * lengths[split.rank] for count in channels]
    parts = [mine * line * length for length in lengths]
    wait = _start(out.view(-1), sent, counts, parts, split)

    def finish() -> Tensor:
        wait()
        return out

    return finish


def _start(received: Tensor, sent: Tensor, counts: list[int], parts: list[int], split: Split) -> Callable[[], object]:
    """Start an all-to-all, and return what waits for it. torch.compile takes none that is only started."""
    if torch.compiler.is_compiling():
        dist.all_to_all_single(received, sent, counts, parts, split.group)
        return lambda: None
    work: Any = dist.all_to_all_single(received, sent, counts, parts, split.group, async_op=True)
    return work.wait  # type: ignore[no-any-return]


def _runs(square: Tensor, buffer: Tensor, split: Split) -> list[tuple[Tensor, Tensor]]:
    """The parts of all processes in a buffer, and their places in squares `[d, B, S, S]`, as tensors of the same shape.

    Processes with parts of one size make one pair, so two copies move all parts.
    """
    axis = split.axis + 1  # squares have no axis of channels
    inside = square[..., : split.length, : split.length]
    pairs, first, done = [], 0, 0
    for size, ranks in itertools.groupby(size for size in split.sizes(split.length) if size):
        count = len(list(ranks))
        place = inside.narrow(axis, first, count * size).unflatten(axis, (count, size))
        shape = list(place.shape)
        del shape[axis - 1]
        numbers = count * math.prod(shape)
        pairs.append((buffer[done : done + numbers].view(count, *shape).movedim(0, axis - 1), place))
        first, done = first + count * size, done + numbers
    return pairs
