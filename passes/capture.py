"""capture: an unmodified model and a batch become a program of one region.

Requires: a `torch.nn.Module` and the keyword arguments of one call of its `forward`.
Ensures: phase `captured`; one region `model`, one call; ATen operators before dispatch (attention is still one node);
    everything on the meta device; no in-place operators: buffers that forward changes are `updates`; nothing of the
    user's model is changed.

    forward(input_ids) of LlamaForCausalLM  →  region model: embedding, linear, …; call 0: model@-(%input_ids)
"""

from __future__ import annotations

import functools
import keyword
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.hooks import hooks_inside
from autopar.base.huggingface import caches, huggingface
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.transforms import by_autograd
from autopar.ir.program import Program
from autopar.ir.told import BUFFER, ToldNeeded
from autopar.operators import own_gradients
from autopar.passes import inner_gradients, mutation, seeds
from autopar.passes.blocks import words
from autopar.passes.blocks.marks import MARKS
from autopar.passes.blocks.trace import Blocks
from autopar.passes.branches import Branches, going, ways_of
from autopar.passes.by_value import ByValue, candidates
from autopar.passes.carried import Carries
from autopar.passes.checks import ChecksPass
from autopar.passes.chosen_functions import Chosen
from autopar.passes.chosen_operators import FIRST, SECOND
from autopar.passes.counted_rows import CountedRows
from autopar.passes.emptied import (
    emptied,
    held_values,
    marks_values,
    measured_values,
    put_buffer,
    traced_copy,
    values_of,
)  # fmt: skip
from autopar.passes.experts import as_operators
from autopar.passes.exported import SizesByValues, graph_modules, origin_of
from autopar.passes.fixed_slices import whole_numbers
from autopar.passes.functional import by_one_name, make_functional
from autopar.passes.kept import Kept, Unwatched, may_go_by
from autopar.passes.not_traced import asks_for_values, capture_error, with_line
from autopar.passes.observers import Observers
from autopar.passes.one_region import to_program
from autopar.passes.packed import Packed
from autopar.passes.plain_reads import PlainReads
from autopar.passes.ragged import Ragged
from autopar.passes.read_numbers import Numbers
from autopar.passes.reassigned import Reassigned
from autopar.passes.recurrent import Packs
from autopar.passes.retraced import retraced
from autopar.passes.tables_of_lengths import by_positions
from autopar.passes.told import Telling, rows_among, start_of, with_told
from autopar.passes.usual import Checked, Decides, Usual
from autopar.passes.written_down import WrittenDown

logger = logging.getLogger("autopar.capture")

LEAST_BLOCKS = 2
"""Blocks for which it is worth looking whether one repeats another."""
_SLIPS = (TypeError, AttributeError, KeyError, IndexError, NameError)
"""What Python says where a model's code for compilers, which eager does not run, is not right."""


