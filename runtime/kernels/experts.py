"""The experts of a mixture on CUDA: `autopar::experts` and its gradients by grouped products (`expert_products.py`).

The host knows no counts and waits for nothing. Nothing is kept for the gradient; what a call holds meanwhile are, of
two rows a token (`window_rows`), what they are between the products and behind them: forward F + D numbers of each,
backward (1 + G) F + D; where there are more rows, [T, D] sums in float32, too. Results are the same from run to run: no
program adds to what another one writes.

Numbers that kernels do not have (float64, codes) and empty tensors go to the PyTorch reference,
autopar/operators/experts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from autopar.base.torch_compat.autograd import recording
from autopar.operators.compiled_activations import compilable
from autopar.operators.expert_layout import Layout
from autopar.operators.expert_tiles import FEW_PLACES, window_rows
from autopar.operators.experts import experts as reference
from autopar.operators.experts import gradients as reference_gradients
from autopar.runtime.kernels import expert_products, expert_rows
from autopar.runtime.kernels.attention_problem import precision
from autopar.runtime.kernels.expert_configs import Tile, tile_of
from autopar.runtime.kernels.launch import capability
from autopar.runtime.kernels.rows import as_rows, computes, launch, power_of_2, tiles

_CHUNK = 16
_COMBINED_COLUMNS = 1024


def experts(
    x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor | None = None, *,
    act: str, gated: bool = True, interleaved: bool = False, transposed: bool = False, start: int = 0,
    storage: str = "", **of_codes: Any,
) -> Tensor:  # fmt: skip
    """As `operators.experts.experts`: y[T, D]."""
    layout = Layout(act, gated, interleaved, transposed)
    if storage or not serves(x, indices, weights, first, second, bias):
        return reference(
            x, indices, weights, first, second, bias, act=act, gated=gated, interleaved=interleaved,
            transposed=transposed, start=start, storage=storage, **of_codes,
        )  # fmt: skip
    call = _Call(as_rows(x), indices, weights, first, second, bias, layout, start)
    out, sums, y = torch.empty(x.shape, dtype=x.dtype, device=x.device), call.sums(), call.buffer(x.shape[1])
    for window in call.windows():
        call.second_product(call.made(window), y, window)
        call.combine(y, sums, out, window)
    return out


def experts_grad(
    g: Tensor, x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, *,
    act: str, gated: bool = True, interleaved: bool = False, transposed: bool = False, start: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `operators.experts.experts_grad`."""
    layout = Layout(act, gated, interleaved, transposed)
    return _gradients(g, x, indices, weights, first, second, None, layout, start)[:4]


