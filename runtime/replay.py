"""A program's calls of torch on the CPU, written down in one run of it, and made again without the Python between them.

    y, *_ = ops.rms_norm(x, p["norm"], 1e-5)          v1 = square(i0)
    z = ops.linear(y, p["up"])                 ──►    v2 = mean(v1, -1, keepdim=True)
    z = comm.all_reduce(z, "tp")                      …
                                                      v7 = linear(v6, c0)
                                                      v8 = all_reduce(v7, 'tp')

They are what the text did: the same kernels on the same tensors in the same order, with what is sent between them. So
numbers are the text's, bit by bit, and ranks that run the text meet those that do not. Left out is what nobody reads
(the log-sum-exp of attention), what was computed before (masks and tables, once for all layers), and what never changes
(positions, views of weights), which is held.

Only straight text is written down (`straight.py`), and only where nothing went by values
(`base/torch_compat/calls.py`). How inputs lie, and which tensors parameters are, is compared at every call.

Where regions are to be compiled, what lies between two sends is one compiled function of inputs and parameters
(`compiled_calls.py`), which serves other parameters, too, that lie as those did.
"""

from __future__ import annotations

import linecache
import logging
from collections.abc import Callable, Sequence
from itertools import count
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.torch_compat.calls import Calls as Seen
from autopar.base.torch_compat.calls import has_modes, telling
from autopar.operators.registration import SPELLED_OUT
from autopar.runtime.calls import Calls, Text
from autopar.runtime.communicator import Communicator
from autopar.runtime.compiled_calls import compiled_between
from autopar.runtime.straight import is_straight_program

logger = logging.getLogger("autopar")

Tensors = dict[str, Tensor]
Run = Callable[[Any, Tensors, Tensors], Sequence[Tensor]]
"""(communicator, state, inputs) -> outputs."""
PLAIN_RUNS = 1
"""Runs as the text says before one is written down: most kinds of calls come once or twice."""
MOST = 3
"""How often a program is written down, where parameters lie in other memory than before."""
MOST_KINDS = 16
"""Of inputs, for which a forward is compiled."""
MOST_BYTES = 1 << 22
"""Of outputs that are copied, so that everything else is made in inference mode."""
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
SENDING = (*COLLECTIVES, "ring_attention", "exchange_experts")
"""What of a communicator makes tensors of tensors, and is a call."""
ASKED = ("axes", "sizes", "rank", "device", "index", "size", "starts", "slice", "positions")
"""What of it is the same at every call, or is made of calls of torch."""
_NUMBERS = count()
_PLACE = Tensor.data_ptr


class Replay:
    """Of a program's runs, each with inputs of the same kinds. compiler: of what lies between what is sent, if any."""

    def __init__(self, source: str, filename: str, compiler: Any = None) -> None:
        self._source, self._filename, self._compiler = source, filename, compiler
        self._num_runs = self._num_written = 0
        self._known: _Known | None = None

    def __call__(self, run: Run, comm: Any, state: Tensors, inputs: Tensors) -> Sequence[Tensor]:
        """The program's outputs. run: the program as it is."""
        if self._known is not None and self._known.fits(comm, state, inputs):
            return self._known(inputs)
        self._num_runs += 1
        if self._num_runs <= PLAIN_RUNS or self._num_written >= MOST or has_modes():
            return run(comm, state, inputs)
        if not is_straight_program(self._source):
            self._num_written = MOST
            return run(comm, state, inputs)
        self._num_written += 1
        values, calls = written_down(run, comm, state, inputs)
        if calls.why:
            logger.debug("autopar: the calls of %s are not known beforehand: %s", self._filename, calls.why)
            self._known, self._num_written = None, MOST
        else:
            self._known = _Known(calls, comm, state, inputs, values, self._filename, self._compiler)
        return values

    @property
    def is_refused(self) -> bool:
        """Whether its calls are not known beforehand, and will not be."""
        return self._known is None and self._num_written >= MOST

    @property
    def text(self) -> str:
        """The calls, "" where they are not known."""
        return "" if self._known is None else self._known.text


class CompiledForward:
    """The forward of a program that was planned without a backward, on CPUs: its calls between two sends compiled.

    plain: makes it as the text is. elsewhere: it with regions that are compiled each by itself (`regions.py`), for
    other devices, and for text whose calls are not known beforehand.
    """

    def __init__(self, source: str, filename: str, compiler: Any, plain: Callable[[], Any], elsewhere: Any) -> None:
        self._source, self._filename, self._compiler = source, filename, compiler
        self._make, self._elsewhere = plain, elsewhere
        self._plain: Any = None
        self._replays: dict[Any, Replay] = {}

    def __call__(self, comm: Communicator, state: Tensors, held: Tensors, inputs: Tensors, seed: Any) -> Any:
        """As the program's own forward, which keeps nothing for a backward."""
        key = (comm, *map(_layout, inputs.values()))
        replay = self._replays.get(key)
        if replay is None and self._is_for(comm) and not held and len(self._replays) < MOST_KINDS:
            replay = self._replays[key] = Replay(self._source, self._filename, self._compiler)
        if replay is None or replay.is_refused or held or torch.is_grad_enabled():
            return self._elsewhere(comm, state, held, inputs, seed)

        def run(comm: Any, state: Tensors, inputs: Tensors) -> Sequence[Tensor]:
            found: Sequence[Tensor] = self._plain(comm, state, {}, inputs, seed)[0]
            return found

        return tuple(replay(run, comm, state, inputs)), []

    def _is_for(self, comm: Communicator) -> bool:
        if comm.device.type != "cpu" or not is_straight_program(self._source):
            return False
        self._plain = self._plain or self._make()
        return True


