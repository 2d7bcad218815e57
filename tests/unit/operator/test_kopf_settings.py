"""Kopf runs as a watcher that writes nothing; and it is imported without client libraries."""

import subprocess
import sys

from drakit_operator.kinds import KINDS, Served
from drakit_operator.watching.settings import operator_settings

SERVED = [Served(kind=kind, version="v1") for kind in KINDS]


def test_nothing_of_kopf_writes_or_kills():
    settings = operator_settings(SERVED)
    assert settings.posting.enabled is False
    assert settings.scanning.disabled is True
    assert settings.peering.standalone is True
    assert settings.process.ultimate_exiting_timeout is None
    assert settings.admission.managed is None
    assert settings.networking.request_timeout <= 30
    # Kopf takes away a finalizer of the name that it knows: the default belongs to others.
    assert settings.persistence.finalizer == "drakit.dev/never-set"


def test_only_pods_are_watched_in_part():
    settings = operator_settings(SERVED)
    assert list(settings.watching.field_selectors.values()) == ["status.phase=Pending"]


def test_importing_kopf_leaves_client_libraries_out_and_importable():
    program = (
        "import sys; from drakit_operator.watching.kopf_import import kopf;"
        "roots = {name.split('.')[0] for name in sys.modules};"
        "assert not roots & {'kubernetes_asyncio', 'pykube'};"
        "import pykube, kubernetes_asyncio.client.configuration; print(kopf.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("kopf", 0), done.stderr
