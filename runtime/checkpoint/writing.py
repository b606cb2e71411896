"""From what a rank holds to a step in the folder. Files alone, not a word between processes: a thread does it while
training goes on, whose collectives are its own.

    rank-00003.json      rank 3's files are on the disk; this says what is in them, and the hashes
    failed-00003         they are not; this says why

Both lie in the folder that is being written. Rank 0 waits until every rank has left one of them, makes the manifest of
what all say, and renames. A rank that leaves none, and whose files no longer grow, is lost.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint import folders
from autopar.runtime.checkpoint.blocks import Entry, sync_folder, write_file, write_whole
from autopar.runtime.checkpoint.manifest import (
    NAME,
    PLAN,
    ByRank,
    Manifest,
    Run,
    StoredFile,
    StoredGroup,
    StoredOptimizer,
    StoredTensor,
    check,
    files_of,
    optimizers_of,
    tensors_of,
    to_json,
)
from autopar.runtime.checkpoint.tree import names_in

logger = logging.getLogger("autopar")

SEES_WITHIN_S = 30.0
"""How long rank 0 waits to see what is on the disk already: folders of a network show it late."""
LOST_AFTER_S = 300.0
"""How long it waits for ranks that are writing, from when it last saw a file grow."""
_SAID, _FAILED = "rank-", "failed-"


class Row(NamedTuple):
    """The box of a tensor that an entry of a file is."""

    tensor: str
    offsets: list[int]
    sizes: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """A file of a rank, and what the rank holds of such tensors, whoever writes them. rows: of each entry."""

    name: str
    entries: list[Entry]
    rows: list[Row]
    described: dict[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank says. tensors: by section and name: dtype, shape, names, pieces."""

    files: dict[str, StoredFile]
    tensors: dict[str, dict[str, StoredTensor]]
    optimizers: list[StoredOptimizer]
    loader: Any
    random: Any


class OtherFailed(AutoparError):
    """What rank 0 says where another rank failed, which tells by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What this rank has to write of a step, in the folder `made`. trees: of rank 0, which count. plan: its JSON, on
    rank 0, b"" for none.
    """

    made: Path
    step: int
    keep: int
    rank: int
    num_ranks: int
    run: Run
    sections: list[Section]
    optimizers: list[StoredOptimizer]
    trees: dict[str, Any]
    loader: Any
    random: Any
    known: folders.Known
    plan: bytes = b""

    def write(self) -> None:
        """This rank's files, onto the disk.

        Raises:
            OSError: no room.
        """
        found: dict[str, StoredFile] = {}
        tensors: dict[str, dict[str, StoredTensor]] = {}
        for section in self.sections:
            tensors[section.name] = section.described
            if not section.entries:
                continue
            name = f"{section.name}-{self.rank:05d}.safetensors"
            found[name], places = write_file(self.made / name, section.entries)
            for row, (begin, hashes) in zip(section.rows, places, strict=True):
                section.described[row.tensor].pieces.append((name, begin, row.offsets, row.sizes, hashes))
        sync_folder(self.made)
        said = _Written(found, tensors, self.optimizers, self.loader, self.random)
        self._leave(f"{_SAID}{self.rank:05d}.json", to_json(said))

    def fail(self, why: Exception) -> None:
        """Tell rank 0 that this rank does not write its files."""
        with suppress(OSError):  # rank 0 then waits for as long as it does for a lost one
            self._leave(f"{_FAILED}{self.rank:05d}", str(why).encode()[:1000])

    def _leave(self, name: str, content: bytes) -> None:
        """A file that is whole since it is seen."""
        hidden = self.made / f".{name}"
        hidden.write_bytes(content)
        hidden.rename(self.made / name)

    def commit(self, patience_s: float) -> Path:
        """On rank 0: a step of what all ranks wrote.

        patience_s: for ranks that leave nothing.

        Raises:
            OtherFailed: a rank that says so.
            AutoparError: what they wrote does not fit together, or is not seen here.
            OSError: no room.
        """
        manifest = self._manifest(self._said(patience_s))
        if self.plan:
            manifest.files[PLAN] = write_whole(self.made / PLAN, self.plan)
        try:
            check(manifest)
        except ValueError as error:
            raise AutoparError("what the ranks wrote does not fit together", values=str(error)[:600]) from error
        _check_seen(self.made, manifest.files)
        with open(self.made / NAME, "xb") as file:
            file.write(manifest.encoded())
            file.flush()
            os.fsync(file.fileno())
        for rank in range(self.num_ranks):
            (self.made / f"{_SAID}{rank:05d}.json").unlink()
        final = folders.commit(self.made, self.step, self.known)
        try:
            folders.prune(final.parent, self.keep, final)
        except OSError as error:
            logger.warning("autopar: older checkpoints in %s could not be removed: %s", final.parent, error)
        return final

    def discard(self) -> None:
        """On rank 0: nothing is left of it."""
        folders.discard(self.made)

    def _said(self, patience_s: float) -> list[_Written]:
        """What every rank says, once all do."""
        found: dict[int, _Written] = {}
        failed: dict[int, str] = {}
        seen: dict[str, int] = {}
        until, pause_s = time.monotonic() + patience_s, 0.005
        while True:
            with os.scandir(self.made) as listed:
                now = {each.name: each.stat().st_size for each in listed if not each.name.startswith(".")}
            for name in now.keys() - seen.keys():
                if name.startswith(_SAID):
                    value = json.loads((self.made / name).read_bytes())
                    found[int(name[len(_SAID) :].removesuffix(".json"))] = _written(value)
                elif name.startswith(_FAILED):
                    failed[int(name[len(_FAILED) :])] = (self.made / name).read_text(errors="replace")
            missing = [rank for rank in range(self.num_ranks) if rank not in found and rank not in failed]
            if not missing:
                break
            if now != seen:
                until = time.monotonic() + patience_s
            elif time.monotonic() > until:
                raise AutoparError(
                    f"rank 0 does not see what rank {missing[0]} wrote",
                    where=str(self.made),
                    values=f"it waited {patience_s:g} s for {len(missing)} of {self.num_ranks} ranks",
                    remedy="Save into a folder that all machines share; see whether the rank is alive",
                )
            seen = now
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)
        for rank, why in failed.items():
            raise OtherFailed(f"rank {rank} could not write its part: {why}")
        return [found[rank] for rank in range(self.num_ranks)]

    def _manifest(self, found: Sequence[_Written]) -> Manifest:
        stored: dict[str, dict[str, StoredTensor]] = {"model": {}, "state": {}}
        for rank, written in enumerate(found):
            for section, tensors in written.tensors.items():
                for name, tensor in tensors.items():
                    known = stored[section].setdefault(name, StoredTensor(tensor.dtype, tensor.shape, tensor.names, []))
                    if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                        raise AutoparError(
                            f"{name} is {tensor.dtype} {tensor.shape} on rank {rank}, {known.dtype} {known.shape} "
                            "before"
                        )
                    known.pieces.extend(tensor.pieces)
        optimizers = [
            _merged(number, [each.optimizers[number] for each in found]) for number in range(len(self.optimizers))
        ]
        loaders = [each.loader for each in found]
        manifest = Manifest(
            step=self.step,
            run=self.run,
            files={name: file for each in found for name, file in each.files.items()},
            model=stored["model"],
            state=stored["state"],
            optimizers=optimizers,
            loader=_by_rank(loaders) if any(each is not None for each in loaders) else None,
            random=_by_rank([each.random for each in found]),
            **self.trees,
        )
        named = names_in([manifest.schedulers, manifest.extra, manifest.modules, loaders])
        named |= names_in([[each.states, [group.options for group in each.groups]] for each in optimizers])
        if lost := sorted(manifest.state.keys() - named.keys()):
            raise AutoparError(
                f"{lost[0]} is a tensor that rank 0 does not have",
                values=f"{len(lost)} such tensors",
                remedy="What is saved as extra= and of schedulers is rank 0's: hand in the same names on every rank "
                "(with a pipeline, whole tensors)",
            )
        return manifest


