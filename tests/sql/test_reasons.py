"""Refusal codes: one list in Python, the same in SQL."""

from __future__ import annotations

from random import Random

from psycopg.types.json import Jsonb

from controller.placement.explain import main_cause
from controller.placement.model import Refusal
from controller.placement.reasons import SENTENCES, Code


def test_codes_and_sentences_are_the_same_in_python_and_sql(database):
    with database.connect() as connection:
        rows = dict(connection.execute("select code, sentence from llmgw.reasons").fetchall())
    assert rows == {str(code): sentence for code, sentence in SENTENCES.items()}


def test_every_code_has_a_sentence():
    assert set(SENTENCES) == set(Code)


def some_refusals(random: Random) -> list[Refusal]:
    """Some codes of some nodes for one or two profiles, few enough for ties."""
    codes = random.sample([*Code], 4)
    return [
        Refusal("m", profile, None, f"n{n}", code, f"because of {profile} {code}", None, None)
        for profile in random.choice(("p", "pq"))
        for n in range(random.randint(1, 5))
        for code in random.sample(codes, random.randint(1, 3))
    ]


def main_reasons(fleet, attempts):
    """What SQL calls the main reason of each model's attempt."""
    found = [
        {
            "model": model,
            "placed": False,
            "refusals": [
                {"profile": r.profile, "node": r.node, "code": r.code, "reason": r.reason}
                for r in refusals
            ],
        }
        for model, refusals in attempts.items()
    ]
    call = "select llmgw_core.record_attempts_v1(%s, %s)"
    fleet.controller.execute(call, (fleet.lead(), Jsonb(found)))
    return {r["model"]: r["main_reason"] for r in fleet.rows("select * from llmgw.placements")}


def test_the_main_reason_is_the_same_in_python_and_sql(fleet):
    random = Random(7)
    attempts = {f"m{n}": some_refusals(random) for n in range(60)}
    for name in attempts:
        fleet.model(name)
    shown = main_reasons(fleet, attempts)
    for name, refusals in attempts.items():
        cause = main_cause(refusals)
        assert cause is not None
        words = f"because of {cause.profile} {cause.code} ({cause.nodes} of {cause.of} candidates)"
        assert shown[name] == words, refusals


def test_a_pool_of_few_among_many_nodes_is_not_the_main_reason(fleet):
    """In a fleet of 5,000, 4,997 nodes are not in a pool of three: that explains nothing."""
    fleet.model("m")
    refusals = [
        Refusal("m", "p", "pool", f"n{n}", code, SENTENCES[code], None, None)
        for n in range(50)
        for code in ([Code.CPUS] if n < 3 else [Code.POOL_MISMATCH, Code.CPUS])
    ]
    shown = main_reasons(fleet, {"m": refusals})
    assert shown == {"m": f"{SENTENCES[Code.CPUS]} (50 of 50 candidates)"}