def capture(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    precision: torch.dtype | None = None,
    training: bool = True,
    tells_ways: bool = False,
    in_parts: bool = False,
    in_stages: bool = False,
    like: Program | None = None,
) -> Program:
    """Trace `model(**inputs)` on fake tensors: nothing is computed but what the model makes of Python's own numbers.

    Args:
        inputs: keyword arguments; the global batch. Tensors may be on any device; everything else is a constant.
        precision: compute dtype of the floating-point parameters and inputs; None keeps the model's own.
        training: whether gradients are wanted (dropout follows each module's own mode).
        tells_ways: whether the program may say which way branches go that values decide (`branches.py`), to be run
            anew where they go another one.
        in_parts: whether these are rows of a batch that comes in microbatches: that their numbers are finite, and what
            is asked of inputs, is taken for granted; other ways have to be alike in all of them (`batching.py`).
        in_stages: whether stages of a pipeline compute it: as of parts, nothing is carried from step to step.
        like: a program of the same model whose branches go the ways that this one's are to go.

    Raises:
        AutoparError: control flow that depends on the data (names the model's line), or a model that will not trace.
    """
    flat, spec = compat.tree_flatten(dict(inputs))
    names = _input_names(inputs)
    carries = tells_ways and not (in_parts or in_stages)

    def batch(mode: compat.FakeTensorMode) -> Mapping[str, Any]:
        arguments: Mapping[str, Any] = compat.tree_unflatten([emptied(x, precision, mode) for x in flat], spec)
        return arguments

    in_blocks = True

    def trace(chosen: Chosen) -> Program:
        nonlocal in_blocks  # once it was traced whole, other traces are, which have to say the same
        program = None
        # What a block does to another object that all are given is not seen of the block that stands for others.
        states = caches.states_among(inputs)
        if in_blocks and not start_of(model).wanted.held and all(caches.of_blocks(inputs[name]) for name in states):
            with suppress(AutoparError):  # the whole trace says it, if it is not the usual case that it takes
                program = _with_repeated_blocks(
                    model, precision, batch, names, chosen, (bool(states), carries, rows_among(inputs))
                )
        in_blocks = program is not None
        return (
            _whole(model, precision, batch, names, inputs, chosen, (tells_ways, in_parts, carries), training)
            if program is None
            else program
        )

    others = seeds.others(model)

    def again(end: str) -> Program:
        """Where others draw what lies at an end."""
        for each in others:
            each.put(end)
        return trace(Chosen(FIRST))

    wants = any(isinstance(x, torch.Tensor) and x.requires_grad for x in flat)
    ways = nullcontext() if like is None else going(model, [way for way, _ in like.branches])
    with compat.exclusive(), by_autograd(), own_gradients.kept(wants) if training else nullcontext(), ways:
        with seeds.others_kept(others):
            before, chosen = [each.text() for each in others], Chosen(FIRST)
            program = trace(chosen)
            # Other threads may draw from them, too.
            drew = [each.name for each, text in zip(others, before, strict=True) if each.text() != text]
            if drew and not all(say_the_same(program, again(end)) for end in seeds.ENDS):
                raise AutoparError(
                    f"{type(model).__name__} draws from {drew[0]} in forward(): a program would repeat one draw",
                    remedy="draw with torch (torch.rand, torch.randn, …), or outside of forward(), and pass the "
                    "numbers in",
                )
            if chosen.numbers and not say_the_same(program, trace(Chosen(FIRST))):
                raise AutoparError(
                    f"{type(model).__name__} returns a number of Python's in forward() that is another one each time",
                    remedy="return a tensor, or take the number (a time, a counter) outside of forward()",
                )
            if chosen.used and not say_the_same(program, trace(Chosen(SECOND))):
                raise AutoparError(
                    f"{type(model).__name__} asks in forward() how many rows a mask chooses, which values say",
                    remedy="count them by a tensor, mask.sum(), or choose them outside of forward()",
                )
    program = by_positions(program, model, inputs)
    return replace(program, training=training, shown=caches.shown_among(inputs))


def say_the_same(one: Program, other: Program) -> bool:
    """Whether two traces say the same: what Python computed meanwhile stands in them as numbers."""
    (first, values), (second, others) = _numbered(one), _numbered(other)
    return first == second and len(values) == len(others) and all(map(torch.equal, values, others))


def _numbered(program: Program) -> tuple[list[str], list[torch.Tensor]]:
    """A program's lines with numbers for the names of values and constants, which count what a trace made and dropped;
    and the constants in this order.
    """
    text = str(program)
    slots = [name for name in re.findall(r"^ *slot (\w+):", text, re.MULTILINE) if name in program.constants]
    numbers = {name: f"%c{number}" for number, name in enumerate(slots)}
    numbers |= {f"c_{name}": number for name, number in numbers.items()}
    lines: list[str] = []
    for line in text.splitlines():
        if made := re.match(r"\s*(\w+) = ", line):
            numbers[made[1]] = f"%{len(lines)}"
        lines.append(re.sub(r"(?<![\w.])\w+", lambda word: numbers.get(word[0], word[0]), line))
    return lines, [program.constants[name] for name in dict.fromkeys((*slots, *sorted(program.constants)))]


