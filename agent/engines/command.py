"""Any server: an argv template from the profile, and a health path or just a port."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from agent.engines.gang import environment, gang_of, without_door
from agent.engines.launch import CannotLaunch, Launch, Place
from agent.readiness import Check

if TYPE_CHECKING:
    from agent.assignment import Assignment

_FIELD = re.compile(r"\{([a-z_]+)\}")


def filled(template: tuple[str, ...], values: dict[str, str]) -> tuple[str, ...]:
    """Put values in place of `{name}`; other braces (JSON) stay. Unknown names are refused."""

    def value(match: re.Match[str]) -> str:
        try:
            return values[match[1]]
        except KeyError:
            raise CannotLaunch(
                f"the command has {match[0]}, which is none of "
                f"{', '.join('{' + name + '}' for name in values)}"
            ) from None

    return tuple(_FIELD.sub(value, item) for item in template)


class Command:
    """It must stay in the foreground: a program that puts itself into the background has ended."""

    numbers_only = False

    def launch(self, a: Assignment, place: Place) -> Launch:
        """The template, filled, then the profile's args."""
        if not a.command:
            raise CannotLaunch(f"profile {a.profile} of model {a.model} names no command")
        gang = gang_of(a)
        argv = filled(a.command, self._values(a, place))
        program = shutil.which(argv[0], path=place.search_path)
        if program is None:
            raise CannotLaunch(
                f"the command of model {a.model} starts with {argv[0]}, which is no program of "
                "this node: install it or give its full path"
            )
        env = {} if gang is None else environment(a, gang)
        return Launch((program, *argv[1:], *a.args), env)

    def _values(self, a: Assignment, place: Place) -> dict[str, str]:
        values = {
            "port": str(a.port),
            "host": a.host,
            "model": a.model,
            "gpus": ",".join(gpu.uuid for gpu in a.gpus),
            "rank": str(a.rank),
            "nodes": str(a.shards),
            "head": a.host if a.gang is None else a.gang.head,
        }
        if a.gang is not None:
            values |= {
                "master_port": str(a.gang.master_port),
                "hcas": ",".join(a.gang.hcas),
            }
        if place.source_path is not None:
            values["source_path"] = str(place.source_path)
        return values

    def check(self, a: Assignment) -> Check:
        """Its own health path; without one, a listening port of its own is enough.

        Of several ranks only 0 is asked: the others need not listen at all.
        """
        if (rank := without_door(a)) is not None:
            return rank
        return Check(a.host, a.port, a.health_path)
