"""Batches and outputs as pytrees, by torch's own: its specs say how what a model returns is put together.

Torch's pytrees see into lists, tuples, dicts, and what libraries registered (transformers' outputs). Here they see into
objects of a script's own classes, too, when such an object with tensors in it is met: a dataclass, a dict with
attributes, a distribution, whatever has attributes. Their tensors, numbers, texts, sizes and containers are leaves and
branches, as is what else they hold; dtypes and devices are data of the spec. No constructor runs when one is put
together.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

# capture: numbers that are read of tensors without data are put together as such tensors.
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

# capture: batches and outputs are pytrees, and torch.export's own specs say how HuggingFace outputs are rebuilt.
from torch.utils import _pytree as pytree

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.warned import without_warnings

tree_unflatten = pytree.tree_unflatten

_OTHERS = ("autopar", "transformers", "torch", "builtins", "collections", "numpy")
"""Packages whose classes are their own to register; torch's distributions are not registered."""
_BASES = (object, dict, types.SimpleNamespace)
_WRITTEN_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_MOST_NESTED = 16
_AS_DATA = (torch.dtype, torch.device)
_PLAIN = (int, float, complex, bool, str, type(None))


def tree_flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Leaves, and the spec that `tree_unflatten` puts them together by. is_leaf: what is not looked into."""
    see_into(tree)
    return pytree.tree_flatten(tree, is_leaf=is_leaf)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree of what the function makes of each leaf."""
    see_into(tree)
    return pytree.tree_map(function, tree)


def tree_leaves(tree: Any) -> list[Any]:
    """In the order of `tree_flatten`."""
    return tree_flatten(tree)[0]


