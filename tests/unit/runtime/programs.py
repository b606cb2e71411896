"""A small MLP, and programs for it as `emit` would write them: data parallel, ZeRO-3, tensor parallel, combined."""

from __future__ import annotations

import torch
from torch import nn

from autopar.interface import ProgramInterface, TensorInterface
from autopar.sharding import parse_sharding

BATCH, WIDTH, HIDDEN, CLASSES = 8, 6, 16, 4


class Mlp(nn.Module):
    """Two linear layers, tanh between, a scaling buffer, mean squared error."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, CLASSES)
        self.register_buffer("scale", torch.full((CLASSES,), 0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """x [BATCH, WIDTH], y [BATCH, CLASSES] -> loss [], logits [BATCH, CLASSES]."""
        logits = self.down(torch.tanh(self.up(x))) * self.scale
        return {"loss": ((logits - y) ** 2).mean(), "logits": logits}

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)


def mlp_interface(sizes: dict[str, int], zero3: bool = False, dtype: str = "float64") -> ProgramInterface:
    """The border of `mlp_source` with the same arguments. Axes: dp and/or tp, in any order."""
    axes = tuple(sizes)
    tp = sizes.get("tp", 1)
    # dp cuts stripes of what tp leaves a rank, so that a gather over dp alone yields tp's contiguous part.
    before = axes.index("dp") < axes.index("tp") if {"dp", "tp"} <= set(axes) else False
    stored = {
        "up.weight": (f"S(0, outer={tp})" if before and tp > 1 else "S(0)", "S(0)", (HIDDEN, WIDTH)),
        "up.bias": (f"S(0, outer={tp})" if before and tp > 1 else "S(0)", "S(0)", (HIDDEN,)),
        "down.weight": ("S(0)", "S(1)", (CLASSES, HIDDEN)),
        "down.bias": ("S(0)", "R", (CLASSES,)),
    }
    parameters = []
    for name, (over_dp, over_tp, shape) in stored.items():
        placed = {"dp": over_dp if zero3 else "R", "tp": over_tp}
        sharding = parse_sharding(", ".join(f"{axis}={placed[axis]}" for axis in axes), axes)
        parameters.append(TensorInterface(name, shape, dtype, sharding, differentiable=True))

    def data(name: str, width: int, differentiable: bool = False) -> TensorInterface:
        text = "dp=S(0)" if "dp" in axes else ""
        return TensorInterface(name, (BATCH, width), dtype, parse_sharding(text, axes), differentiable)

    replicated = parse_sharding("", axes)
    return ProgramInterface(
        axes=axes,
        sizes=tuple(sizes.values()),
        parameters=tuple(parameters),
        buffers=(TensorInterface("scale", (CLASSES,), dtype, replicated),),
        inputs=(data("x", WIDTH), data("y", CLASSES)),
        outputs=(TensorInterface("loss", (), dtype, replicated, True), data("logits", CLASSES, True)),
    )


def mlp_source(sizes: dict[str, int], zero3: bool = False) -> str:
    """The text of the generated program."""
    has_dp, has_tp = "dp" in sizes, "tp" in sizes
    names = {"up_weight": "up.weight", "up_bias": "up.bias", "down_weight": "down.weight", "down_bias": "down.bias"}
    gather = "\n".join(
        f'    {name} = comm.all_gather(state["{key}"], "dp", 0)' if zero3 and has_dp else f'    {name} = state["{key}"]'
        for name, key in names.items()
    )
    take = 'comm.slice(inputs["{0}"], "dp", 0)' if has_dp else 'inputs["{0}"]'
    reduce_tp = 'comm.all_reduce({0}, "tp")' if has_tp else "{0}"
    reduce_dp = 'comm.all_reduce({0}, "dp")' if has_dp else "{0}"
    store = 'comm.reduce_scatter({0}, "dp", 0)' if zero3 and has_dp else reduce_dp
    grads = "\n".join(f'        "{key}": {store.format("d_" + name)},' for name, key in names.items())
    return f"""import torch


def split_inputs(comm, inputs):
    return {{"x": {take.format("x")}, "y": {take.format("y")}}}


def mlp_gather(comm, state):
{gather}
    return up_weight, up_bias, down_weight, down_bias


def forward(comm, state, inputs, seed):
    comm.at("mlp forward")
    up_weight, up_bias, down_weight, down_bias = mlp_gather(comm, state)
    x, y = inputs["x"], inputs["y"]
    hidden = torch.tanh(x @ up_weight.t() + up_bias)
    product = hidden @ down_weight.t()
    logits = ({reduce_tp.format("product")} + down_bias) * state["scale"]
    error = logits - y
    part = (error * error).sum() / {BATCH * CLASSES}
    loss = {reduce_dp.format("part")}
    return (loss, logits), (x, hidden, error)


def backward(comm, state, saved, grads):
    comm.at("mlp backward")
    x, hidden, error = saved
    d_loss, d_logits = grads
    _, _, down_weight, _ = mlp_gather(comm, state)
    d_out = 0 if d_loss is None else d_loss * 2 * error / {BATCH * CLASSES}
    if d_logits is not None:
        d_out = d_out + d_logits
    d_out = d_out * state["scale"]
    d_down_weight, d_down_bias = d_out.t() @ hidden, d_out.sum(0)
    d_hidden = (d_out @ down_weight) * (1 - hidden * hidden)
    d_up_weight, d_up_bias = d_hidden.t() @ x, d_hidden.sum(0)
    return {{
{grads}
    }}
"""


def make_mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> Mlp:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return Mlp().to(dtype)


def make_batch(seed: int = 1, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The global batch."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(BATCH, WIDTH, generator=generator, dtype=dtype),
        "y": torch.randn(BATCH, CLASSES, generator=generator, dtype=dtype),
    }


PLANS: dict[str, tuple[dict[str, int], bool]] = {
    "ddp": ({"dp": 2}, False),
    "zero3": ({"dp": 2}, True),
    "tensor": ({"tp": 2}, False),
    "ddp+tensor": ({"dp": 2, "tp": 2}, False),
    "zero3+tensor": ({"dp": 2, "tp": 2}, True),
}
