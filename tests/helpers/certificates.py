"""CAs, and certificates that they have signed, by the openssl command."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl command")


@cache
def certificate(ca: str = "the deployment's") -> dict[str, str]:
    """Paths of the PEM files of an engine: certificate, key and ca."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-tls-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _make(folder, "ca", f"/CN={ca}")
    _make(folder, "engine", "/CN=engine", "-CA", f"{folder}/ca.pem", "-CAkey", f"{folder}/ca.key")
    return {"certificate": f"{folder}/engine.pem", "key": f"{folder}/engine.key", "ca": f"{folder}/ca.pem"}


def _make(folder: Path, name: str, subject: str, *signed: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{folder}/{name}.key")
    words = ("openssl", "req", "-x509", *key, "-out", f"{folder}/{name}.pem", "-subj", subject, "-days", "2", *signed)
    subprocess.run(words, check=True, capture_output=True)
