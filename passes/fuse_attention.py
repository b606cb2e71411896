"""fuse_attention: every scaled dot product attention becomes one operator, `autopar.attention`.

Requires: phase `captured`.
Ensures: the same phase and numbers. A call of `F.scaled_dot_product_attention`, or the product, softmax and product of
    an attention that is written out, is one node; masks are limits (causal, windows, prefixes), padding is `keys`
    [B, T], documents are `documents` and `key_documents` [B, S], and what is left of masks and biases is `bias`;
    repeated key heads are read as they are. What is not understood to the last bit stays as it was.
    `Program.attention` says which is which, and why.

    softmax(q·kᵀ / √d + where(causal & padding, 0, -inf))·v  →  attention(q, k, v, keys=padding, scale=1/√d, right=0)[0]
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.base.torch_compat import tracing
from autopar.ir.folded import read_with_left_out, with_left_out
from autopar.ir.nodes import ROW, copy_graph, dtype_of, shape_of
from autopar.ir.program import AttentionSite, Program
from autopar.ir.region import Region
from autopar.operators.attention_options import AttentionOptions
from autopar.passes.attention.bands import Band
from autopar.passes.attention.build import Builder, Place
from autopar.passes.attention.constants import Constants
from autopar.passes.attention.eager import is_candidate, read_eager
from autopar.passes.attention.found import Form, Found
from autopar.passes.attention.masks import Mask, MaskReader, Unfit
from autopar.passes.attention.ordinary import Ordinary
from autopar.passes.attention.sdpa import read_sdpa

aten = torch.ops.aten
_SDPA = aten.scaled_dot_product_attention.default


def fuse_attention(program: Program) -> Program:
    """Replace what computes attention by the operator, and note what was found."""
    assert program.phase == "captured" and len(program.regions) == 1, "attention is fused in a captured program"
    (region,) = program.regions
    graph, _ = copy_graph(region.graph)
    origins = dict(region.origins)
    fuse = _Fuse(program, region, Builder(graph, origins))
    rows = {node: node.meta.get(ROW) for node in graph.nodes}
    found = [(site, rows[node]) for node in rows if (site := fuse.site(node)) is not None]
    sites = tuple(with_left_out(found, program.folded))
    program = replace(program, attention=sites, notes=(*program.notes, *_notes(sites)))
    if not any(site.fused for site in sites):
        return program
    _drop_dead(graph)
    graph.lint()
    left = {node.name for node in graph.nodes}
    known = {name: origin for name, origin in origins.items() if name in left}
    return _without_unused(program, replace(region, graph=graph, origins=known))


def _notes(sites: Iterable[AttentionSite]) -> Iterable[str]:
    """One for each kind of attention that is left: where, how often, why."""
    left = Counter((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", site.module), site.why) for site in sites if not site.fused)
    for (module, why), count in left.items():
        times = f" ({count} times)" if count > 1 else ""
        yield f"attention in {module or 'the model'}{times} stays as it is written: {why}"


def _drop_dead(graph: fx.Graph) -> None:
    """Drop what nobody reads; dropout, too, which draws for nobody."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not tracing.is_mutable(node):
            graph.erase_node(node)


@dataclass(frozen=True, slots=True)
class _Call:
    """What the operator is given besides queries, keys and values."""

    mask: Mask
    options: dict[str, Any]


