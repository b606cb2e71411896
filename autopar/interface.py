"""What the runtime must know of a generated program: its text, and the global shape and sharding of all that goes in
and out.

Plain data, saved with the plan. A generated program defines

    split_inputs(comm, inputs) -> dict          the global batch's local part, by input name
    forward(comm, state, inputs, seed) -> (outputs, saved)
    backward(comm, state, saved, grads) -> dict local gradients in their parameters' stored sharding, by parameter name

where `state` maps the names of parameters and buffers to local tensors, `outputs` is a tuple in the order of
`ProgramInterface.outputs`, `grads` holds one gradient (or None) per differentiable output, in the same order, and
`seed` is an int64 scalar tensor that active dropout hashes with each element's global position.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.sharding import Sharding


@dataclass(frozen=True, slots=True)
class TensorInterface:
    """One tensor that crosses the border of the program.

    name: a parameter's or buffer's fully qualified name, an input's keyword (a path such as `x.0` inside nested
    inputs),
    an output's field. `aliases` are the other names of a tied parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    differentiable: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramInterface:
    """The border of a generated program.

    parameters: stored shardings; `differentiable` when trainable and used. buffers: replicated. inputs: in call order.
    outputs: flat, in the order of the model's output pytree; `differentiable` when `backward` takes a gradient for it.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    parameters: tuple[TensorInterface, ...]
    buffers: tuple[TensorInterface, ...]
    inputs: tuple[TensorInterface, ...]
    outputs: tuple[TensorInterface, ...]
    uses_dropout: bool = False

    def parameter(self, name: str) -> TensorInterface:
        """The parameter with this name or alias (KeyError when there is none)."""
        for parameter in self.parameters:
            if parameter.name == name or name in parameter.aliases:
                return parameter
        raise KeyError(name)