def written_down(run: Run, comm: Any, state: Tensors, inputs: Tensors) -> tuple[Sequence[Tensor], Calls]:
    """The outputs of a run, and its calls; `why` is set where others might have been made."""
    calls = Calls(state, inputs)
    tensors = [*state.values(), *inputs.values()]
    if any(type(x) not in (Tensor, nn.Parameter) or not x.is_cpu or x.is_inference() for x in tensors):
        calls.goes_by("tensors of another kind")
        return run(comm, state, inputs), calls
    with telling(calls, SPELLED_OUT) as seen:
        values = run(_Sending(comm, calls, seen), state, inputs)
    calls.end(values)
    return values, calls


class _Known:
    """The calls as a function of the inputs. text: of that function."""

    def __init__(
        self, calls: Calls, comm: Any, state: Tensors, inputs: Tensors, values: Sequence[Tensor], filename: str,
        compiler: Any,
    ) -> None:  # fmt: skip
        self._comm, self._state = comm, list(state.values())
        self._places = [*map(_PLACE, self._state)]  # another memory may be put into a tensor (`x.data = y`)
        self._layouts = [*map(_layout, inputs.values())]
        self._dtype = torch.get_default_dtype()
        outputs = [calls.ref(x) for x in values]
        needed = calls.needed(outputs, at_once=compiler is None)
        parameters, held, said = calls.inputs, calls.held, list(inputs)
        self._chosen: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
        self._lies: tuple[Any, ...] = ()
        if compiler is not None:
            needed = compiled_between(needed, calls, outputs, compiler, filename)
            read = {number for call in needed for number in call.refs}
            places = {id(x): place for place, x in reversed([*enumerate(self._state)])}
            used = [place for number, place in zip(calls.state, sorted(places.values()), strict=True) if number in read]
            self._lies, self._chosen = _lies(self._state), _chosen(used)
            parameters = (*parameters, *(number for number in calls.state if number in read))
            held = {number: x for number, x in held.items() if number not in calls.state}
            said += [[*state][place] for place in used]
        written = Text(parameters, held, said)
        self.text = written.of(needed, outputs)
        name = f"{filename.removesuffix('.py')}_calls_{next(_NUMBERS)}.py"
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(keepends=True), name)
        exec(compile(self.text, name, "exec"), written.namespace)
        self._function: Callable[..., Sequence[Tensor]] = written.namespace["forward"]
        self._given = () if self._chosen is None else self._chosen(self._state)
        given = {id(x) for x in inputs.values()}
        self._new = [id(x) not in given for x in values]
        may_keep = any(call.is_sent and call.function.__name__ not in COLLECTIVES for call in needed)
        num_bytes = sum(x.nbytes for x, new in zip(values, self._new, strict=True) if new)
        self._in_inference = compiler is None and not may_keep and num_bytes <= MOST_BYTES

    def fits(self, comm: Any, state: Tensors, inputs: Tensors) -> bool:
        """Whether the text would make these calls."""
        return (
            comm is self._comm
            and [*map(_layout, inputs.values())] == self._layouts
            and torch.get_default_dtype() == self._dtype
            and (self._is_same(state) or self._takes(state))
        )

    def _is_same(self, state: Tensors) -> bool:
        return (
            len(self._state) == len(state)
            and all(map(is_, self._state, state.values()))
            and [*map(_PLACE, self._state)] == self._places
        )

    def _takes(self, state: Tensors) -> bool:
        """Whether what is compiled serves other parameters, which are handed to it from now on."""
        if self._chosen is None or _lies([*state.values()]) != self._lies:
            return False
        self._state = list(state.values())
        self._places, self._given = [*map(_PLACE, self._state)], self._chosen(self._state)
        return True

    def __call__(self, inputs: Tensors) -> Sequence[Tensor]:
        """The outputs of inputs that fit."""
        if not self._in_inference:
            return self._function(*inputs.values(), *self._given)
        # Where no call counts the versions of what it makes, each takes less; outputs are tensors like any other.
        with torch.inference_mode():
            values = self._function(*inputs.values())
        return [x.clone() if new else x for x, new in zip(values, self._new, strict=True)]


def _layout(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.dtype


def _lies(state: Sequence[Tensor]) -> tuple[Any, ...]:
    """How parameters lie, and which of them are the same."""
    first: dict[int, int] = {}
    return tuple((first.setdefault(id(x), place), *_layout(x)) for place, x in enumerate(state))


def _chosen(places: Sequence[int]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    return lambda state: [state[place] for place in places]


class _Sending:
    """The communicator of a run that is written down."""

    def __init__(self, comm: Any, calls: Calls, seen: Seen) -> None:
        self._comm, self._calls, self._seen = comm, calls, seen
        self._say = comm.at

    def at(self, where: str) -> None:
        self._say(where)
        self._calls.at = (self._say, where)
        self._calls.region += 1

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name in SENDING:
            found = self._told(found)
            setattr(self, name, found)
        elif name not in ASKED:
            self._calls.goes_by(f"comm.{name}")
        return found

    def _told(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._seen.unseen():
                found = method(*args, **kwargs)
                self._calls.sent(method, args, kwargs, found)
            return found

        return call
