"""A small MLP, and programs for it as `emit` would write them: data parallel, ZeRO-3, tensor parallel, combined.

Each also over several microbatches, with a loss that is an average of their losses.
"""

from __future__ import annotations

import torch
from torch import nn

from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import parse_sharding

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


def mlp_interface(
    sizes: dict[str, int], zero3: bool = False, dtype: str = "float64", microbatches: int = 1
) -> ProgramInterface:
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
        shape, sharding = (BATCH // microbatches, width), parse_sharding(text, axes)
        return TensorInterface(name, shape, dtype, sharding, differentiable, (), 0, "concat")

    replicated = parse_sharding("", axes)
    return ProgramInterface(
        axes=axes,
        sizes=tuple(sizes.values()),
        parameters=tuple(parameters),
        buffers=(TensorInterface("scale", (CLASSES,), dtype, replicated),),
        inputs=(data("x", WIDTH), data("y", CLASSES)),
        outputs=(TensorInterface("loss", (), dtype, replicated, True, combine="mean"), data("logits", CLASSES, True)),
        microbatches=microbatches,
    )


def mlp_source(sizes: dict[str, int], zero3: bool = False, microbatches: int = 1) -> str:
    """The text of the generated program."""
    has_dp, has_tp = "dp" in sizes, "tp" in sizes
    names = {"up_weight": "up.weight", "up_bias": "up.bias", "down_weight": "down.weight", "down_bias": "down.bias"}
    gathered = "".join(f'        "{key}": (state["{key}"], 0),\n' for key in names.values())
    put = "".join(f'    p.put("{key}", state["{key}"])\n' for key in names.values())
    keep = ", keep=1" if microbatches > 1 else ""
    gather = f'    p.bucket("all_gather dp", {{\n{gathered}    }}{keep})\n' if zero3 and has_dp else put
    take = 'comm.slice(inputs["{0}"], "dp", 0)' if has_dp else 'inputs["{0}"]'
    reduce_tp = 'comm.all_reduce({0}, "tp")' if has_tp else "{0}"
    reduce_dp = 'comm.all_reduce({0}, "dp")' if has_dp else "{0}"
    steps = ("reduce_scatter" if zero3 else "all_reduce") + " dp"
    scattered = "".join(
        f'        "{key}": ' + (f'(g["{key}"], 0),\n' if zero3 else f'g["{key}"],\n') for key in names.values()
    )
    put_back = "".join(f'    r.put("{key}", g["{key}"])\n' for key in names.values())
    reduce = f'    r.bucket("{steps}", {{\n{scattered}    }})\n' if has_dp else put_back
    rows = BATCH // microbatches
    return f"""import torch


def split_inputs(comm, inputs):
    return {{"x": {take.format("x")}, "y": {take.format("y")}}}


def mlp_gather(comm, state, held):
    p = comm.transfers(held)
{gather}    return p


def mlp_reduce(comm, g):
    r = comm.transfers()
{reduce}    return r


def mlp_forward(comm, p, x, y, scale):
    hidden = torch.tanh(x @ p["up.weight"].t() + p["up.bias"])
    product = hidden @ p["down.weight"].t()
    logits = ({reduce_tp.format("product")} + p["down.bias"]) * scale
    error = logits - y
    part = (error * error).sum() / {rows * CLASSES}
    loss = {reduce_dp.format("part")}
    return loss, logits, (x, hidden, error)


def mlp_backward(comm, p, saved, d_loss, d_logits, scale):
    x, hidden, error = saved
    d_out = 0 if d_loss is None else d_loss * 2 * error / {rows * CLASSES}
    if d_logits is not None:
        d_out = d_out + d_logits
    d_out = d_out * scale
    d_down_weight, d_down_bias = d_out.t() @ hidden, d_out.sum(0)
    d_hidden = (d_out @ p["down.weight"]) * (1 - hidden * hidden)
    d_up_weight, d_up_bias = d_hidden.t() @ x, d_hidden.sum(0)
    return {{
        "up.weight": d_up_weight,
        "up.bias": d_up_bias,
        "down.weight": d_down_weight,
        "down.bias": d_down_bias,
    }}


def forward(comm, state, held, inputs, seed):
    comm.at("mlp forward")
    p = mlp_gather(comm, state, held).wait()
    loss, logits, saved = mlp_forward(comm, p, inputs["x"], inputs["y"], state["scale"])
    return (loss, logits), saved


def backward(comm, state, held, saved, grads, sums, last):
    comm.at("mlp backward")
    d_loss, d_logits = grads
    p = mlp_gather(comm, state, held).wait()
    g = mlp_backward(comm, p, saved, d_loss, d_logits, state["scale"])
    comm.accumulate(sums, g, "")
    return mlp_reduce(comm, sums).wait() if last else {{}}
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
