"""aiohttp's own TLS contexts read certificates when they need them, not when it is imported."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys

import pytest

LOOK = """
import json
import drakit.kube
import aiohttp.connector as connector
contexts = (connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED)
print(json.dumps([len(context.get_ca_certs()) for context in contexts]))
"""


def loaded(environment: dict[str, str]) -> list[int]:
    """How many certificates a fresh interpreter has in memory after our import."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("SSL_CERT")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOOK],
        capture_output=True,
        text=True,
        timeout=25,
        env={**ours, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_certificates_that_the_system_has_by_their_hashes_are_not_loaded(tmp_path):
    (tmp_path / "0a1b2c3d.0").touch()
    assert loaded({"SSL_CERT_DIR": str(tmp_path)}) == [0, 0]


def test_a_bundle_that_somebody_has_chosen_is_loaded(tmp_path):
    bundle = ssl.get_default_verify_paths().cafile
    if bundle is None:
        pytest.skip("this machine has no bundle of certificates to choose")
    (tmp_path / "0a1b2c3d.0").touch()
    for count in loaded({"SSL_CERT_DIR": str(tmp_path), "SSL_CERT_FILE": bundle}):
        assert count > 0


def test_a_directory_without_hashes_changes_nothing(tmp_path):
    before = len(ssl.create_default_context().get_ca_certs())
    if not before or "SSL_CERT_FILE" in os.environ:
        assert len(loaded({"SSL_CERT_DIR": str(tmp_path)})) == 2
    else:
        assert loaded({"SSL_CERT_DIR": str(tmp_path)}) == [before, before]