def _with_repeated_blocks(
    model: nn.Module,
    precision: torch.dtype | None,
    batch: Callable[[compat.FakeTensorMode], Mapping[str, Any]],
    names: list[str | None],
    chosen: Chosen,
    options: tuple[bool, bool, frozenset[int]],
) -> Program | None:
    """The program, each distinct block traced once; None where the model has no such blocks, or is to be traced whole:
    where buffers change, values are left on modules or blocks are told numbers, and what does not trace, so that the
    whole trace tells what is wrong. options: whether blocks get a cache; whether values may be left; rows of inputs.
    """
    with_cache, carries_values, rows = options
    blocks, start = Blocks(model, with_cache=with_cache), start_of(model)
    if len(blocks.paths) < LEAST_BLOCKS or any(hooks_inside(model)):
        return None
    watched = may_go_by(model)
    while True:
        try:
            mode = compat.fake_mode()
            clone, arguments = traced_copy(model, precision, mode, blocks.stand_ins()), batch(mode)
            counted = CountedRows(chosen, numbers := Numbers())
            if start.wanted:
                put_buffer(clone, BUFFER, start.wanted.length, mode)
            kept = Kept(clone, (), watched)
            telling = Telling(clone, values_of(model), start, start.wanted, numbers, rows)
            carries = Carries(clone, numbers, (), telling.made, Observers(clone))
            clone.forward = blocks.within(clone)
            clone.forward = kept.within(counted.within(Reassigned(clone, in_blocks=True).within(clone.forward)))
            clone.forward = carries.within(clone.forward) if carries_values else clone.forward
            clone.forward = Ragged(numbers).within(telling.within(clone.forward))
            watching = blocks.watched(clone, telling.heard)
            with watching, words.noted(clone), huggingface.training_capture(clone), as_operators(clone):
                draws, checks = seeds.Seeds(type(model).__name__), ChecksPass(clone)
                modes = (numbers, draws, checks, chosen, counted, PlainReads(counted), *telling.if_wanted)
                with compat.traced_in(mode), ExitStack() as entered:
                    for each in modes:
                        entered.enter_context(each)
                    exported = torch.export.export(clone, (), dict(arguments), strict=False)
                if carries.carried or telling.asks(MARKS):
                    return None
                if inner_gradients.is_within(exported):
                    return None  # they go through blocks, which have to be there
                written = [
                    n for module in graph_modules(exported.graph_module) for n in module.graph.nodes
                    if mutation.writes(n)
                ]  # fmt: skip
                if written:
                    blocks.check_written(written)
                    exported = _without_writes(exported, arguments)
            program = with_told(to_program(model, precision, exported, names, blocks), telling.told)
            return replace(program, notes=(*program.notes, *kept.notes))
        except Unwatched:
            continue
        except AutoparError as error:
            raise with_line(error) from error.__cause__
        except Exception as error:
            if not blocks.learns(error):
                logger.info("tracing the model whole: %s", error)
                return None
            logger.info("tracing the model again: %s", error)


