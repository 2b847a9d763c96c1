"""The base of layers that update a pair representation, which may be a DTensor that is split by rows or by columns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from evoattn.dispatch.checks import check_mask
from evoattn.dispatch.distributed import Split, is_distributed
from evoattn.nn.attention import add_residual, check_in_place, check_input, dropout_mask, part_of_mask
from evoattn.nn.initial import Layer
from evoattn.nn.project import compute_dtype_of
from evoattn.nn.sharded import run_split


class Epilogue(NamedTuple):
    """Dropout and residual of one call.

    Args:
        dropout_mask: one that a client has drawn, for all processes if z is a DTensor. None: the layer draws its own.
        residual: whether the update is added to z.
        in_place: whether z is overwritten.
    """

    dropout_mask: Tensor | None
    residual: bool
    in_place: bool


class PairLayer(Layer):
    """A layer with `dropout` and `residual`. A subclass has `_run` and `_inputs`.

    `_run` takes z, its mask, a split, an `Epilogue` and options. It returns the output of a process that holds all of z (the
    split is None), or the rows or columns of a split. `_inputs` are the first projections, which decide the products' dtype.
    """

    _run: Callable[..., Tensor]
    _inputs: Any

    def __init__(self, dropout: float, residual: bool) -> None:
        super().__init__()
        self.dropout, self.residual = dropout, residual

    def add_to(self, z: Tensor, mask: Tensor | None, drawn: Tensor | None, *, in_place: bool, **options: Any) -> Tensor:
        """z + update, whatever `residual` says, for a block of a client. The arguments are not checked; see `Epilogue`."""
        return self._compute(z, mask, Epilogue(drawn, True, in_place), **options)

    @property
    def _shared(self) -> int:
        """The axis of z along which all entries are dropped together."""
        return -3

    def _check(self, z: Tensor, mask: Tensor | None, channels: int, in_place: bool) -> None:
        """Raise TypeError or ValueError for a z or mask of another type or shape, or a z that cannot be overwritten."""
        check_input("z", z, 3, channels, distributed=True)
        if z.shape[-2] != z.shape[-3]:
            raise ValueError(f"z must be [*, L, L, {z.shape[-1]}], the same L twice, got shape {list(z.shape)}")
        check_mask("mask", mask, tuple(z.shape[:-1]))
        if in_place:
            check_in_place(self, "z", z, compute_dtype_of(z, *self._inputs))

    def _compute(self, z: Tensor, mask: Tensor | None, epilogue: Epilogue, **options: Any) -> Tensor:
        if is_distributed(z) or is_distributed(mask):
            epilogue = Epilogue(
                epilogue.dropout_mask, epilogue.residual, in_place=False
            )  # torch.compile of torch 2.7 traces no `_replace`
            return run_split(self, z, mask, functools.partial(self._run, epilogue=epilogue, **options))
        return self._run(z, mask, None, epilogue, **options)

    def _add(self, z: Tensor, update: Tensor, split: Split | None, epilogue: Epilogue) -> Tensor:
        factor = part_of_mask(epilogue.dropout_mask, split)
        if factor is None and self.dropout and self.training:
            factor = dropout_mask(update, self.dropout, self._shared, split)
        return add_residual(z, update, factor, residual=epilogue.residual, in_place=epilogue.in_place)
