"""Whatever is sent as a catalog or a cursor: accepted, or refused in words. Never a crash."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.api.errors import ApiError
from controller.api.paging import Cursors
from controller.catalog.checks import Known, check
from controller.catalog.definition import Catalog, Model, Pool
from controller.catalog.faults import CatalogError
from controller.catalog.profile import Profile
from controller.catalog.reading import parse
from controller.catalog.units import mebibytes, seconds

FIELDS = sorted(f for form in (Catalog, Model, Pool, Profile) for f in form.model_fields)
WORDS = st.sampled_from(
    [*FIELDS, "arg", "llamacpp", "command", "a", "5m", "1GiB", "hf:a/b", "{port}"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | WORDS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=6),
    max_leaves=12,
)
PROFILES = st.fixed_dictionaries(
    {"name": WORDS, "engine": st.sampled_from(["llamacpp", "command", "x"])},
    optional={f: JSON for f in Profile.model_fields if f not in ("name", "engine")},
)
MODELS = st.fixed_dictionaries(
    {"name": WORDS, "source": WORDS, "profiles": st.lists(PROFILES | JSON, max_size=2)},
    optional=dict.fromkeys(("aliases", "fallbacks", "min_replicas", "idle_timeout", "nam"), JSON),
)
CATALOGS = st.dictionaries(WORDS, JSON, max_size=3) | st.fixed_dictionaries(
    {"models": st.lists(MODELS | JSON, max_size=3)}, optional={"pools": JSON, "pool": JSON}
)


@given(CATALOGS)
@settings(max_examples=300, deadline=None)
def test_any_catalog_is_taken_or_refused_in_words(document):
    try:
        catalog = parse(document, "c")
        check(catalog, Known())
    except CatalogError as error:
        said = str(error)
        assert said
        assert "Traceback" not in said
        assert "pydantic" not in said
    else:
        for model in catalog.models:
            assert model.document()["max_replicas"] >= max(1, model.min_replicas)
            assert parse({"models": [{**model.model_dump(), **_texts(model)}]}, "again").models


def _texts(model: Model) -> dict[str, object]:
    """Sizes as they are written: a dump holds MiB."""
    profiles = [
        p.model_dump() | {f: f"{v}MiB" for f in ("memory", "gpu_memory") if (v := getattr(p, f))}
        for p in model.profiles
    ]
    return {"profiles": profiles}


@given(st.text(alphabet="0123456789.smhdwKMGTiB -e", max_size=12))
def test_units_are_numbers_or_refused(text):
    for unit in (seconds, mebibytes):
        try:
            assert unit(text) >= 0
        except ValueError as error:
            said = str(error)
            assert repr(text) in said


KEYS = st.lists(
    st.text(string.printable, max_size=8) | st.integers(0, 2**53), min_size=1, max_size=3
)
FILTERS = st.lists(st.none() | st.text(string.printable, max_size=4), max_size=2)


@given(KEYS, FILTERS, FILTERS)
def test_G05_a_cursor_opens_only_where_it_was_sealed(key, filters, others):
    cursors = Cursors(b"k" * 32)
    sealed = cursors.seal("nodes", filters, key)
    assert cursors.open("nodes", filters, sealed) == key
    for name, more, secret in (
        ("keys", filters, b"k"),
        ("nodes", filters, b"x"),
        ("nodes", others, b"k"),
    ):
        if (name, more, secret) != ("nodes", filters, b"k"):
            with pytest.raises(ApiError):
                Cursors(secret * 32).open(name, more, sealed)
