"""Deadlines of every connection, swept ten times a second: no timer object per request.

A thing with a deadline sits in at most one slot. Moving its deadline later is one attribute
assignment (the slot finds out when it fires), so the hot path pays nothing per byte. What has none
any more is let go of at once: with it goes all that it holds, up to a body of 32 MiB.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

NEVER: Final = math.inf


class Timed(ABC):
    """Something that has one deadline, `due`, in seconds of the monotonic clock."""

    __slots__ = ("due", "place", "slot")

    def __init__(self) -> None:
        self.due: float = NEVER
        self.slot: float = NEVER
        self.place: Place | None = None

    @abstractmethod
    def expired(self, now: float) -> None:
        """Called once when `due` has passed; `due` is NEVER by then."""

    def forget(self) -> None:
        """It has no deadline any more, and its slot lets go of it."""
        self.due = self.slot = NEVER
        place, self.place = self.place, None
        if place is not None:
            place.clear()


Place = list[Timed]
"""In a slot: one thing, or none that still has a deadline there."""


class Deadlines:
    """Slots of `step` seconds holding the things that are due in or after them."""

    def __init__(self, step: float = 0.1) -> None:
        self.step = step
        self._slots: dict[int, list[Place]] = {}
        self._swept: int | None = None

    def __len__(self) -> int:
        return sum(len(place) for places in self._slots.values() for place in places)

    def set(self, thing: Timed, due: float) -> None:
        """Give `thing` the deadline `due`."""
        thing.due = due
        if due < thing.slot:
            self._file(thing, due)

    def _file(self, thing: Timed, due: float) -> None:
        slot = math.ceil(due / self.step)
        if self._swept is not None and slot <= self._swept:
            slot = self._swept + 1
        if thing.place is not None:
            thing.place.clear()
        thing.place = [thing]
        thing.slot = slot * self.step
        self._slots.setdefault(slot, []).append(thing.place)

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
        places = self._slots.pop(slot)
        while places:
            place = places.pop()
            if not place:
                continue  # it moved to an earlier slot, or has no deadline any more
            thing = place[0]
            thing.slot, thing.place = NEVER, None
            if thing.due <= now:
                thing.due = NEVER
                fired += 1
                try:
                    thing.expired(now)
                except Exception:
                    self._slots[slot + 1] = self._slots.get(slot + 1, []) + places
                    for other in places:  # one bug must not take the others' deadlines away
                        for waiting in other:
                            waiting.slot = (slot + 1) * self.step
                    self._swept = slot
                    raise
            elif thing.due != NEVER:
                self._file(thing, thing.due)
        return fired
