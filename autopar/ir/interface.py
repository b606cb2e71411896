"""What the runtime must know of a generated program: its text, and the global shape and sharding of all that goes in
and out.

Plain data, saved with the plan. A generated program defines

    split_inputs(comm, inputs) -> dict                       one microbatch's local part, by input name
    forward(comm, state, held, inputs, seed) -> (outputs, saved)
    backward(comm, state, held, saved, grads, sums, last) -> dict
    loss_weight(inputs) -> Tensor                            where an output combines as `weighted`
    of_batch(inputs, state) -> dict                          where it reads buffers of the whole batch

`state` maps the names of parameters and buffers to local tensors; `held` is an empty dict at the start of a step, in
which the program keeps parameters gathered once a step; `outputs` is a tuple in the order of
`ProgramInterface.outputs`, then of `updates`; `seed` is an int64 scalar tensor that active dropout hashes with each
element's global position, or where microbatches go through together a tuple of one for each. `grads` holds one gradient
(or None) per differentiable output, in order; `sums` is an empty dict at the start of a step, in which unreduced
gradients add up over microbatches; when `last`, backward reduces them and returns the local gradients in their
parameters' stored sharding, by parameter name. Gradients of the microbatch's own inputs that are `differentiable` are
in what it returns each time, under `ir/values.gradient_key(name)`, laid out as the input is.
`loss_weight(inputs)` is the weight of one global microbatch in the average, such as the number of labels that count.
`of_batch(inputs, state)` gives, of all rows and the model's buffers, the values of buffers that all microbatches of the
step read (`ir/batching.OF_BATCH`).

A program with a pipeline defines `split_inputs`, perhaps `loss_weight` or `of_batch`, and, in place of `forward` and
`backward`,

    STAGES = (("first", {"layers": range(0, 8)}), …)          per stage: the kind of stage, and the blocks that it runs

and for each kind of stage, called with its ranges as keyword arguments,

    first_unshard(comm, state, held) -> list                  starts the gathers of what is held for the step; each item
                                                              is to be waited for (`.wait()`) before the stage computes
    first_forward(comm, state, held, inputs, received, seed) -> (sent, outputs, updates, saved)
    first_backward(comm, state, held, saved, grads, roots, sums) -> received_grads
    first_backward_input(comm, state, held, saved, grads, roots) -> (received_grads, kept)
    first_backward_weight(comm, state, held, kept, sums)
    first_reduce(comm, sums) -> dict

`comm` knows the axes of `ProgramInterface.axes`, which are the mesh's without the pipeline's. `received` and `sent` are
tuples of local tensors in the order of the stage's `receives` and `sends`. `outputs` and `roots` are by the place of an
output in `ProgramInterface.outputs` (where two microbatches go through together, those of the second behind all of the
first): the outputs that this stage makes, and the gradients of those that are differentiable. `updates` are by buffer
name. `grads` and `received_grads` hold one gradient per differentiable entry of `sends` and of `receives`, the latter
then one per input that the stage has as `wanted`. `sums` is a
dict of the stage's own, empty at the start of a step; `first_reduce` empties it and returns the local gradients in
their parameters' stored sharding. Defined are those of `backward` and its two halves that the schedule uses.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from autopar.ir.meaning import Meaning
from autopar.ir.sharding import Sharding
from autopar.ir.told import Carried


@dataclass(frozen=True, slots=True)
class TensorInterface:
    """One tensor that crosses the border of the program.

    name: a parameter's or buffer's fully qualified name, an input's keyword (a path such as `x.0` inside nested
    inputs), an output's field. `aliases` are the other names of a tied parameter.
    batch_dim: the dim along which microbatches cut an input, or along which an output's are put together again; None
    for what every microbatch has whole. combine: how outputs of microbatches, and new buffers, become the step's:
    `concat` along batch_dim, `mean`, `sum`, `weighted` (an average with `loss_weight`), `same`.
    block: the local shape that the program deals in where pieces are uneven: a parameter's are padded with zeros to it
    before they go in, gradients and outputs trimmed to the rank's piece when they come out.
    gradient: the sharding of its gradient, where it is a differentiable value that travels between stages.
    depends: an output that depends on trainable parameters, or on inputs whose gradients are wanted, so that a gradient
    may come for it; where `backward` takes none (`differentiable`), another program is needed then.
    reached_by: of a parameter or an input, the places of the outputs whose gradients come to it; where none of these
    has one, it has none, as in eager. None: any may (a plan of an autopar that did not say).
    summed_over: of a parameter that lies whole on the axis over which its gradient is summed last, so that ranks of it
    hold the same bits: that axis.
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
    gradient: Sharding | None = None
    depends: bool = False
    reached_by: tuple[int, ...] | None = None
    summed_over: str = ""

    @property
    def may_receive(self) -> bool:
        """Whether a gradient may come for an output."""
        return self.depends or self.differentiable

    def is_reached(self, places: Container[int]) -> bool:
        """Whether a parameter gets a gradient where outputs at these places do."""
        return self.reached_by is None or any(place in places for place in self.reached_by)


