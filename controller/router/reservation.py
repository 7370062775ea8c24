"""What a request may come to at most, and what it came to: tokens and micros. Pure.

The bound of a prompt is the estimate that usage rows would have (`bill.py`), that of an answer
what the request allows or, where it allows anything, a number of the settings. A request that goes
beyond is charged whole: a budget is passed by that much at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from controller.router.bill import prompt_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.router.allowance import Allowance
    from controller.router.body import Asked
    from controller.router.bounds import Bound
    from controller.router.routes import Route
    from controller.router.tokens import Tokens

MOST_TOKENS: Final = 10**9
MOST_COPIES: Final = 10_000
FREE_ROUTES: Final = frozenset(("tokenize", "detokenize", "messages.count_tokens"))
"""No model runs for them: they cost nothing, as in `llmgw_core.cost_of`."""
_LENGTHS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Price(NamedTuple):
    """Of a model now, in micros per million tokens; None is unpriced, and charged nothing."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None


UNPRICED: Final = Price()


class Need:
    """What a request takes of one bound."""

    __slots__ = ("allowance", "amount", "bound", "minute")

    def __init__(self, bound: Bound, allowance: Allowance, amount: int) -> None:
        self.bound = bound
        self.allowance = allowance
        self.amount = amount
        self.minute = 0  # in which it was taken, where that matters


class Reservation:
    """What one request has reserved, or waits for."""

    __slots__ = ("needs", "taken", "wants")

    def __init__(self, needs: list[Need]) -> None:
        self.needs = needs
        self.taken = False
        self.wants: list[Need] = []  # what it waits for

    def lacking(self, now: float) -> list[Need]:
        return [need for need in self.needs if need.allowance.lacks(need.amount, now)]

    def take(self) -> None:
        """All of it is there."""
        for need in self.needs:
            need.allowance.take(need.amount)
            need.minute = need.allowance.minute
        self.taken = True

    def want(self) -> None:
        """It waits: for all of it, else what it has of one bound goes while it asks for another."""
        self.unwant()
        self.wants = [need for need in self.needs if not need.allowance.gone]
        for need in self.wants:
            need.allowance.want(need.amount)

    def unwant(self) -> None:
        for need in self.wants:
            need.allowance.unwant(need.amount)
        self.wants = []


def most_tokens(route: Route, asked: Asked, default: int) -> tuple[int, int]:
    """Tokens of prompt and answer that a request may come to; `default` for an answer without."""
    if route.name in FREE_ROUTES:
        return 0, 0
    prompt = prompt_tokens(asked) if route.reads else 0
    if not route.writes:
        return prompt, 0
    document = asked.document
    length = default
    for name in _LENGTHS:
        told = _count(document.get(name))
        if told is not None:
            length = told
            break
    return prompt, min(length * _copies(document), MOST_TOKENS)


def _copies(document: Mapping[str, Any]) -> int:
    """Answers that are made, of which fewer may be sent."""
    prompts = document.get("prompt")
    many = 1
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
        many = len(prompts)
    each = max(_count(document.get("n")) or 1, _count(document.get("best_of")) or 1)
    return min(each * many, MOST_COPIES)


def _count(value: Any) -> int | None:
    """A number of tokens above 0; anything else says nothing (engines refuse it or take it so)."""
    return min(value, MOST_TOKENS) if type(value) is int and value > 0 else None


def cost_of(price: Price, tokens: Tokens) -> int:
    """Micros, rounded up, by the rules of `llmgw_core.cost_of`; unknown is charged nothing."""
    prompt = tokens.prompt or 0
    cached = min(tokens.cached or 0, prompt)
    parts = (
        (prompt - cached, price.prompt),
        (cached, price.prompt if price.cached is None else price.cached),
        (tokens.completion or 0, price.completion),
    )
    total = 0
    for count, each in parts:
        if count:
            if each is None:
                return 0
            total += count * each
    return -(-total // 1_000_000)


def most_cost(prices: list[Price], prompt: int, completion: int) -> int:
    """The dearest that any of the models that may answer could be; at least one micro, so that a
    budget that is spent stops what costs nothing too."""
    dearest = 0
    for price in prices:
        whole = (price.prompt or 0) * prompt + (price.completion or 0) * completion
        dearest = max(dearest, whole)
    return max(1, -(-dearest // 1_000_000))
