"""`make deps` installs what is missing, says what that is, and upgrades nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

APT = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in *" -s "*) printf '{plan}\\n';; esac
"""


@pytest.fixture
def deps(tmp_path):
    """Run the target on a machine of which all packages but socat are installed."""
    calls = tmp_path / "calls"
    shutil.copy(ROOT / "Makefile", tmp_path)

    def run(plan: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        installed = "#!/bin/sh\ncase $3 in socat) exit 1;; esac\necho install ok installed\n"
        programs = {"dpkg-query": installed, "id": "#!/bin/sh\necho 0\n"}
        programs["apt-get"] = APT.format(calls=calls, plan=plan)
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["make", "deps"]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        return done, calls.read_text().splitlines()

    return run


def test_it_names_all_new_packages_and_installs_them(deps):
    done, (_, _, install) = deps("Inst libwrap0 (7.6.q Debian)\\nInst socat (1.7 Debian)")
    assert done.returncode == 0, done.stderr
    assert "installing the Debian packages libwrap0 socat\n" in done.stdout
    assert install.startswith("install ")
    assert install.endswith(" -y socat")
    assert "Upgrade-By-Source-Package=false" in install


def test_a_package_that_would_be_upgraded_is_an_error_with_its_remedy(deps):
    done, calls = deps("Inst libc6 [2.36-1] (2.36-2 Debian)\\nInst socat (1.7 Debian)")
    assert done.returncode != 0
    assert (
        "need newer versions of libc6 - run 'apt-get install --only-upgrade libc6'" in done.stderr
    )
    assert not [call for call in calls if " -y " in call]