def _whole(
    model: nn.Module,
    precision: torch.dtype | None,
    batch: Callable[[compat.FakeTensorMode], Mapping[str, Any]],
    names: list[str | None],
    inputs: Mapping[str, Any],
    chosen: Chosen,
    ways: tuple[bool, bool, bool],
    training: bool,
) -> Program:
    """The program, everything traced. Where values of inputs decide what is done, it is for these alone, or for the
    usual case; those of tokens, which choose rows of a table, differ in every batch, so they decide nothing.
    """
    values = candidates(inputs)
    knows_made = bool(values)  # Values of what the forward makes itself are looked at where they are asked for.
    wrong: AutoparError | None = None
    as_eager, packs, kept_values = False, False, None  # As eager: code that asks whether it is compiled is told no.
    changed: Decides | None = None
    held = held_values(model)
    now = {**held, **measured_values(inputs), **marks_values(inputs)}
    # What may repeat a call at once, without gradients, is told that its batch is otherwise: it does not wait for it.
    tells_ways, in_parts, may_carry = ways
    leaves = tells_ways and not in_parts and (training or bool(ways_of(model)))
    files: list[dict[str, Any]] = []
    start = start_of(model)
    wanted, watched = start.wanted, may_go_by(model)
    while True:
        mode, usual = compat.fake_mode(), Usual(measured_values(inputs), marks_values(inputs), held, leaves)
        known = ByValue(values, leaves, usual.takes_buffer)
        clone = traced_copy(model, precision, mode)
        counted, kept = CountedRows(chosen, numbers := Numbers(), usual), Kept(clone, wanted.held, watched)
        if wanted:
            put_buffer(clone, BUFFER, wanted.length, mode)
        telling = Telling(clone, values_of(model), start, wanted, numbers, rows_among(inputs))
        carries = Carries(clone, numbers, wanted.held, telling.made, observers := Observers(clone))
        reassigned = Reassigned(clone)
        clone.forward = kept.within(counted.within(reassigned.within(observers.within(clone.forward))))
        clone.forward = telling.within(carries.within(clone.forward) if may_carry else clone.forward, carries)
        clone.forward = compat.uncompiled()(clone.forward) if as_eager else clone.forward
        clone.forward = _given(known, chosen, usual.guarding(clone), clone, held if knows_made and not values else {})
        clone.forward = Packed(chosen, usual).within(clone.forward) if packs else clone.forward
        clone.forward = Ragged(numbers, usual).within(clone.forward)
        branches = Branches(clone, now, usual if in_parts or not tells_ways else None, tells_ways)
        clone.forward = branches.within(clone)
        clone.forward = (written := WrittenDown()).within(clone.forward)
        asking = (known,) if values or knows_made else ()
        modes = (chosen, counted, usual, *asking, Checked(usual), PlainReads(counted), written, telling)
        try:
            with compat.traced_in(mode), whole_numbers(numbers, files):
                exported = _export(clone, batch(mode), branches, numbers, *modes)
        except ToldNeeded as needed:
            if wanted == (wanted := wanted.with_needed(needed)):
                raise
            continue
        except Unwatched:
            continue
        except AutoparError as error:
            if changed is not None and compat.is_data_dependent(error.__cause__ or error):
                raise changed from error
            if isinstance(error, Packs) and not packs:
                packs, kept_values = True, values  # lengths are read, at first, as numbers that nobody knows
                values = {n: value for n, value in values.items() if n not in known.decided}
                continue
            if kept_values is not None:
                values, kept_values = kept_values, None
                continue
            if not known.decided:
                if not knows_made and asks_for_values(error):
                    knows_made, wrong = True, wrong or error
                    continue
                if not as_eager and isinstance(error.__cause__, _SLIPS):
                    as_eager, wrong = True, wrong or error
                    continue
                raise wrong or error from None
            # What is not to be had for these values may be for all: targets that are selected, and their lengths.
            values, wrong = {n: value for n, value in values.items() if n not in known.decided}, wrong or error
            continue
        differing = known.looked_up & known.decided.keys()
        if not differing:
            try:
                program = to_program(model, precision, exported, names, None, branches.taken, carries.carried)
                program, kept.carried = with_told(usual.noted(program), telling.told), carries.names
                break
            except Decides as error:
                if changed is not None:
                    raise
                # The number is read in each step, then.
                leaves = tells_ways
                changed, files = error, list(usual.asked_by.values())
                held = {name: buffer for name, buffer in held.items() if name not in usual.asked_of}
                continue
            except SizesByValues as error:
                if knows_made:
                    raise wrong or error from None
                knows_made, wrong = True, error
                continue
        values = {name: value for name, value in values.items() if name not in differing}
    notes = tuple(
        f"for these values of {name}, which decide what is done ({line}): others are planned for anew"
        for name, line in sorted(known.decided.items())
    )
    return replace(
        program,
        by_value=tuple(sorted(known.decided)),
        notes=(*program.notes, *notes, *branches.notes, *kept.notes, *written.notes, *reassigned.notes),
    )


