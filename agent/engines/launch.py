"""What every engine is given and gives back."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.assignment import Assignment
    from agent.readiness import Check


class CannotLaunch(Exception):
    """The engine cannot be started from this assignment here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the node offers: where the weights lie and where programs are."""

    source_path: Path | None
    """The file or folder of the weights; None when the assignment names no source."""
    engine_paths: Mapping[str, str] = field(default_factory=dict)
    """Programs by engine or engine@version, from the settings."""
    search_path: str = os.defpath
    """PATH to look programs up in."""
    environment: Path | None = None
    """The virtual environment of the engine's version, when the profile names one that is here."""

    def program(self, a: Assignment, *names: str) -> str | None:
        """The program set for the engine's version or for the engine, else the first in PATH.

        With an environment of its version only that is looked in: PATH may hold another version.
        """
        for key in (f"{a.engine}@{a.engine_version}", a.engine):
            if key in self.engine_paths:
                return self._executable(key, self.engine_paths[key])
        where = self.search_path if self.environment is None else str(self.environment / "bin")
        found = (shutil.which(name, path=where) for name in names)
        return next((path for path in found if path), None)

    @property
    def python(self) -> str:
        """The interpreter for engines that are a module: the environment's, else our own."""
        return sys.executable if self.environment is None else str(self.environment / "bin/python")

    def _executable(self, key: str, path: str) -> str:
        if not os.access(path, os.X_OK) or not Path(path).is_file():
            raise CannotLaunch(
                f"engine_paths: {key} is {path}, which is no program that can be run"
            )
        return path

    def weights(self, a: Assignment) -> Path:
        """Where the weights are; CannotLaunch when the model has no source."""
        if self.source_path is None:
            raise CannotLaunch(f"model {a.model} has no source, and {a.engine} needs its weights")
        return self.source_path


@dataclass(frozen=True, slots=True)
class Launch:
    """A command as a list, and what it adds to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """A translation from assignment to process."""

    numbers_only: bool
    """Whether it reads the numbers of cards itself and takes no UUIDs for them (E05)."""

    def launch(self, a: Assignment, place: Place) -> Launch:
        """The command; raises CannotLaunch."""
        ...

    def check(self, a: Assignment) -> Check:
        """When it is ready."""
        ...


def option(args: tuple[str, ...], *names: str) -> str | None:
    """The value an option has in a list of arguments (`-x v` or `--x=v`), or None.

    Read as engines read it: the last one counts, and `--a_b` is `--a-b`.
    """
    found = None
    for position, item in enumerate(args):
        name, given, value = item.partition("=")
        if _plain(name) not in names:
            continue
        if given:
            found = value
        elif position + 1 < len(args):
            found = args[position + 1]
    return found


def has_option(args: tuple[str, ...], *names: str) -> bool:
    """Whether a profile sets one of these options itself."""
    return any(_plain(item.partition("=")[0]) in names for item in args)


def _plain(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def single_node(a: Assignment) -> None:
    """Refuse a replica over several nodes for an engine that cannot span them."""
    if a.shards > 1:
        raise CannotLaunch(
            f"shard {a.shard} is one of {a.shards} of replica {a.replica}: {a.engine} runs on one "
            "node only; use a profile with shards = 1"
        )