def tree_leaves_with_path(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with dotted paths, in the order of `tree_flatten`."""
    see_into(tree)
    return _leaves_with_path(tree, prefix)


def _leaves_with_path(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    items: list[tuple[Any, Any]]
    if type(tree) in _KNOWN:
        items = list(_parts(tree).items())
    elif isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        items = list(zip(getattr(tree, "_fields"), tree, strict=True))  # noqa: B009 (a namedtuple)
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    elif len(leaves := pytree.tree_leaves(tree)) != 1 or leaves[0] is not tree:
        items = list(enumerate(leaves))
    else:
        yield prefix, tree
        return
    for key, value in items:
        yield from _leaves_with_path(value, f"{prefix}.{key}" if prefix else str(key))


def output_names(spec: Any, count: int) -> tuple[str, ...]:
    """A dotted name per leaf of an output spec: `loss`, `logits`; `output` for a bare tensor."""
    tree = pytree.tree_unflatten(list(range(count)), spec)
    names = [""] * count
    for path, index in tree_leaves_with_path(tree):
        names[index] = path or "output"
    return tuple(names)


def register_container(
    kind: Any, take: Callable[[Any], tuple[list[Any], Any]], make: Callable[[list[Any], Any], Any], name: str = ""
) -> None:
    """Let pytrees see into a class: `take` gives the tensors of an object and the rest of it, as JSON has it; `make` an
    object of such tensors and such a rest.
    """

    def with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        values, rest = take(value)
        return [(pytree.SequenceKey(i), x) for i, x in enumerate(values)], rest

    pytree.register_pytree_node(
        kind,
        take,
        lambda values, rest: make(list(values), rest),
        serialized_type_name=name or f"{kind.__module__}.{kind.__name__}",
        flatten_with_keys_fn=with_keys,
    )


class ReadNumber:
    """A number that a forward reads of a tensor and hands out: a leaf in a spec, and put together the number itself."""

    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _as_read(values: list[Any], _rest: Any) -> Any:
    (value,) = values
    if not isinstance(value, torch.Tensor):
        return value
    is_traced = value.is_meta or isinstance(value, FakeTensor | FunctionalTensor)
    return ReadNumber(value) if is_traced else value.item()


register_container(ReadNumber, lambda number: ([number.value], None), _as_read, "autopar.ReadNumber")


# -- objects of a script's own classes

_KNOWN: set[type] = set()


def see_into(tree: Any) -> None:
    """Register the classes of the objects in a tree that hold tensors."""
    _holds_tensors(tree, _MOST_NESTED)


def _holds_tensors(tree: Any, depth: int) -> bool:
    kind = type(tree)
    if issubclass(kind, torch.Tensor):
        return True
    if kind in _PLAIN or not depth:
        return False
    is_seen = kind in pytree.SUPPORTED_NODES or issubclass(kind, tuple)
    if not is_seen and not _is_container(kind):
        return False
    if is_seen and kind not in _KNOWN and not issubclass(kind, (Mapping, list, tuple)):  # somebody else knows it
        return True
    inner = tree if isinstance(tree, (list, tuple)) else [*_items(tree).values(), *_attributes(tree).values()]
    found = [_holds_tensors(each, depth - 1) for each in inner]  # all of them: each may be of another class
    if any(found) and not is_seen:
        _know(kind)
    return any(found)


def _is_container(kind: type) -> bool:
    """Whether objects of a class may be taken apart: it is a script's own, and no module, function or tuple."""
    if issubclass(kind, (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, type, tuple, list, Iterator)):
        return False
    owners = {base.__module__.partition(".")[0] for base in kind.__mro__ if base not in _BASES}
    is_own = kind.__module__.startswith("torch.distributions.") or not owners & set(_OTHERS)
    return is_own and _base(kind) in _BASES


def _base(kind: type) -> Any:
    """The first class, of those that it is made of, that is not written in Python."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _WRITTEN_IN_PYTHON)


def _know(kind: type) -> None:
    if kind in pytree.SUPPORTED_NODES:
        return
    name = f"{kind.__module__}.{kind.__qualname__}"
    taken = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    while name in taken:  # a class that was defined anew, in a notebook or a function
        name += "'"
    _KNOWN.add(kind)
    register_container(kind, _take, lambda values, rest: _make(kind, values, rest), name)


def _items(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds beside its items: slots, then the others. No property of its class runs."""
    found: dict[str, Any] = {}
    for name, slot in _slots(type(value)).items():
        with contextlib.suppress(AttributeError):  # it has no value
            found[name] = slot.__get__(value)
    own = getattr(value, "__dict__", None)
    if own is not None and own is not value:
        found.update(own)
    return found


def _slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        said = vars(base).get("__slots__", ())
        found |= {name: vars(base).get(name) for name in ([said] if isinstance(said, str) else said)}
    return {name: each for name, each in found.items() if isinstance(each, types.MemberDescriptorType)}


def _parts(value: Any) -> dict[str, Any]:
    """The items and attributes that are leaves, or hold them."""
    found = _items(value)
    found.update({name: each for name, each in _branches(value).items() if name not in found})
    return found


def _branches(value: Any) -> dict[str, Any]:
    """The attributes among them. Of a size its numbers, so that batches of other sizes are others."""
    attributes = _attributes(value).items()
    return {name: tuple(x) if isinstance(x, torch.Size) else x for name, x in attributes if not isinstance(x, _AS_DATA)}


def _take(value: Any) -> tuple[list[Any], Any]:
    items, attributes = _items(value), _attributes(value)
    bad = next((key for key in items if type(key) not in (str, int)), None)
    if bad is not None:
        raise AutoparError(
            f"the keys of a {type(value).__name__} that the model takes or returns are texts or numbers",
            values=f"{bad!r} is none",
            remedy="return tensors under plain string keys",
        )
    branches = {name: each for name, each in _branches(value).items() if name not in items}
    sizes = [name for name in branches if isinstance(attributes[name], torch.Size)]
    rest = {name: _to_data(each) for name, each in attributes.items() if isinstance(each, _AS_DATA)}
    # Where attributes are the items (`self.__dict__ = self`).
    is_itself = getattr(value, "__dict__", None) is value
    return [*items.values(), *branches.values()], [list(items), list(branches), sizes, rest, is_itself]


def _make(kind: type, values: list[Any], rest: Any) -> Any:
    keys, branches, sizes, others, is_itself = rest
    made: Any = _base(kind).__new__(kind)
    if is_itself:
        made.__dict__ = made
    for key, value in zip(keys, values):
        dict.__setitem__(made, key, value)
    slots = _slots(kind)
    for name, value in [*zip(branches, values[len(keys) :]), *((n, _of_data(x)) for n, x in others.items())]:
        if name in sizes and all(type(x) is int for x in value):
            value = torch.Size(value)
        if name in slots:
            slots[name].__set__(made, value)
        else:
            made.__dict__[name] = value
    return made


def _to_data(value: Any) -> list[str]:
    return [type(value).__name__, str(value).removeprefix("torch.")]


def _of_data(content: Sequence[str]) -> Any:
    kind, text = content
    return torch.device(text) if kind == "device" else torch.empty(0, dtype=getattr(torch, text)).dtype


# -- specs as text


def dump_treespec(spec: Any) -> str:
    """A pytree spec as text (plan files)."""
    for kind in _namedtuples(pytree.tree_unflatten([None] * spec.num_leaves, spec)):
        _register_namedtuple(kind)
    with without_warnings():
        return pytree.treespec_dumps(spec)


def load_treespec(text: str) -> Any:
    """The inverse of `dump_treespec`. Runs and imports nothing: classes are looked for in what is imported already.

    Raises:
        AutoparError: the text names a class that is not there.
    """
    if "__enum__" in text:
        raise AutoparError("the model's output holds an enumeration", remedy="return tensors under plain string keys")
    for name in re.findall(r'"([\w.<>]+)', text.replace("\\", "")):
        if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE and (kind := _imported_class(name)) is not None:
            if issubclass(kind, tuple):
                _register_namedtuple(kind)
            else:
                _know(kind)
    try:
        return pytree.treespec_loads(text)
    except (NotImplementedError, KeyError) as error:
        raise AutoparError(
            "the class of the model's output is not known in this process",
            values=str(error),
            remedy="define it at the top level of a module, and import the module before loading the plan",
        ) from error


def _namedtuples(tree: Any) -> Iterator[type]:
    """The classes of the named tuples in a tree."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield type(tree)
    parts = _parts(tree) if type(tree) in _KNOWN else tree
    children = parts.values() if isinstance(parts, Mapping) else parts if isinstance(parts, (list, tuple)) else ()
    for child in children:
        yield from _namedtuples(child)


def _register_namedtuple(kind: type) -> None:
    """Give a named tuple the name under which torch writes it into specs: torch knows none for a user's class."""
    if kind not in pytree.SUPPORTED_SERIALIZED_TYPES:
        pytree._register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")


def _imported_class(name: str) -> type | None:
    """The class of a container `module.Class`, or of a class inside of one, if its module is imported."""
    words = name.split(".")
    for length in range(len(words) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(words[:length]))
        for word in words[length:] if found is not None else ():
            found = vars(found).get(word) if hasattr(found, "__dict__") else None
        if isinstance(found, type):
            is_namedtuple = issubclass(found, tuple) and hasattr(found, "_fields")
            is_data = is_namedtuple or (_is_container(found) and not hasattr(found, "__del__"))
            return found if is_data else None
    return None
