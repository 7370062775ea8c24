"""Certificates that sign themselves, made by the openssl program."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def certificate(cert: Path, key: Path, name: str = "here") -> None:
    """Writes a certificate for 127.0.0.1 with this common name, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    says = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(
        ["openssl", "req", "-x509", *kind, *says, "-out", cert, "-keyout", key],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
