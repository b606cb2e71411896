"""What the runtime must know of a generated program: its text, and the global shape and sharding of all that goes in
and out.

Plain data, saved with the plan. A generated program defines

    split_inputs(comm, inputs) -> dict                       one microbatch's local part, by input name
    forward(comm, state, held, inputs, seed) -> (outputs, saved)
    backward(comm, state, held, saved, grads, sums, last) -> dict
    loss_weight(inputs) -> Tensor                            where an output combines as `weighted`

`state` maps the names of parameters and buffers to local tensors; `held` is an empty dict at the start of a step, in
which the program keeps parameters gathered once a step; `outputs` is a tuple in the order of
`ProgramInterface.outputs`, then of `updates`; `seed` is an int64 scalar tensor that active dropout hashes with each
element's global position. `grads` holds one gradient (or None) per differentiable output, in order; `sums` is an empty
dict at the start of a step, in which unreduced gradients add up over microbatches; when `last`, backward reduces them
and returns the local gradients in their parameters' stored sharding, by parameter name (else nothing).
`loss_weight(inputs)` is the weight of one global microbatch in the average, such as the number of labels that count.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.sharding import Sharding


@dataclass(frozen=True, slots=True)
class TensorInterface:
    """One tensor that crosses the border of the program.

    name: a parameter's or buffer's fully qualified name, an input's keyword (a path such as `x.0` inside nested
    inputs), an output's field. `aliases` are the other names of a tied parameter.
    batch_dim: the dim along which microbatches cut an input, or along which an output's are put together again; None
    for what every microbatch has whole. combine: how outputs of microbatches become the step's: `concat` along
    batch_dim, `mean`, `sum`, `weighted` (an average with `loss_weight`), `same`.
    block: the local shape that the program deals in where pieces are uneven: a parameter's are padded with zeros to it
    before they go in, gradients and outputs trimmed to the rank's piece when they come out.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    differentiable: bool = False
    aliases: tuple[str, ...] = ()
    batch_dim: int | None = None
    combine: str = "same"
    block: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ProgramInterface:
    """The border of a generated program.

    parameters: stored shardings; `differentiable` when trainable and used. buffers: replicated. inputs: in call order.
    outputs: flat, in the order of the model's output pytree; `differentiable` when `backward` takes a gradient for it.
    updates: buffers that `forward` changes. Shapes are those of one microbatch, of which a step has `microbatches`.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    parameters: tuple[TensorInterface, ...]
    buffers: tuple[TensorInterface, ...]
    inputs: tuple[TensorInterface, ...]
    outputs: tuple[TensorInterface, ...]
    uses_dropout: bool = False
    microbatches: int = 1
    updates: tuple[TensorInterface, ...] = ()

    def parameter(self, name: str) -> TensorInterface:
        """The parameter with this name or alias (KeyError when there is none)."""
        for parameter in self.parameters:
            if parameter.name == name or name in parameter.aliases:
                return parameter
        raise KeyError(name)
