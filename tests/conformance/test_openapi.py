"""The client port's own description, and whether it keeps to it (schemathesis)."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest
from openapi_spec_validator import validate

from controller.router import openapi
from controller.router.routes import Kind, paths
from tests.conformance.conftest import KEY, PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import Door


def test_the_description_is_valid_and_names_every_path() -> None:
    document = json.loads(openapi.document())
    validate(document)
    assert set(document["paths"]) == {path for path, _ in paths()}
    inferring = {route.name for _, route in paths() if route.kind is Kind.INFER}
    assert inferring == set(openapi.FIELDS)


def test_it_is_served_without_a_key(door: Door) -> None:
    with urllib.request.urlopen(f"{door.root}/openapi.json", timeout=PATIENCE_S) as answer:
        assert answer.headers["content-type"] == "application/json"
        assert answer.read() == openapi.document()


@pytest.mark.slow
@pytest.mark.timeout(300)  # half a minute of a core
def test_schemathesis_finds_no_answer_that_the_description_forbids(
    door: Door, tmp_path: Path
) -> None:
    described = json.loads(openapi.document())
    for path in described["paths"].values():  # else nearly all it asks for are unknown models
        for body in path.get("post", {}).get("requestBody", {}).get("content", {}).values():
            body["schema"]["properties"]["model"]["enum"] = ["fake", "nothing"]
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(described))
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance,unsupported_method,missing_required_header"
    )
    argv = [sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", door.root]
    argv += ["--header", f"Authorization: Bearer {KEY}", "--checks", checks, "--seed", "1"]
    argv += ["--max-examples", "10", "--no-color", "--request-timeout", "60", "--workers", "1"]
    before = len(door.fake.chats())
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert len(door.fake.chats()) - before > 50, "the engine was asked hardly anything"