class _Fuse:
    """Fuses the attentions of one graph, one after the other."""

    def __init__(self, program: Program, region: Region, build: Builder) -> None:
        self._build = build
        holders = [node for node in build.graph.nodes if node.op == "placeholder"]
        slots = dict(zip(holders, region.slots, strict=False))
        changed = {name for name, _ in program.updates}
        known = {
            node: program.constants[slot.name]
            for node, slot in slots.items()
            if slot.name in program.constants and slot.name not in changed and not program.constants[slot.name].is_meta
        }
        self._constants = Constants(known)
        trusted = {node for node, slot in slots.items() if slot.is_parameter}
        self._masks = MaskReader(build, self._constants, Ordinary(self._constants, trusted))

    def site(self, node: fx.Node) -> AttentionSite | None:
        """Fuse the attention that has this call of SDPA, or this softmax; None for other nodes."""
        if node.target is not _SDPA and not is_candidate(node):
            return None
        form: Form = "sdpa" if node.target is _SDPA else "eager"
        module = self._build.origins.get(node.name, "").partition("(")[0].strip()
        try:
            found = read_sdpa(node, self._build) if form == "sdpa" else read_eager(node, self._build, self._constants)
            call = self._call(found)
        except Unfit as why:
            return AttentionSite(module, form, "", False, str(why))
        what = _what(found, call)
        self._replace(found, call)
        return AttentionSite(module, form, what, True)

    def _call(self, found: Found) -> _Call:
        (batch, heads, queries, _), keys = shape_of(found.q), shape_of(found.k)[2]
        if found.is_causal and found.steps:
            raise Unfit("it is causal and has a mask")
        place = Place(found.node, found.node)
        mask = self._masks.read(found.steps, (batch, heads, queries, keys), place)
        if found.is_causal and keys > 1:
            mask = replace(mask, band=Band(right=0))
        if mask.bias is not None and not _broadcasts(shape_of(mask.bias), (batch, heads, queries, keys)):
            raise Unfit(f"its bias is {list(shape_of(mask.bias))}")
        group = heads // shape_of(found.k)[1]
        said = AttentionOptions(
            found.scale, mask.band.left, mask.band.right, mask.band.prefix, found.softcap, found.dropout_p,
            group=group if group > 1 else None,
        )  # fmt: skip
        numbers = {} if mask.documents is None else {"documents": mask.documents, "key_documents": mask.documents}
        return _Call(mask, {**said.kwargs(), **numbers})

    def _replace(self, found: Found, call: _Call) -> None:
        node, scaled = found.node, found.scaled or {}
        place = Place(node, node)
        for product, source in scaled.items():
            product.replace_all_uses_with(source)
        operands = [found.q, found.k, found.v]
        for position, operand in enumerate(operands):
            while operand in scaled:
                operand = scaled[operand]
            operands[position] = operand
        given = (*operands, call.mask.bias, call.mask.keys, found.sinks)
        while given[-1] is None:
            given = given[:-1]
        both = self._build.make(place, torch.ops.autopar.attention.default, *given, **call.options)
        out = self._build.make(place, operator.getitem, both, 0)
        if found.dims is not None and found.dims != (0, 1, 2, 3):
            dims = found.dims if len(found.dims) == 4 else (found.dims[0], 1, *found.dims[1:])  # one head
            out = self._build.make(place, aten.permute.default, out, list(dims))
        out = self._build.reshaped(place, out, shape_of(node))
        assert dtype_of(out) == dtype_of(node), (out, node)
        node.replace_all_uses_with(out)
        self._build.graph.erase_node(node)


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(own in (1, size) for own, size in zip(shape, wanted, strict=True))


def _what(found: Found, call: _Call) -> str:
    """`causal, window 4096, soft-cap 50, 32 heads on 8`"""
    band, bias = call.mask.band, call.mask.bias
    parts = list(_limits(band))
    parts += ["documents"] * (call.mask.documents is not None)
    parts += ["padding"] * (call.mask.keys is not None)
    if bias is not None:
        parts.append("mask" if dtype_of(bias) == torch.bool else "bias")
    parts += [f"soft-cap {found.softcap:g}"] * bool(found.softcap)
    parts += ["sinks"] * (found.sinks is not None)
    parts += [f"dropout {found.dropout_p:g}"] * bool(found.dropout_p)
    heads, key_heads = shape_of(found.q)[1], shape_of(found.k)[1]
    parts += [f"{heads} heads on {key_heads}"] * (heads != key_heads)
    return ", ".join(parts) if parts else "full"


def _limits(band: Band) -> Iterable[str]:
    if band.right == 0:
        yield "causal"
    if band.left is not None:
        yield f"window {band.left + 1}" if band.right == 0 else f"{band.left} before"
    if band.right:
        yield f"{band.right} after"
    if band.prefix:
        yield f"prefix {band.prefix}"


def _without_unused(program: Program, region: Region) -> Program:
    """The program without slots that nobody reads any more, and without constants that fill no other."""
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    (call,) = program.calls
    kept = [bool(node.users) for node in holders[: len(region.slots)]]
    for node, keep in zip(holders, kept, strict=False):
        if not keep:
            region.graph.erase_node(node)
    slots = tuple(slot for slot, keep in zip(region.slots, kept, strict=True) if keep)
    names = tuple(name for name, keep in zip(call.slots, kept, strict=True) if keep)
    gone = program.constants.keys() - read_with_left_out(names, program.folded)
    return replace(
        program,
        regions=(replace(region, slots=slots),),
        calls=(replace(call, slots=names),),
        constants={name: value for name, value in program.constants.items() if name not in gone},
        variables=tuple(variable for variable in program.variables if variable.name not in gone),
    )
