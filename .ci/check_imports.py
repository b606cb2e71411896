"""Check the order of the house (docs/architecture.md); prints each breach as ``file:line: rule``.

- A room imports only rooms that stand before it in `ORDER`. Imports inside functions and for types count, and links are
  followed: `autopar/passes` and `autopar/runtime` are rooms like the others.
- No files import each other in a circle.
- A file of `passes/` that `pipeline.py` lists imports none of the others; a folder of `passes/` serves `OWNERS` only.
- Imports inside functions: in `api` and `cli`, in `base/torch_compat`, and of `OPTIONAL` packages.
- torch's private parts are imported in base/torch_compat only, transformers and its kin in base/huggingface and
  integrations only; the environment is read in base only.
- Nothing lies in `autopar/` but the rooms; every name on a list here exists.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("autopar", "passes", "runtime", "tests", "examples", "benchmarks")
ORDER = (
    ("base", "solver"), ("machine",), ("ir",), ("operators", "strategies"), ("cost",), ("passes", "runtime"),
    ("pipeline",), ("planner",), ("views",), ("api",), ("cli", "integrations"),
)  # fmt: skip
"""Rooms from the ground up; those of one floor do not import each other."""
BESIDE = ("__init__.py", "py.typed", "pipeline.py")
OWNERS = {
    "attention": ("fuse_attention",), "batch": ("batching",), "blocks": ("capture", "emptied", "one_region", "seeds"),
    "emission": ("emit", "batching"), "placement": ("place",), "stages": ("split_stages",), "outlining": ("outline",),
    "differentiation": ("differentiate",), "interleaving": ("interleave",),
}  # fmt: skip
"""Who uses a folder of `passes/`, beside the planner and the views, which place and price by themselves."""
OPTIONAL = (
    "matplotlib", "transformers", "peft", "safetensors", "torch", "ortools", "xxhash",
    "autopar.runtime.kernels", "autopar.solver.compiled_messages", "autopar.solver.compiled_presolve",
    "autopar.solver.large",
    "autopar.base.huggingface.block_cache",
    "autopar.base.huggingface.states",
)  # fmt: skip
"""What functions may import: missing on some machines, or long to load. Ours need Triton, numba, or transformers."""
PRIVATE_TORCH = ("torch.fx.experimental", "torch.testing._internal")
TORCH_COMPAT = "autopar/base/torch_compat/"
HUGGINGFACE = ("autopar/base/huggingface/", "autopar/integrations/")
LATE = ("autopar/api/", "autopar/cli/", TORCH_COMPAT)


class Reached(NamedTuple):
    """A name that a file reaches. is_late: by an import inside a function."""

    line: int
    name: str
    is_late: bool = False


def main() -> int:
    """Check every Python file of the repository; 1 when a rule is broken."""
    files, breaches = read()
    modules = {module_of(path): path for path in files if top(path) in ("autopar", "passes", "runtime")}
    floor = {room: number for number, rooms in enumerate(ORDER) for room in rooms}
    edges = {module: dict(edges_of(module, files[path], modules)) for module, path in modules.items()}
    listed = {m.split(".")[2] for m in edges["autopar.pipeline"] if m.startswith("autopar.passes.")}
    breaches += list(of_lists(modules, listed))
    for module, targets in edges.items():
        for target, line in targets.items():
            for rule in of_edge(module, target, floor, listed):
                breaches.append(f"{modules[module]}:{line}: {rule}")
    breaches += [f"{modules[circle[0]]}:1: files import each other: {' -> '.join(circle)}" for circle in circles(edges)]
    for path, reached in files.items():
        breaches += [f"{path}:{line}: {rule}" for line, rule in of_file(path, reached)]
    print("\n".join([*breaches, f"import rules: {len(files)} files, {len(breaches)} breaches"]))
    return 1 if breaches else 0


def read() -> tuple[dict[str, list[Reached]], list[str]]:
    """What all files reach by path, links left out: their files are read at their real places."""
    files, breaches = {}, []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            if relative.startswith(("autopar/passes/", "autopar/runtime/")):
                continue
            try:
                files[relative] = reached_by(ast.parse(path.read_text(encoding="utf-8"), filename=relative))
            except SyntaxError as error:
                breaches.append(f"{relative}:{error.lineno}: {error.msg}")
    return files, breaches


def top(path: str) -> str:
    """The folder on top that a file lies in."""
    return path.split("/", 1)[0]


def module_of(path: str) -> str:
    """The name a file is imported by."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "autopar" else ["autopar", *parts])


def edges_of(module: str, reached: list[Reached], modules: dict[str, str]) -> Iterator[tuple[str, int]]:
    """The files of ours that a file imports, and where; the package itself names all public things, and counts not."""
    if module == "autopar":
        return
    for line, name, _ in reached:
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        if name in modules and name not in (module, "autopar"):
            yield name, line


