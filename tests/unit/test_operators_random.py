"""autopar's random numbers and dropout: by hash of where an element lies, whatever rank has it."""

from __future__ import annotations

import pytest
import torch

from autopar import operators as ops
from autopar.base.errors import AutoparError

pytestmark = pytest.mark.unit
aten = torch.ops.aten


def test_dropout_mask_does_not_depend_on_the_sharding() -> None:
    x, seed = torch.ones(8, 6, 4), torch.tensor(1234)
    whole = ops.dropout(x, 0.3, seed, 5, [], x.shape)
    for axis_size, outer, dim in ((2, 1, 0), (4, 1, 0), (2, 2, 0), (3, 1, 1), (2, 1, 2), (2, 2, 2)):
        for coordinate in range(axis_size):
            index = [torch.arange(size) for size in x.shape]
            index[dim] = ops.positions(x.shape[dim], (coordinate, axis_size, outer))
            piece = ops.dropout(x.index_select(dim, index[dim]), 0.3, seed, 5, index, x.shape)
            assert torch.equal(piece, whole.index_select(dim, index[dim]))


def test_rows_of_several_dims_draw_as_rows_of_one() -> None:
    """Breaks if two rows draw alike, as (0, 1) and (1, 0) where their indices are only added up."""
    seed, shape, flat = torch.tensor(1234), (6, 5, 64), (30, 64)
    for draw in (
        lambda shape: ops.dropout(torch.ones(shape), 0.3, seed, 5, [], shape),
        lambda shape: ops.random(torch.ones(shape), "uniform", seed, 5, [], shape),
    ):
        assert torch.equal(draw(shape).view(flat), draw(flat))
        assert len({tuple(row) for row in draw(flat).tolist()}) == 30


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_numbers_do_not_depend_on_the_sharding(dim: int) -> None:
    """Breaks if elements are numbered by a rank's part of a tensor, or two of them have one number."""
    shape, seed = (4, 6, 8), torch.tensor(1234)
    whole = ops.random(torch.ones(shape), "uniform", seed, 5, [], shape)
    assert whole.unique().numel() == whole.numel()
    for coordinate in range(2):
        index = [torch.arange(size) for size in shape]
        index[dim] = ops.positions(shape[dim], (coordinate, 2, 1))
        piece = ops.random(whole.index_select(dim, index[dim]), "uniform", seed, 5, index, shape)
        assert torch.equal(piece, whole.index_select(dim, index[dim]))


def test_dropout_mask_is_the_hash_that_is_described() -> None:
    """Against plain integers, in rows enough for several chunks; breaks where a sign, or a chunk's border, is lost."""
    shape, p, seed, salt = (3, 2**17 // 32 + 5, 67), 0.37, -(2**62) - 12345, 9
    mask = ops.dropout(torch.ones(shape), p, torch.tensor(seed), salt, [], shape).view(-1, shape[-1]) != 0

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    for row in (0, 1, 3912, 3913, 4100, len(mask) - 1):
        key = mix((mix((seed + salt * 0x9E3779B97F4A7C15) % 2**64) + row * 0x9E3779B97F4A7C15) % 2**64)
        for column in (0, 1, 2, 63, 66):
            z = (column * 0x9E3779B1 + key) % 2**32
            z = ((z ^ z >> 16) * 0x7FEB352D + (key >> 32)) % 2**32
            z = (z ^ z >> 15) * 0x846CA68B % 2**32
            signed = z - 2**32 if z >= 2**31 else z
            assert bool(mask[row, column]) == (signed >> 1 >= int(p * 2**31) - 2**30)


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_of_few_elements(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.ones(shape, dtype=dtype)
    out = ops.dropout(x, 0.5, torch.tensor(1), 0, [], shape)
    assert out.shape == x.shape and out.dtype == dtype and set(out.flatten().tolist()) <= {0.0, 2.0}


def test_dropout_is_random_enough() -> None:
    x, seed = torch.ones(400, 500), torch.tensor(7)
    out = ops.dropout(x, 0.25, seed, 0, [], x.shape)
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    keep = (out != 0).double()
    assert abs(keep.mean().item() - 0.75) < 0.005
    assert abs(torch.corrcoef(torch.stack([keep[:, :-1].flatten(), keep[:, 1:].flatten()]))[0, 1].item()) < 0.01
    for rows, columns in ((1, 0), (2, 0), (1, 1), (64, 0), (0, 2), (0, 64)):
        pairs = torch.stack([keep[: 400 - rows, : 500 - columns].flatten(), keep[rows:, columns:].flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.01
    for other in (ops.dropout(x, 0.25, seed, 1, [], x.shape), ops.dropout(x, 0.25, seed + 1, 0, [], x.shape)):
        both = torch.stack([keep.flatten(), (other != 0).double().flatten()])
        assert abs(torch.corrcoef(both)[0, 1].item()) < 0.01


def test_dropout_backward_uses_the_same_mask() -> None:
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    with ops.tracing_seed(torch.tensor(3)):
        y = ops.AUTOGRAD[aten.dropout.default](x, 0.5, True)
        z = ops.AUTOGRAD[aten.dropout.default](x, 0.5, True)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(grad, (y / x).detach())
    assert not torch.equal(y == 0, z == 0)
    assert ops.AUTOGRAD[aten.dropout.default](x, 0.5, False) is x
    assert torch.equal(ops.dropout(x, 1.0, torch.tensor(0), 0, [], x.shape), torch.zeros_like(x))


def test_dropout_without_a_seed_says_what_to_do() -> None:
    with pytest.raises(AutoparError, match=r"dropout's masks \(p=0\.5\) need a seed\. trace under .*tracing_seed"):
        ops.AUTOGRAD[aten.dropout.default](torch.randn(2), 0.5, True)
