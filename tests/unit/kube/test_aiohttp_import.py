"""TLS needs little memory: certificates are read when they are needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import certifi
import pytest

LOOK = """
import json, ssl, sys
paths = ssl.get_default_verify_paths()._replace(capath=sys.argv[1])
ssl.get_default_verify_paths = lambda: paths
ssl.SSLContext.set_default_verify_paths = lambda self: self.load_verify_locations(sys.argv[2])
import drakit_daemon.kube
import aiohttp.connector as connector
contexts = (connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED)
print(json.dumps([len(context.get_ca_certs()) for context in contexts]))
"""


def loaded(directory, **environment: str) -> list[int]:
    """The number of certificates in memory of a new interpreter after our import, on a system that
    has its certificates in a file, and by their hashes in a directory."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("SSL_CERT")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOOK, str(directory), certifi.where()],
        capture_output=True,
        text=True,
        timeout=25,
        env={**ours, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_certificates_that_the_system_has_by_their_hashes_are_not_loaded(tmp_path):
    (tmp_path / "0a1b2c3d.0").touch()
    assert loaded(tmp_path) == [0, 0]


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_what_the_environment_names_is_loaded_as_usual(tmp_path, variable):
    (tmp_path / "0a1b2c3d.0").touch()
    assert min(loaded(tmp_path, **{variable: "/nonexistent"})) > 0


def test_a_directory_without_hashes_changes_nothing(tmp_path):
    assert min(loaded(tmp_path)) > 0
    assert min(loaded("/nonexistent")) > 0