def of_edge(module: str, target: str, floor: dict[str, int], listed: set[str]) -> Iterator[str]:
    """The rules that an import of one file of ours by another breaks."""
    room, other = module.split(".")[1], target.split(".")[1]
    if room != other and floor.get(other, 99) >= floor.get(room, 99):
        yield f"{room} imports {target}, which does not stand below it"
    if room != "passes" or other != "passes":
        return
    parts, owner = target.split(".")[2:], module.split(".")[2]
    if parts[0] in listed and owner != parts[0]:
        yield f"{parts[0]} is a step of the pipeline; what two passes need is in ir or cost"
    if parts[0] in OWNERS and owner not in (parts[0], *OWNERS[parts[0]]):
        yield f"passes/{parts[0]} serves {' and '.join(OWNERS[parts[0]])} only"


def of_lists(modules: dict[str, str], listed: set[str]) -> Iterator[str]:
    """Names on a list that stand for nothing, and entries of the package that are on none."""
    rooms = {room for rooms in ORDER for room in rooms}
    entries = {p.name for p in (ROOT / "autopar").iterdir() if p.name != "__pycache__"}
    for name in sorted(entries - rooms - set(BESIDE)):
        yield f"autopar/{name}:1: no room: {', '.join(sorted(rooms))}"
    for name in sorted((rooms - {"pipeline"} | set(BESIDE)) - entries):
        yield f".ci/check_imports.py:1: there is no autopar/{name}"
    for name in sorted({*OWNERS, *(owner for owners in OWNERS.values() for owner in owners), *listed}):
        if f"autopar.passes.{name}" not in modules:
            yield f".ci/check_imports.py:1: there is no passes/{name}"


def circles(edges: dict[str, dict[str, int]]) -> Iterator[list[str]]:
    """One circle of each knot of files that reach each other."""
    done: set[str] = set()
    for start in edges:
        if start in done:
            continue
        path, walks = [start], [iter(edges[start])]
        while walks:
            step = next(walks[-1], None)
            if step is None:
                walks.pop()
                done.add(path.pop())
            elif step in path:
                yield [*path[path.index(step) :], step]
                return
            elif step not in done:
                path.append(step)
                walks.append(iter(edges.get(step, {})))


def of_file(path: str, reached: list[Reached]) -> Iterator[tuple[int, str]]:
    """The rules that one file breaks by itself."""
    package = top(path)
    is_kept = package in ("autopar", "passes", "runtime")
    is_early = is_kept and not path.startswith(LATE) and path != "autopar/__init__.py"
    for line, name, is_late in reached:
        if within(name, "passes", "runtime"):
            yield line, f"import autopar.{name}: the folder on top is only where its files lie"
        if is_kept:
            if is_private_torch(name) and not path.startswith(TORCH_COMPAT):
                yield line, f"private torch module {name}; import it in {TORCH_COMPAT}, which says why"
            if within(name, "transformers", "accelerate", "peft") and not path.startswith(HUGGINGFACE):
                yield line, f"{name.partition('.')[0]} is imported in {' and '.join(HUGGINGFACE)} only"
            if within(name, "os.environ", "os.getenv") and not path.startswith("autopar/base/"):
                yield line, "the environment is read in autopar/base only"
        if is_early and is_late and not within(name, *OPTIONAL):
            yield line, f"{name} is imported inside a function"


def reached_by(tree: ast.Module) -> list[Reached]:
    """What a file reaches: by import statements, by calls of import functions, and as attributes of torch and os.

    One walk, by hand: `ast.walk` takes twice as long, and all files are walked on every run.
    """
    found: list[Reached] = []
    left: list[tuple[ast.AST, bool]] = [(tree, False)]
    while left:
        node, is_late = left.pop()
        kind = type(node)
        if kind is ast.Import:
            found += [Reached(node.lineno, alias.name, is_late) for alias in node.names]
        elif kind is ast.ImportFrom:
            assert not node.level, "imports are absolute"
            # `from torch import _C` and `from autopar import passes` reach what they name.
            found += [Reached(node.lineno, f"{node.module}.{alias.name}", is_late) for alias in node.names]
        elif kind is ast.Call:
            if is_import_call(node) and isinstance(node.args[0], ast.Constant):
                found.append(Reached(node.lineno, str(node.args[0].value)))
        elif kind is ast.Attribute:
            if isinstance(node.value, ast.Name) and node.value.id in ("torch", "os"):
                # `torch._guards` needs no import of its own.
                found.append(Reached(node.lineno, f"{node.value.id}.{node.attr}"))
        elif kind is ast.FunctionDef or kind is ast.AsyncFunctionDef:
            is_late = True
        for name in node._fields:
            child = getattr(node, name, None)
            if isinstance(child, ast.AST):
                if child._fields:
                    left.append((child, is_late))
            elif isinstance(child, list):
                left += [(each, is_late) for each in child if isinstance(each, ast.AST)]
    return sorted(found)


def is_import_call(node: ast.Call) -> bool:
    """``importlib.import_module(...)`` or ``__import__(...)``, with an argument."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return bool(node.args) and name in ("import_module", "__import__")


def is_private_torch(module: str) -> bool:
    """True for ``torch._anything`` at any depth, and the public names that torch calls experimental or internal."""
    if not within(module, "torch"):
        return False
    private_part = any(part.startswith("_") and not part.startswith("__") for part in module.split("."))
    return private_part or within(module, *PRIVATE_TORCH)


def within(module: str, *packages: str) -> bool:
    """Whether the module is one of the packages or lies inside one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


if __name__ == "__main__":
    sys.exit(main())
