"""Check the import rules between the folders (docs/architecture.md); prints each breach as ``file:line: rule``.

- the core (autopar/*.py) imports autopar.passes and autopar.runtime only in its entry files;
- passes and runtime never import each other;
- private parts of torch are imported in autopar/torch_compat/ only;
- transformers is imported in autopar/models/huggingface.py only.
Imports under ``if TYPE_CHECKING`` count too: a type is a dependency.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("autopar", "passes", "runtime", "tests", "examples", "benchmarks")
# The files of the core that put the parts together.
ENTRY_FILES = {
    "autopar/__init__.py",
    "autopar/alternatives.py",
    "autopar/api.py",
    "autopar/assembly.py",
    "autopar/backends.py",
    "autopar/cli.py",
    "autopar/comparison.py",
    "autopar/compiled.py",
    "autopar/demo.py",
    "autopar/explain.py",
    "autopar/pipeline.py",
    "autopar/planning.py",
    "autopar/prepared.py",
    "autopar/proof.py",
    "autopar/searching/estimates.py",
    "autopar/searching/families.py",
    "autopar/searching/run.py",
    "autopar/searching/stages.py",
    "autopar/verify.py",
}
PRIVATE_TORCH = ("torch.fx.experimental", "torch.testing._internal")
TORCH_COMPAT = "autopar/torch_compat/"
HUGGINGFACE = "autopar/models/huggingface.py"


def main() -> int:
    """Check every Python file of the repository; 1 when a rule is broken."""
    breaches = []
    num_files = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            # Python 3.13's rglob may walk the two links; their files are read at their real places.
            if relative.startswith(("autopar/passes/", "autopar/runtime/")):
                continue
            num_files += 1
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"), filename=relative)
            except SyntaxError as error:
                breaches.append(f"{relative}:{error.lineno}: {error.msg}")
                continue
            breaches += [f"{relative}:{line}: {rule}" for line, rule in check_file(relative, tree)]
    print("\n".join([*breaches, f"import rules: {num_files} files, {len(breaches)} breaches"]))
    return 1 if breaches else 0


def check_file(relative: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The breaches in one file, as (line, rule)."""
    package = relative.split("/", 1)[0]
    for line, module in imported_modules(relative, tree):
        if package == "autopar" and relative not in ENTRY_FILES and within(module, "autopar.passes", "autopar.runtime"):
            yield line, f"the core imports {module}; only {', '.join(sorted(ENTRY_FILES))} may"
        if package == "passes" and within(module, "autopar.runtime"):
            yield line, f"a pass imports {module}"
        if package == "runtime" and within(module, "autopar.passes"):
            yield line, f"the runtime imports {module}"
        if within(module, "passes", "runtime"):
            yield line, f"import autopar.{module}: the folder on top is only where its files lie"
        if package in ("autopar", "passes", "runtime"):
            if is_private_torch(module) and not relative.startswith(TORCH_COMPAT):
                yield line, f"private torch module {module}; import it in {TORCH_COMPAT}, which says why"
            if within(module, "transformers") and relative != HUGGINGFACE:
                yield line, f"transformers is imported in {HUGGINGFACE} only"


def imported_modules(relative: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every module (or name of a module) that an import statement reaches, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parent = Path(relative).parent.parts[: len(Path(relative).parts) - node.level]
                prefix = ".".join(("autopar", *parent) if parent and parent[0] in ("passes", "runtime") else parent)
                module = f"{prefix}.{module}".strip(".")
            # `from torch import _C` and `from autopar import passes` reach what they name.
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and is_import_call(node) and isinstance(node.args[0], ast.Constant):
            yield node.lineno, str(node.args[0].value)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            # `torch._guards` needs no import of its own.
            yield node.lineno, f"torch.{node.attr}"


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
