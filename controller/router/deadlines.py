"""Deadlines of every connection, swept ten times a second: no timer object per request.

A thing with a deadline sits in at most one live slot. Moving its deadline later is one attribute
assignment (the slot finds out when it fires), so the hot path pays nothing per byte.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

NEVER: Final = math.inf


class Timed(ABC):
    """Something that has one deadline, `due`, in seconds of the monotonic clock."""

    __slots__ = ("due", "slot")

    def __init__(self) -> None:
        self.due: float = NEVER
        self.slot: float = NEVER

    @abstractmethod
    def expired(self, now: float) -> None:
        """Called once when `due` has passed; `due` is NEVER by then."""


class Deadlines:
    """Slots of `step` seconds holding the things that are due in or after them."""

    def __init__(self, step: float = 0.1) -> None:
        self.step = step
        self._slots: dict[int, list[Timed]] = {}
        self._swept: int | None = None

    def __len__(self) -> int:
        return sum(len(things) for things in self._slots.values())

    def set(self, thing: Timed, due: float) -> None:
        """Give `thing` the deadline `due`; NEVER takes it away."""
        thing.due = due
        if due < thing.slot:
            self._file(thing, due)

    def _file(self, thing: Timed, due: float) -> None:
        slot = math.ceil(due / self.step)
        if self._swept is not None and slot <= self._swept:
            slot = self._swept + 1
        thing.slot = slot * self.step
        self._slots.setdefault(slot, []).append(thing)

    def sweep(self, now: float) -> int:
        """Fire what is due at `now`; returns how many fired."""
        last = math.floor(now / self.step)
        if self._swept is None or last - self._swept > len(self._slots):
            due_slots = sorted(slot for slot in self._slots if slot <= last)
        else:
            due_slots = [n for n in range(self._swept + 1, last + 1) if n in self._slots]
        self._swept = last
        return sum(self._fire(slot, now) for slot in due_slots)

    def _fire(self, slot: int, now: float) -> int:
        fired = 0
        things = self._slots.pop(slot)
        while things:
            thing = things.pop()
            if thing.slot != slot * self.step:
                continue  # it moved to an earlier slot, which has dealt with it
            thing.slot = NEVER
            if thing.due <= now:
                thing.due = NEVER
                fired += 1
                try:
                    thing.expired(now)
                except Exception:
                    self._slots[slot + 1] = self._slots.get(slot + 1, []) + things
                    for other in things:  # one bug must not take the others' deadlines away
                        if other.slot == slot * self.step:
                            other.slot = (slot + 1) * self.step
                    self._swept = slot
                    raise
            elif thing.due != NEVER:
                self._file(thing, thing.due)
        return fired