def _written(value: Mapping[str, Any]) -> _Written:
    return _Written(
        files_of(value["files"]),
        {section: tensors_of(each) for section, each in value["tensors"].items()},
        optimizers_of(value["optimizers"]),
        value["loader"],
        value["random"],
    )


def _merged(number: int, parts: Sequence[StoredOptimizer]) -> StoredOptimizer:
    """An optimizer of what ranks have of it: ranks of other stages have other parameters, in the same groups."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if (part.kind, len(part.groups)) != (first.kind, len(first.groups)):
            raise AutoparError(
                f"optimizer {number} of rank {rank} is a {part.kind} of {len(part.groups)} groups",
                values=f"rank 0's is a {first.kind} of {len(first.groups)}",
            )
    groups = []
    for at, group in enumerate(first.groups):
        names: dict[str, None] = {}
        for rank, part in enumerate(parts):
            other = part.groups[at]
            if other.options != group.options:
                different = [key for key in other.options if other.options[key] != group.options.get(key)]
                raise AutoparError(
                    f"{', '.join(different[:3])} of group {at} of the {first.kind} differs on rank {rank}",
                    remedy="Set learning rates and the like from what is the same on every rank",
                )
            names.update(dict.fromkeys(other.names))
        groups.append(StoredGroup(group.options, list(names)))
    states: dict[str, Any] = {}
    for part in parts:
        states.update(part.states)
    return StoredOptimizer(first.kind, groups, states)


def _by_rank(values: Sequence[Any]) -> ByRank:
    different: list[Any] = []
    of_rank = []
    for value in values:
        if value not in different:
            different.append(value)
        of_rank.append(different.index(value))
    return ByRank(of_rank, different)


def _check_seen(made: Path, known: Mapping[str, StoredFile]) -> None:
    """Rank 0 sees what all wrote, whole: the folder is one that all share."""
    until = time.monotonic() + SEES_WITHIN_S
    for name, said in known.items():
        while True:
            try:
                size = os.stat(made / name).st_size
            except FileNotFoundError:
                size = -1
            if size == said.bytes:
                break
            if time.monotonic() > until:
                raise AutoparError(
                    f"rank 0 does not see the file {name} that another rank wrote",
                    where=str(made),
                    values=f"{size} bytes of {said.bytes}" if size >= 0 else None,
                    remedy="Save into a folder that all machines share",
                )
            time.sleep(0.2)