def experts_grad_bias(
    g: Tensor, x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor, *,
    act: str, gated: bool = True, interleaved: bool = False, transposed: bool = False, start: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `operators.experts.experts_grad_bias`."""
    layout = Layout(act, gated, interleaved, transposed)
    return _gradients(g, x, indices, weights, first, second, bias, layout, start)


def serves(x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> bool:
    """Whether kernels compute it: of their dtypes, the same for what is multiplied, with rows, and matrices of experts
    whose places are numbers of 32 bits.
    """
    given = (x, first, second) if bias is None else (x, first, second, bias)
    return (
        computes((*given, weights))
        and len({each.dtype for each in given}) == 1
        and min(x.numel(), indices.numel(), first.numel(), second.numel()) > 0
        and max(_reach(first[0]), _reach(second[0]), indices.numel()) < 2**31
    )


def _reach(matrix: Tensor) -> int:
    """How far its last element is from its first; as many as it has where it is copied (`_plain`)."""
    if matrix.stride(-1) != 1:
        return matrix.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True))


def _gradients(
    g: Tensor, x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor | None,
    layout: Layout, start: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not serves(x, indices, weights, first, second, bias) or g.dtype != x.dtype:
        return reference_gradients(g, x, indices, weights, first, second, bias, layout, start)
    call = _Call(as_rows(x), indices, weights, first, second, bias, layout, start)
    g_rows, device = as_rows(g), x.device
    dx, sums, of_rows = torch.empty(x.shape, dtype=x.dtype, device=device), call.sums(), call.buffer(x.shape[1])
    dweights, dfirst, dsecond = (
        torch.empty(each.shape, dtype=each.dtype, device=device) for each in (weights, first, second)
    )
    dbias = x.new_empty(0) if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=device)
    for window in call.windows():
        hw, dproduct, parts = call.first_gradient(g_rows, window)
        call.weights_gradient(parts, dweights, window)
        one, other = (hw, g_rows) if layout.transposed else (g_rows, hw)
        call.sum_rows(one, other, dsecond, window, gathered=0 if one is g_rows else 1)
        one, other = (call.x, dproduct) if layout.transposed else (dproduct, call.x)
        call.sum_rows(one, other, dfirst, window, gathered=0 if one is call.x else 1)
        if bias is not None:
            call.sum_bias(dproduct, dbias, window)
        call.product(dproduct, first, of_rows, window, columns_first=False)
        call.combine(of_rows, sums, dx, window)
    return dx, dweights, dfirst, dsecond, dbias


@dataclass(frozen=True, slots=True)
class _Window:
    """Rows that are taken at once: from lo to hi. is_first, is_last: of all."""

    lo: int
    hi: int
    is_first: bool
    is_last: bool


class _Call:
    """The tensors of one call, where its rows are, and the launches."""

    def __init__(
        self, x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor | None,
        layout: Layout, start: int,
    ) -> None:  # fmt: skip
        self.x, self.layout = x, layout
        self.weights, self.first, self.second = weights.contiguous(), _plain(first), _plain(second)
        self.bias = None if bias is None else bias.contiguous()
        self.num_choices, self.num_experts = indices.shape[-1], first.shape[0]
        self.num_places = indices.numel()
        self.hidden = x.shape[1]
        self.width = second.shape[1] if layout.transposed else second.shape[2]
        self.columns = self.width * (2 if layout.gated else 1)
        self.num_rows = window_rows(x.shape[0], self.num_choices)
        self.text = compilable(layout.act)
        self.block_e = max(16, power_of_2(self.num_experts + 1))
        self._parts: Tensor | None = None
        self.order, self.rows, self.offsets = places_by_expert(indices, self.num_experts, start)

    def windows(self) -> Iterator[_Window]:
        """All rows, in turns; one where they are few."""
        for lo in range(0, self.num_places, self.num_rows):
            hi = min(lo + self.num_rows, self.num_places)
            yield _Window(lo, hi, lo == 0, hi == self.num_places)

    def buffer(self, width: int) -> Tensor:
        """Of a number a row of a window, in x's dtype."""
        return torch.empty((self.num_rows, width), dtype=self.x.dtype, device=self.x.device)

    def sums(self) -> Tensor:
        """Of tokens, between windows."""
        wanted = self.x.shape if self.num_rows < self.num_places else (0, 0)
        return torch.empty(wanted, dtype=torch.float32, device=self.x.device)

    @cached_property
    def made_buffer(self) -> Tensor:
        """[W, F], one for all windows, as the others."""
        return self.buffer(self.width)

    @cached_property
    def product_buffer(self) -> Tensor:
        """[W, G F]: the first product, or its gradient."""
        return self.buffer(self.columns)

    def parts_buffer(self, num_n: int) -> Tensor:
        """[W, n], float32."""
        if self._parts is None:
            self._parts = torch.empty((self.num_rows, num_n), dtype=torch.float32, device=self.x.device)
        return self._parts

    def made(self, window: _Window) -> Tensor:
        """h[W, F]: of each row what its expert makes of it before the second product."""
        if self.text is None:
            product = self._first_product(window)
            return self.layout.activated(product).to(product.dtype).contiguous()
        tile, grid, num_m = self._grid("up" if self.layout.gated else "rows", self.width)
        launch(
            expert_products.up_kernel, grid, self.x.device,
            self.x, self.first, self._bias(), self.order, self.offsets, self.made_buffer, self.x.stride(0),
            *self._strides(self.first, columns_first=True), self.num_choices, self.num_experts, num_m,
            tiles(self.width, tile.block_n), self.width, self.hidden, window.lo, window.hi,
            TEXT=self.text, GATED=self.layout.gated, INTERLEAVED=self.layout.interleaved,
            HAS_BIAS=self.bias is not None, **self._switches(tile, self.width, self.hidden),
        )  # fmt: skip
        return self.made_buffer

    def second_product(self, h: Tensor, y: Tensor, window: _Window) -> None:
        """y[W, D]: of each row what its expert makes of it, times its weight."""
        self.product(h, self.second, y, window, columns_first=True, is_weighted=True)

    def product(
        self, a: Tensor, matrices: Tensor, out: Tensor, window: _Window, *, columns_first: bool, gathered: bool = False,
        bias: Tensor | None = None, is_weighted: bool = False,
    ) -> None:  # fmt: skip
        """out[W, N] = a @ matrices of the rows' experts. columns_first: these are [N, K], as parameters are written
        that are not transposed. gathered: a has rows of tokens.
        """
        num_columns, terms = out.shape[1], a.shape[1]
        tile, grid, num_m = self._grid("rows", num_columns)
        launch(
            expert_products.rows_kernel, grid, a.device,
            a, matrices, a if bias is None else bias, self.weights, self.order, self.offsets, out, a.stride(0),
            *self._strides(matrices, columns_first=columns_first), self.num_choices, self.num_experts, num_m,
            tiles(num_columns, tile.block_n), num_columns, terms, window.lo, window.hi,
            GATHER=gathered, HAS_BIAS=bias is not None, WEIGHTED=is_weighted,
            **self._switches(tile, num_columns, terms),
        )  # fmt: skip

    def combine(self, y: Tensor, sums: Tensor, out: Tensor, window: _Window) -> None:
        """Each token's sum over its rows."""
        block = min(_COMBINED_COLUMNS, power_of_2(self.hidden))
        launch(
            expert_rows.combine_kernel, (out.shape[0], tiles(self.hidden, block)), out.device,
            y, self.rows, self.offsets, sums, out, self.num_choices, self.hidden, self.num_experts, window.lo,
            window.hi, FIRST=window.is_first, LAST=window.is_last, BLOCK_D=block, num_warps=4,
        )  # fmt: skip

    def first_gradient(self, g: Tensor, window: _Window) -> tuple[Tensor, Tensor, Tensor]:
        """hw[W, F], what rows make times their weight; dproduct[W, G F]; parts[W, n], which add up to the gradient to
        the weight.
        """
        if self.text is None:
            return self._first_gradient_apart(g, window)
        tile, grid, num_m = self._grid("up_grad", self.width)
        num_n = tiles(self.width, tile.block_n)
        dproduct, parts = self.product_buffer, self.parts_buffer(num_n)
        launch(
            expert_products.up_grad_kernel, grid, g.device,
            self.x, g, self.first, self.second, self._bias(), self.weights, self.order, self.offsets, self.made_buffer,
            dproduct, parts, self.x.stride(0), g.stride(0), *self._strides(self.first, columns_first=True),
            *self._strides(self.second, columns_first=False), self.num_choices, self.num_experts, num_m, num_n,
            self.width, self.hidden, window.lo, window.hi,
            TEXT=self.text, GATED=self.layout.gated, INTERLEAVED=self.layout.interleaved,
            HAS_BIAS=self.bias is not None, **self._switches(tile, self.width, self.hidden),
        )  # fmt: skip
        return self.made_buffer, dproduct, parts

    def _first_gradient_apart(self, g: Tensor, window: _Window) -> tuple[Tensor, Tensor, Tensor]:
        """With the activation as PyTorch has it, between kernels. Rows of no expert have any numbers, unread."""
        product, through = self._first_product(window), self.buffer(self.width)
        self.product(g, self.second, through, window, columns_first=False, gathered=True)
        with recording():
            leaf = product.detach().requires_grad_()
            values = self.layout.activated(leaf).to(product.dtype)
        of_places = self.order[window.lo : window.lo + self.num_rows].long()
        weight = self.weights.reshape(-1)[of_places].to(product.dtype)
        weight = torch.nn.functional.pad(weight, (0, self.num_rows - weight.shape[0]))[:, None]
        with recording():
            (dproduct,) = torch.autograd.grad(values, leaf, through * weight)
        parts = (through.float() * values.detach().float()).sum(1, keepdim=True)
        return (values.detach() * weight).contiguous(), dproduct.contiguous(), parts

    def _first_product(self, window: _Window) -> Tensor:
        """[W, G F]: what lies before the activation."""
        product = self.product_buffer
        self.product(
            self.x, self.first, product, window, columns_first=True, gathered=True, bias=self.bias
        )  # fmt: skip
        return product

    def weights_gradient(self, parts: Tensor, dweights: Tensor, window: _Window) -> None:
        """To dweights[T, K] what is of this window's rows; 0 where no expert here was chosen."""
        block = 64
        launch(
            expert_rows.weights_grad_kernel, (tiles(self.num_places, block),), parts.device,
            parts, self.rows, self.offsets, dweights, self.num_places, parts.shape[1], self.num_experts, window.lo,
            window.hi, FIRST=window.is_first, BLOCK_P=block, PARTS=power_of_2(parts.shape[1]), num_warps=4,
        )  # fmt: skip

    def sum_rows(self, a: Tensor, b: Tensor, out: Tensor, window: _Window, *, gathered: int) -> None:
        """out[E, M, N]: of each expert the sum over its rows of a[.., M] times b[.., N]. gathered: which of the two has
        rows of tokens.
        """
        num_m, num_n = a.shape[1], b.shape[1]
        tile = self._tile("columns")
        blocks = tiles(num_m, tile.block_m), tiles(num_n, tile.block_n)
        launch(
            expert_products.columns_kernel, (blocks[0] * blocks[1], self.num_experts), a.device,
            a, b, self.order, self.offsets, out, a.stride(0), b.stride(0), self.num_choices, self.num_experts, *blocks,
            num_m, num_n, window.lo, window.hi,
            GATHER_A=gathered == 0, GATHER_B=gathered == 1, PRECISION=precision(a.dtype), **tile.switches(),
            **tile.options(),
        )  # fmt: skip

    def sum_bias(self, dproduct: Tensor, out: Tensor, window: _Window) -> None:
        """out[E, G F]: of each expert the sum over its rows."""
        block = min(64, power_of_2(self.columns))
        launch(
            expert_products.bias_grad_kernel, (tiles(self.columns, block), self.num_experts), out.device,
            dproduct, self.offsets, out, self.num_experts, self.columns, window.lo, window.hi,
            BLOCK_K=64, BLOCK_N=block, num_warps=4,
        )  # fmt: skip

    def _bias(self) -> Tensor:
        """x in its place where there is none, and it is not read."""
        return self.x if self.bias is None else self.bias

    def _strides(self, matrices: Tensor, *, columns_first: bool) -> tuple[int, int, int]:
        """Of an expert, a column and a term. columns_first: [E, N, K] where parameters are not transposed."""
        columns, terms = (1, 2) if columns_first != self.layout.transposed else (2, 1)
        return matrices.stride(0), matrices.stride(columns), matrices.stride(terms)

    def _tile(self, kind: str) -> Tile:
        return tile_of(kind, capability(self.x.device), self.x.dtype, self.num_places / self.num_experts)

    def _grid(self, kind: str, num_columns: int) -> tuple[Tile, tuple[int], int]:
        """The tile; as many programs as there may be tiles, whatever the router does; and how many are rows'."""
        tile = self._tile(kind)
        num_m = most_tiles(self.num_rows, self.num_experts, tile.block_m)
        return tile, (num_m * tiles(num_columns, tile.block_n),), num_m

    def _switches(self, tile: Tile, num_columns: int, terms: int) -> dict[str, Any]:
        return {
            **tile.switches(), **tile.options(), "BLOCK_E": self.block_e, "PRECISION": precision(self.x.dtype),
            "EVEN_K": terms % tile.block_k == 0, "EVEN_N": num_columns % tile.block_n == 0,
        }  # fmt: skip


def most_tiles(num_rows: int, num_experts: int, block: int) -> int:
    """How many tiles of `block` rows so many rows are at most, however experts share them: the sum of ceil(n / block)
    over those that have any, each of which (n - 1) // block + 1 is.
    """
    groups = min(num_experts, num_rows)
    return (num_rows - groups) // block + groups


def places_by_expert(indices: Tensor, num_experts: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """order[row] = place, rows[place] = row, offsets[E + 1] of the places of indices[T, K], int32 (see expert_rows.py);
    nothing of it comes to the host.
    """
    flat = indices.reshape(-1)
    num_places, device = flat.shape[0], flat.device
    if num_places <= FEW_PLACES:
        order, rows = (torch.empty(num_places, dtype=torch.int32, device=device) for _ in range(2))
        offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        launch(
            expert_rows.sort_places_kernel, (1,), device, flat.contiguous(), order, rows, offsets, num_places,
            num_experts, start, PLACES=max(16, power_of_2(num_places)), CHUNK=_CHUNK,
            BLOCK_E=max(16, power_of_2(num_experts + 1)), num_warps=8,
        )  # fmt: skip
        return order, rows, offsets
    numbers = flat.to(torch.int32) - start
    numbers = numbers.masked_fill((numbers < 0) | (numbers >= num_experts), num_experts)
    found, order = numbers.sort(stable=True)
    ends = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
    offsets = torch.searchsorted(found, ends, out_int32=True)
    places = torch.arange(num_places, dtype=torch.int32, device=device)
    rows = torch.empty_like(places).scatter_(0, order, places)
    return order.to(torch.int32), rows, offsets


def register_experts(library: Library, device: str = "CUDA") -> None:
    """Implement these operators in a library of the namespace `autopar` that is open for implementations."""
    for kernel in (experts, experts_grad, experts_grad_bias):
        library.impl(kernel.__name__, kernel, device)


def _plain(matrices: Tensor) -> Tensor:
    """Parameters whose last dim's elements are neighbours."""
    return matrices if matrices.stride(-1) == 1 else matrices.contiguous()
