"""What the grouped products of experts take on CUDA (runtime/kernels/experts.py): tiles, bytes, and what they hold.

A row is a token's choice; of an expert's rows a tile is computed whole. Shape suffixes as in
`autopar.operators.experts`, W rows that are taken at once.
"""

from __future__ import annotations

import math

import torch

from autopar.ir.op_call import OpCall
from autopar.machine.hardware import Hardware
from autopar.operators.basic import wide_dtype
from autopar.operators.compiled_activations import compilable
from autopar.operators.expert_tiles import FEW_PLACES, computed_rows, rows_of_tile, window_rows

FORWARD = "autopar.experts.default"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INDEX_BYTES = 2 * 4
"""Of a place: its row, and a row's place."""
_COLUMNS_OF_PART = 32
"""At least so many columns of a product add one number to the gradient of a row's weight."""
_FORWARD_LAUNCHES, _BACKWARD_LAUNCHES, _SORT_LAUNCHES = 3, 6, 12
"""Of a window: products and what adds them to tokens; of places that PyTorch sorts."""
_WITH_BIAS = "autopar.experts_grad_bias"


def serves(call: OpCall, hardware: Hardware) -> bool:
    """Whether kernels compute it there."""
    return (
        call.name.startswith("autopar.experts")
        and not call.arg("storage")
        and hardware.device == "cuda"
        and "experts" in hardware.fused_kernels
        and next((x.dtype in _DTYPES for x in call.results if x is not None), False)
    )


def serves_codes(call: OpCall, hardware: Hardware) -> bool:
    """Whether a serving engine's kernels compute it there: of experts whose weights are codes."""
    return call.name == FORWARD and bool(call.arg("storage")) and hardware.device == "cuda" and hardware.engine


def tiled_rows(rows: float, chosen: float, places: float) -> float:
    """The rows of all tiles of all experts here.

    rows: of an expert that is chosen, on the average; chosen: how many are; places: of the tokens that are here, for
    each expert here, by which a tile is taken.
    """
    return chosen * computed_rows(rows, rows_of_tile(places))


def bytes_of_row(call: OpCall, hidden: float, width: float, columns: float) -> tuple[float, float]:
    """Bytes that a row adds to what products read and write, and what sums of tokens read behind them.

    Forward h is written and read, the second product's rows are written, and read to be summed. Backward w h and the
    first product's gradient are written and read, the latter twice; token and gradient are read again for the
    parameters' gradients. An activation between kernels has columns and width read and written once more.
    """
    size = call.operands[0].dtype.itemsize
    apart = 0.0 if compilable(str(call.arg("act"))) else 2 * (columns + width)
    if call.name == FORWARD:
        return size * (2 * width + hidden), size * (hidden + apart)
    return size * (2 * width + 3 * columns + 3 * hidden), size * (hidden + 2 * apart)


def launches(call: OpCall, tokens: float) -> float:
    """Kernels of a call of so many tokens: places are sorted, then each window has its products and sums."""
    chosen = call.operands[2 if call.name == FORWARD else 3].shape[-1]
    places = max(1, math.ceil(tokens)) * chosen
    windows = -(-places // window_rows(max(1, math.ceil(tokens)), chosen))
    each = _FORWARD_LAUNCHES if call.name == FORWARD else _BACKWARD_LAUNCHES + call.name.startswith(_WITH_BIAS)
    return (1 if places <= FEW_PLACES else _SORT_LAUNCHES) + windows * each


def held_bytes(call: OpCall, tokens: int, hidden: int, width: int, columns: int) -> int:
    """What a call of so many tokens holds beside its operands and results: buffers of a window; of an activation
    between kernels also what each of its operators keeps for its gradient.
    """
    is_grad = call.name != FORWARD
    x, weights = call.operands[1 if is_grad else 0], call.operands[3 if is_grad else 2]
    chosen, size, wide = weights.shape[-1], x.dtype.itemsize, wide_dtype(x.dtype).itemsize
    rows, places = window_rows(tokens, chosen), tokens * chosen
    is_apart = not compilable(str(call.arg("act")))
    if is_grad:
        row = (hidden + width + columns) * size + -(-width // _COLUMNS_OF_PART) * 4
        row += (columns + (4 + 2 * str(call.arg("act")).count("(")) * width) * wide if is_apart else 0
    else:
        row = (hidden + width) * size
        row += (columns + 2 * width) * wide if is_apart else 0
    sums = tokens * hidden * 4 if rows < places else 0
    return rows * row + sums + places * _INDEX_BYTES + 4 * (call.operands[-1].shape[0] + 1)
