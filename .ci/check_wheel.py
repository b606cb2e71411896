"""Build the wheel, without network, and look into it: every source file is there once, and nothing else.

The two links `autopar/passes` and `autopar/runtime` must have become plain folders of `autopar` in it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKS = {"autopar/passes": "../passes", "autopar/runtime": "../runtime"}


def main() -> int:
    """Build, compare, report; 1 when something is missing or does not belong."""
    problems = [
        f"{link} must be a symbolic link to {target}"
        for link, target in LINKS.items()
        if not (ROOT / link).is_symlink() or (ROOT / link).readlink().as_posix() != target
    ]
    with tempfile.TemporaryDirectory() as scratch:
        names = build_and_list(Path(scratch))
    expected = expected_files()
    problems += [f"missing from the wheel: {name}" for name in sorted(expected - names)]
    problems += [f"does not belong into the wheel: {name}" for name in sorted(names - expected)]
    print("\n".join([*problems, f"wheel: {len(names)} files, {len(problems)} problems"]))
    return 1 if problems else 0


def build_and_list(scratch: Path) -> set[str]:
    """Build from a copy of the sources (setuptools leaves `build/` behind, and stale files in it would be packed)."""
    source = scratch / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in ("autopar", "passes", "runtime"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(scratch), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        sys.exit(f"the wheel does not build:\n{built.stdout}\n{built.stderr}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def expected_files() -> set[str]:
    """Each source and data file of the repository, under the name it is imported by."""
    expected = {"autopar/py.typed"}
    for pattern in (
        "autopar/**/*.py",
        "autopar/machine/data/**/*",
        "autopar/cli/models/data/*",
        "autopar/views/assets/*",
        "passes/**/*.py",
        "runtime/**/*.py",
    ):
        for path in ROOT.glob(pattern):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and not name.startswith(tuple(f"{link}/" for link in LINKS)):
                expected.add(name if name.startswith("autopar/") else f"autopar/{name}")
    return expected


if __name__ == "__main__":
    sys.exit(main())