@dataclass(frozen=True, slots=True)
class StageInterface:
    """One stage: what comes from the stage before and goes to the next, and what of the program's border is its own.

    outputs: places that it makes of the outputs of all microbatches that go through the program at once
    (`ProgramInterface.of_program`). updates, parameters, buffers: names. wanted: of the program's inputs whose
    gradients this stage has a term of.
    """

    receives: tuple[TensorInterface, ...]
    sends: tuple[TensorInterface, ...]
    outputs: tuple[int, ...]
    updates: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    wanted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineInterface:
    """The pipeline of a program: `axes` and `sizes` are the whole mesh's, `axis` among them the pipeline's.

    schedule: its name. order: per rank of the axis, its actions as text (autopar/pipelining/actions.py). rank_of: stage
    -> rank of the axis. keeps_outputs: a training step returns outputs that are no scalars, too.
    """

    axis: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    schedule: str
    order: tuple[tuple[str, ...], ...]
    rank_of: tuple[int, ...]
    stages: tuple[StageInterface, ...]
    keeps_outputs: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsInterface:
    """A layer of experts to which tokens go over `axis`.

    where: the call of a region that has it, as `comm.at` names it. parameters: the names of those whose first dim are
    its experts, which `axis` alone splits; none where they are used elsewhere, too, or where a call has several such
    layers, which nothing tells apart. token_axes: those that split the layer's tokens.
    """

    where: str
    axis: str
    parameters: tuple[str, ...]
    token_axes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The module that has the parameters."""
        return self.parameters[0].rpartition(".")[0] if self.parameters else self.where


@dataclass(frozen=True, slots=True)
class ProgramInterface:
    """The border of a generated program.

    parameters: stored shardings; `differentiable` when trainable and used. buffers: replicated. inputs: in call order,
    `differentiable` when `backward` returns their gradients.
    outputs: flat, in the order of the model's output pytree; `differentiable` when `backward` takes a gradient for it.
    updates: buffers that `forward` changes. pipeline: where there is one, axes and sizes are those of one stage.
    Shapes are those of one microbatch, of which a step has `microbatches`. by_value: inputs whose values decided what
    the program does: it is for no others. granted: what it takes for granted of values, in words: where it is not so,
    its outputs are NaN. branches: those that values decide: which way each goes here, and its line; the last output,
    which no user sees, is then the number of the first that goes another way, how many there are where none does.
    told: Python's numbers that are told in each step (`told.py`), in words. carried: what a step leaves on modules:
    outputs behind the user's.
    meaning: what outputs and gradients are, whoever computes them; None for a plan of an autopar that did not say.
    experts: its layers of experts that are exchanged, in order. beside: where two microbatches go through the program
    together, what it adds to the names of the second one's inputs and outputs; "" where one does.
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
    pipeline: PipelineInterface | None = None
    by_value: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()
    meaning: Meaning | None = None
    experts: tuple[ExpertsInterface, ...] = ()
    beside: str = ""
    branches: tuple[tuple[bool, str], ...] = ()
    told: tuple[str, ...] = ()
    carried: tuple[Carried, ...] = ()

    @property
    def together(self) -> int:
        """How many microbatches go through the program at once."""
        return 2 if self.beside else 1

    @property
    def runs(self) -> int:
        """How often a step runs the program."""
        return self.microbatches // self.together

    def of_program(self) -> ProgramInterface:
        """The border as the program's `forward` and `backward` have it: of all microbatches that go through it at once,
        those of the first one first; `microbatches` is how often a step runs it.
        """
        if not self.beside:
            return self
        inputs, outputs = (
            (*each, *(replace(entry, name=entry.name + self.beside) for entry in each))
            for each in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs, microbatches=self.runs, beside="")

    @property
    def wanted(self) -> tuple[TensorInterface, ...]:
        """The inputs whose gradients `backward` returns."""
        return tuple(each for each in self.inputs if each.differentiable)

    @property
    def is_trained(self) -> bool:
        """Whether a backward has anything to give: gradients of parameters, or of inputs."""
        return any(each.differentiable for each in (*self.parameters, *self.inputs))

    @property
    def states(self) -> frozenset[str]:
        """Inputs that are returned, changed, under the same name, shape and dtype, to be handed in again: caches.

        What is trained has none: an output may be called like an input.
        """
        if self.is_trained and any(each.differentiable for each in self.outputs):
            return frozenset()
        returned = {(each.name, each.shape, each.dtype) for each in self.outputs}
        return frozenset(each.name for each in self.inputs if (each.name, each.shape, each.dtype) in returned)

    def given(self, grads: Sequence[object]) -> frozenset[int]:
        """The places of outputs for which a gradient comes. grads: of the differentiable outputs, in order."""
        places = [place for place, output in enumerate(self.outputs) if output.differentiable]
        return frozenset(place for place, grad in zip(places, grads, strict=True) if grad is not None)

    def parameter(self, name: str) -> TensorInterface:
        """The parameter with this name or alias (KeyError when there is none)."""
        for parameter in self.parameters:
            if parameter.name == name or name in parameter.aliases:
                return parameter
        raise KeyError(name)
