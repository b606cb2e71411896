"""The experts' kernels in the tiles that they run in, to be compiled ahead of time without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autopar.operators.compiled_activations import compilable
from autopar.operators.expert_tiles import ROW_TILES
from autopar.runtime.kernels import expert_products, expert_rows
from autopar.runtime.kernels.compile_spec import CompileSpec
from autopar.runtime.kernels.expert_configs import KINDS, Tile, tile_of

KERNELS = {
    "up": expert_products.up_kernel,
    "up_grad": expert_products.up_grad_kernel,
    "rows": expert_products.rows_kernel,
    "columns": expert_products.columns_kernel,
}
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_CLAMPED = "mul(add(clamp(up, -7.0, 7.0), 1), mul(clamp(gate, None, 7.0), sigmoid(mul(clamp(gate, None, 7.0), 1.702))))"
_FORMS: dict[str, dict[str, Any]] = {
    "gated": {"TEXT": "mul(silu(gate), up)", "GATED": True},
    "clamped": {"TEXT": _CLAMPED, "GATED": True, "INTERLEAVED": True, "HAS_BIAS": True},
    "plain": {"TEXT": "square(relu(gate))"},
}
"""Llama's and most others', with gpt-oss's biases and alternating columns, without a gate."""
_EXPERTS = 128
_INT32, _FLOAT32 = ("order_ptr", "rows_ptr", "offsets_ptr"), ("parts_ptr", "sums_ptr")
_UNALIGNED = ("num_choices", "num_experts", "num_m", "num_n", "num_parts", "num_places", "lo", "hi", "start")


def compile_specs() -> list[CompileSpec]:
    """Each kernel × architecture × dtype × rows of a tile; of sizes that tiles divide, and, uneven, that none does."""
    return [*_products(), *_around()]


def _products() -> Iterator[CompileSpec]:
    for arch in (80, 90):
        for dtype in _DTYPES:
            for kind in KINDS:
                for rows in ROW_TILES if kind != "columns" else ROW_TILES[-1:]:
                    yield from _of_tile(kind, arch, dtype, rows, tile_of(kind, arch, dtype, rows))


def _of_tile(kind: str, arch: int, dtype: torch.dtype, rows: int, tile: Tile) -> Iterator[CompileSpec]:
    usual = {"EVEN_K": True, "EVEN_N": True}
    name = f"{rows}x{tile.block_n}"
    if kind == "columns":
        for gathered in ("A", "B"):
            yield product_spec(kind, arch, dtype, tile, f"{name} {gathered}", {f"GATHER_{gathered}": True})
    elif kind == "rows":
        word = "" if rows in (16, 128) else " uneven"
        yield product_spec(kind, arch, dtype, tile, name + word, {**usual, "WEIGHTED": True})
        yield product_spec(kind, arch, dtype, tile, f"{name} gathered uneven", {"GATHER": True, "HAS_BIAS": True})
    else:
        for form, switches in _FORMS.items():
            is_single = kind == "up" and not switches.get("GATED")
            own = tile_of("rows", arch, dtype, rows) if is_single else tile
            word = "" if rows == 128 or (rows == 16 and form == "gated") else " uneven"
            label = f"{form} {rows}x{own.block_n}{word}"
            yield product_spec(kind, arch, dtype, own, label, {**usual, **switches})
        yield product_spec(kind, arch, dtype, tile, f"gated {name} masked uneven", _FORMS["gated"])


def product_spec(
    kind: str, arch: int, dtype: torch.dtype, tile: Tile, label: str, switches: Mapping[str, Any]
) -> CompileSpec:
    """The kernel as a launch with these switches would compile it; switches not given are off."""
    kernel, given = KERNELS[kind], {**switches, **tile.switches()}
    if "TEXT" in given:
        given["TEXT"] = compilable(given["TEXT"])
    given |= {"BLOCK_E": 2 * _EXPERTS, "PRECISION": "ieee"}
    constexprs = {p.name: given.get(p.name, False) for p in kernel.params if p.is_constexpr}
    # Of parameters [E, N, K] a term's neighbours lie beside it, of their gradients', a column's.
    ones = {"up": "w_stride_k", "rows": "w_stride_k", "up_grad": "w_stride_k"}
    if kind in ones and given.get("INTERLEAVED"):
        ones = {kind: "w_stride_n"}
    fixed = {ones[kind]: 1} if kind in ones else {}
    fixed |= {"second_stride_n": 1} if kind == "up_grad" else {}
    return _spec(
        f"experts_{kind} {label}", kernel, dtype, {**constexprs, **fixed}, tile.num_warps, tile.num_stages, (arch,)
    )


def _around() -> Iterator[CompileSpec]:
    for dtype in _DTYPES:
        for first, last in ((True, True), (False, False)):
            yield _spec(
                "experts_combine" + ("" if last else " window"), expert_rows.combine_kernel, dtype,
                {"FIRST": first, "LAST": last, "BLOCK_D": 1024}, 4, 3, (80, 90),
            )  # fmt: skip
        yield _spec(
            "experts_weights_grad", expert_rows.weights_grad_kernel, dtype,
            {"FIRST": True, "BLOCK_P": 64, "PARTS": 64}, 4, 3, (80, 90),
        )  # fmt: skip
        yield _spec(
            "experts_bias_grad", expert_products.bias_grad_kernel, dtype, {"BLOCK_K": 64, "BLOCK_N": 64}, 4, 3, (80, 90)
        )
    yield _spec(
        "experts_sort", expert_rows.sort_places_kernel, torch.bfloat16,
        {"PLACES": 1024, "CHUNK": 16, "BLOCK_E": 2 * _EXPERTS}, 8, 3, (80, 90),
    )  # fmt: skip


def _spec(
    name: str, kernel: Any, dtype: torch.dtype, constexprs: dict[str, Any], num_warps: int, num_stages: int,
    capabilities: tuple[int, ...],
) -> CompileSpec:  # fmt: skip
    signature = {each: _type(each, dtype) for each in kernel.arg_names if each not in constexprs}
    aligned = tuple(each for each in signature if each not in _UNALIGNED)
    return CompileSpec(name, kernel, signature, constexprs, num_warps, num_stages, aligned, capabilities)


def _type(name: str, dtype: torch.dtype) -> str:
    if not name.endswith("_ptr"):
        return "i32"
    if name == "indices_ptr":
        return "*i64"
    return "*i32" if name in _INT32 else "*fp32" if name in _FLOAT32 else f"*{_DTYPES[dtype]}"