def _given(
    known: ByValue, chosen: Chosen, forward: Callable[..., Any], model: nn.Module, held: Mapping[str, torch.Tensor]
) -> Callable[..., Any]:
    """A forward that tells which tensors its inputs are, and what the given buffers hold.

    Raises:
        AutoparError: it returns a number of values that are known: where they are not, it is read.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        for name, leaf in compat.tree_leaves_with_path(kwargs):
            known.give(name, leaf)
        for name, buffer in model.named_buffers():
            if name in held:
                known.give_buffer(name, buffer, held[name])
        chosen.numbers = chosen.used = False  # by traces before this one, of which nothing is left
        found = forward(*args, **kwargs)
        if chosen.numbers and known.decided:
            raise AutoparError(
                "forward() returns a number that values of its inputs say, neither a tensor nor a text",
                remedy="return it as a tensor (mask.sum(), without .item())",
            )
        return found

    return run


def _export(
    model: nn.Module, arguments: Mapping[str, Any], branches: Branches, numbers: Numbers, *modes: TorchFunctionMode
) -> torch.export.ExportedProgram:
    """modes: of functions, entered in this order, behind those of branches and numbers."""
    try:
        with ExitStack() as entered:
            entered.enter_context(words.noted(model))
            entered.enter_context(huggingface.training_capture(model))
            entered.enter_context(as_operators(model))
            for mode in (branches, numbers, seeds.Seeds(type(model).__name__), ChecksPass(model), *modes):
                entered.enter_context(mode)
            hook = model.register_forward_hook(lambda _, __, output: compat.see_into(output))
            entered.callback(hook.remove)
            exported = torch.export.export(model, (), dict(arguments), strict=False)
        if inner_gradients.is_within(exported):
            inner_gradients.prepare(exported)
    except AutoparError as error:
        raise with_line(error) from error.__cause__
    except Exception as error:
        raise capture_error(model, arguments, error) from error
    if any(mutation.writes(node) for module in graph_modules(exported.graph_module) for node in module.graph.nodes):
        parameters = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "PARAMETER"}
        mutation.check_hidden_writes(exported.graph_module, parameters, origin_of)
        try:
            exported = _without_writes(exported, arguments)
        except AutoparError:
            raise
        except Exception as error:
            raise capture_error(model, arguments, error) from error
    return exported


def _without_writes(
    exported: torch.export.ExportedProgram, arguments: Mapping[str, Any]
) -> torch.export.ExportedProgram:
    modules = list(graph_modules(exported.graph_module))
    for module in modules:
        mutation.without_idle_dropout(module)
        mutation.detached_as_values(module)
        mutation.part_detached(module, origin_of)
        mutation.detach_operands(module)
    by_one_name(exported)
    if make_functional(exported):
        return exported
    # torch writes a program of its own here and runs it, with these names as they are.
    if unsafe := [name for name in arguments if not name.isidentifier() or keyword.iskeyword(name)]:
        raise AutoparError(
            "a model that writes into its buffers cannot be traced with inputs whose names torch cannot write down",
            values=", ".join(repr(name[:80]) for name in unsafe[:3]),
            remedy="rename them: letters, digits and underscores",
        )
    exported = retraced(exported)
    mutation.check(exported.graph_module.graph, origin_of)
    return exported


def _input_names(inputs: Mapping[str, Any]) -> list[str | None]:
    """A name per leaf of the inputs: `input_ids`, `images.0`; None for leaves that are no tensors."""
    names: list[str | None] = []
    for path, value in compat.tree_leaves_with_path(dict(inputs)):
        names.append(path if isinstance(value, torch.Tensor) else None)
    return names
