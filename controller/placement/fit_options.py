"""The options of one engine's command line, read as engines read them.

Called by `fit_args.py`. What cannot be read is told in `Options.unclear` and counts as not given.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_UNITS: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
                 "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # fmt: skip
_NUMBER: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)([kmgtKMGT]?)(?:i?[bB])?")
_CACHE_BYTES: Final = {
    "float16": 2.0, "fp16": 2.0, "f16": 2.0, "bfloat16": 2.0, "bf16": 2.0,
    "float32": 4.0, "f32": 4.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "fp8_inc": 1.0,
    "fp8_ds_mla": 656 / 576, "int8": 1.0, "fp4_e2m1": 0.5625,
    "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes of one cached value, scales included."""


class Options:
    """The options of one engine. Of an option given twice the last counts, as engines do."""

    def __init__(self, args: Iterable[object], env: Mapping[str, object]) -> None:
        self._words = [str(word) for word in args]
        self._env = {str(name): str(value) for name, value in env.items()}
        self.unclear: list[str] = []

    def text(self, *names: str) -> str | None:
        """The value of an option, of any of its names, or of an environment variable."""
        found = None
        for position, word in enumerate(self._words):
            name, given, value = word.partition("=")
            if name.startswith("--"):
                name = name.replace("_", "-")
            if name not in names:
                continue
            if given:
                found = value
            elif position + 1 < len(self._words):
                found = self._words[position + 1]
        variables = (self._env[name] for name in names if name in self._env)
        return next(variables, None) if found is None else found

    def flag(self, *names: str) -> bool:
        """Whether an option without a value is there."""
        said = {w.partition("=")[0].replace("_", "-") for w in self._words if w.startswith("-")}
        return any(name in said or self._env.get(name) in ("1", "true", "on") for name in names)

    def number(self, *names: str, least: float = 1) -> float | None:
        """A number such as 4096, 32k or 1.5; None where it is not given or cannot be read."""
        text = self.text(*names)
        if text is None:
            return None
        match = _NUMBER.fullmatch(text.strip())
        value = float(match[1]) * _UNITS.get(match[2], 1) if match else None
        if value is None or value < least:
            self.unclear.append(f"{names[0]} {text[:40]} is no number that can be used")
            return None
        return value

    def whole(self, *names: str, least: int = 1) -> int | None:
        """The same as a whole number."""
        found = self.number(*names, least=least)
        return None if found is None else int(found)

    def one(self, *names: str) -> int:
        """A whole number that is 1 unless told."""
        return self.whole(*names) or 1

    def cached(self, *names: str) -> float | None:
        """Bytes of a cached value; None is automatic."""
        text = self.text(*names)
        if text is None or text == "auto":
            return None
        if text.lower() not in _CACHE_BYTES:
            self.unclear.append(f"{names[0]} {text[:40]} is no cache type that is known here")
        return _CACHE_BYTES.get(text.lower())
