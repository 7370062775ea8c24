"""What `--endpoint` and `endpoints` say of a fixed replica, as text. Pure."""

from __future__ import annotations

import re

from controller.router.config import StaticEndpoint
from controller.router.table import parse_endpoint

_ID = re.compile(r"[A-Za-z0-9._:/@-]{1,100}")


def endpoint(text: str) -> StaticEndpoint:
    """`id=URL[=model[,model]][;depth=N][;weight=W]`; ValueError for anything else."""
    told, *options = text.split(";")
    name, _, rest = told.partition("=")
    url, named, models = rest.rpartition("=")
    if not named:
        url, models = rest, ""
    found = tuple(dict.fromkeys(model for model in models.split(",") if model))
    if not (name and url.startswith(("http://", "https://")) and bool(named) == bool(found)):
        raise ValueError(
            f"{text!r} is not id=URL=model[,model], as a=http://10.0.0.7:8000=llama, nor id=URL "
            "for the models that it lists itself"
        )
    if not _ID.fullmatch(name) or name.isdigit():
        raise ValueError(
            f"{text!r}: {name!r} is no id: up to 100 letters, digits and ._:/@- that are not "
            "digits only, which replicas of the database are"
        )
    parse_endpoint(url)
    depth, weight = None, 1.0
    for option in options:
        word, _, value = option.partition("=")
        if word == "depth" and value.isascii() and value.isdigit() and 0 < int(value) < 10**9:
            depth = int(value)
        elif word == "weight" and _is_weight(value):
            weight = float(value)
        else:
            raise ValueError(
                f"{text!r}: {option!r} is not understood: depth is how many requests it gets at "
                "once, as ;depth=32; weight its share against others, 0.01 to 100, as ;weight=2"
            )
    return StaticEndpoint(name, url, found, depth, weight)


def _is_weight(text: str) -> bool:
    try:
        return 0.01 <= float(text) <= 100
    except ValueError:
        return False
