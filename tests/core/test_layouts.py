"""Memory layouts of results, and gradients that are columns of one matrix."""

import pytest
import torch
from torch import Tensor

from evoattn.core import layouts
from evoattn.core.inputs import Inputs
from evoattn.core.layouts import Columns, columns_of

ROWS, HEADS, CHANNELS = 6, 2, 8
SIZE = HEADS * CHANNELS
MATRIX = torch.zeros(ROWS, 4 * SIZE)


def side_by_side(matrix: Tensor, count: int = 3, start: int = 0) -> list[Tensor]:
    """Tensors `[rows, H, C]` that are columns of a matrix."""
    return [
        matrix[:, first : first + SIZE].unflatten(1, (HEADS, CHANNELS)) for first in range(start, start + count * SIZE, SIZE)
    ]


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_results_are_contiguous_in_the_layout_of_the_user(layout: str) -> None:
    q = torch.randn(2, 3, 4, 5, 8, dtype=torch.float16)
    inputs = Inputs(q, q, torch.randn(2, 3, 4, 5, 16, dtype=torch.float16))
    o, lse, reference = layouts.empty_outputs(inputs, layout)
    assert o.shape == (2, 3, 4, 5, 16)
    assert o.dtype == torch.float16
    assert layouts.to_canonical(o, layout).is_contiguous()
    assert lse.shape == reference.shape == (2, 3, 4, 5)
    assert lse.dtype == reference.dtype == torch.float32


def test_gradients_that_are_not_wanted_are_none() -> None:
    q = torch.randn(1, 2, 3, 4, 8)
    dq, dk, dv, dgate = layouts.empty_gradients(Inputs(q, q, q, gate=q), "bnhld", (True, False, True, False, False, True))
    assert dk is None
    assert dq is not None
    assert dv is not None
    assert dgate is not None
    assert layouts.empty_gradients(Inputs(q, q, q), "bnhld", (True,) * 6)[3] is None


def test_tensors_are_viewed_as_they_were_planned() -> None:
    planned = torch.empty(2, 3, 4).transpose(0, 1)
    x = torch.arange(24.0)
    viewed, same, missing, extra = layouts.as_planned([planned, x, None, None])([x, x, None, x])
    assert viewed.shape == planned.shape
    assert viewed.stride() == planned.stride()
    assert viewed.data_ptr() == x.data_ptr()
    assert same is x
    assert missing is None
    assert extra is x


def test_heads_side_by_side_are_columns_of_one_matrix() -> None:
    matrix = torch.randn(ROWS, 4 * SIZE)
    assert columns_of(side_by_side(matrix)) == Columns(ROWS, 4 * SIZE, (0, SIZE, 2 * SIZE))


@pytest.mark.parametrize(
    ("reason", "tensors"),
    [
        ("contiguous", [torch.randn(ROWS, HEADS, CHANNELS)]),
        ("two matrices", [*side_by_side(torch.randn(ROWS, 4 * SIZE), 1), *side_by_side(torch.randn(ROWS, 4 * SIZE), 1, SIZE)]),
        ("the same columns twice", side_by_side(torch.randn(ROWS, 4 * SIZE), 1) * 2),
        ("columns that do not start on 16 bytes", side_by_side(torch.randn(ROWS, 4 * SIZE), 1, start=1)),
        ("rows that do not start on 16 bytes", side_by_side(torch.randn(ROWS, 4 * SIZE + 1))),
        ("a gap between rows", [torch.randn(2, 8, 4 * SIZE)[:, :ROWS, :SIZE].unflatten(2, (HEADS, CHANNELS))]),
        ("other rows", [*side_by_side(MATRIX, 1), *side_by_side(MATRIX[:-1], 1, SIZE)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_other_tensors_are_no_columns(reason: str, tensors: list[Tensor]) -> None:
    assert columns_of(tensors) is None


def test_gradients_in_a_matrix_of_their_own_are_joined_without_a_copy() -> None:
    likes = side_by_side(torch.randn(ROWS, 3 * SIZE))
    columns = columns_of(likes)
    assert columns is not None
    parts = [x.copy_(like).flatten(1) for x, like in zip(columns.make(likes), likes, strict=True)]
    matrix = layouts.join(parts, [SIZE] * 3)
    assert matrix.data_ptr() == parts[0].data_ptr()
    assert torch.equal(matrix, torch.cat(parts, 1))


def test_a_part_that_is_missing_or_elsewhere_is_filled_in() -> None:
    likes = side_by_side(torch.randn(ROWS, 3 * SIZE))
    columns = columns_of(likes)
    assert columns is not None
    first, _, _ = (x.fill_(1).flatten(1) for x in columns.make(likes))
    matrix = layouts.join([first, None, torch.full((ROWS, SIZE), 3.0)], [SIZE] * 3)
    assert matrix.data_ptr() == first.data_ptr()
    assert matrix[:, ::SIZE].tolist() == [[1, 0, 3]] * ROWS


def test_a_matrix_that_was_not_made_for_columns_is_copied() -> None:
    """Its memory may be the caller's."""
    parts = [x.flatten(1) for x in side_by_side(torch.randn(ROWS, 3 * SIZE))]
    matrix = layouts.join(parts, [SIZE] * 3)
    assert matrix.data_ptr() != parts[0].data_ptr()
    assert torch.equal(matrix, torch.cat(parts, 1))
