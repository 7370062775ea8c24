"""`llmgwctl fit`: whether a model fits on cards, with every part of the estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controller.cli.output import lines

if TYPE_CHECKING:
    from controller.cli.output import Output
    from controller.cli.session import Session

COLUMNS = ("PART", "MIB", "WHY")


@click.command()
@click.argument("model")
@click.option("--profile", help="Of this profile only.")
@click.option("--gpu", metavar="CLASS", help="On cards of this class only.")
@click.pass_obj
def fit(session: Session, model: str, profile: str | None, gpu: str | None) -> None:
    """What a model needs of each card, line by line, and whether it fits."""
    found = session.client.get("/fit", model=model, profile=profile, gpu=gpu)
    session.out.show(found, lambda: lines(*_page(session.out, found)))


def _page(out: Output, found: dict[str, Any]) -> list[str]:
    said = [f"{found['model']} from {found['source']}"]
    if "weights" in found:
        held = found["weights"]
        said[0] += f", by the weights on {held['node']} in {held['path']}"
    said += [found["problem"]] if "problem" in found else []
    for profile in found["profiles"]:
        said += ["\n" + _heading(profile)]
        for case in profile["cases"]:
            said += _case(out, case)
    return said


def _heading(profile: dict[str, Any]) -> str:
    name = f"profile {profile['profile']}: {profile['engine']}"
    if not profile["gpus"]:
        return f"{name} without cards: nothing to fit"
    many = "card" if profile["gpus"] == 1 else "cards"
    text = f"{name} on {profile['gpus']} {many}"
    text += f" of each of {profile['shards']} nodes" if profile["shards"] > 1 else ""
    if "gpu_memory_mib" in profile:
        text += f"; placed by its own gpu_memory of {profile['gpu_memory_mib']} MiB per card"
    return text


def _case(out: Output, case: dict[str, Any]) -> list[str]:
    name = case.get("class", "any card")
    memory = f" of {case['card_mib']} MiB" if "card_mib" in case else ""
    said = [f"{name}{memory}, {case['cards']} in the fleet: {case['verdict']}"]
    if case["lines"]:
        rows = [(f"  {line['name']}", line["mib"], line["why"]) for line in case["lines"]]
        said.append(out.table(("  " + COLUMNS[0], *COLUMNS[1:]), rows))
    if case.get("fits") and "sequences" in case:
        said.append(
            f"  its cache then holds {case['sequences']:g} sequences of {case['context']} tokens, "
            f"{case['tokens']} tokens in all"
        )
    return [*said, *(f"  note: {note}" for note in case["notes"])]
