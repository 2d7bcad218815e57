"""`drakit new`: which names it takes, that it writes over nothing, and its page."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from drakit_cli.main import main
from drakit_cli.new import PLUGIN
from drakit_nodeplugin.config import NodePluginConfig
from tests.unit.cli.projects import commands, files_of, readme
from tests.unit.docs.listings import ROOT, validated
from tests.unit.docs.listings import commands as page_commands

PAGE = "docs/vendors/python-driver.md"

# ------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("arguments", "shown", "told"),
    [
        *(
            pytest.param(["--", name], f"the project's name {name!r}", told, id=f"name-{of}")
            for name, told, of in (
                ("", "must be a letter followed by", "empty"),
                ("Rack_Lamps", "try rack-lamps", "capitals-and-underscores"),
                ("3lamps", "try lamps", "a-digit-first"),
                ("lamps-", "try lamps", "a-dash-last"),
                ("../lamps", "try lamps", "a-path"),
                ("l" * 41, f"try {'l' * 40}", "too-long"),
                ("rack--lamps", "two dashes in a row; try rack-lamps", "two-dashes"),
                ("lämpchen", "lower-case letters", "no-ascii"),
                ("lamps\n", "try lamps", "a-line-end"),
                ("class", "a meaning in YAML or Python", "a-python-word"),
                ("null", "a meaning in YAML or Python", "a-yaml-word"),
                ("json", "would hide the Python package json", "of-the-standard-library"),
                ("tests", "would hide the Python package tests", "the-tests"),
                ("drakit-proto", "hide the Python package drakit_proto", "a-package-of-ours"),
                ("hostdev", "is reserved for drakit", "a-driver-of-ours"),
            )
        ),
        *(
            pytest.param(["lamps", "--driver", name], f"--driver {name!r}", told, id=f"driver-{of}")
            for name, told, of in (
                ("Lamps.example.com", "must be a DNS name", "capitals"),
                ("1lamp.example.com", "begins with a letter", "a-digit-first"),
                ("lamps..com", "must be a DNS name", "an-empty-part"),
                ("a" * 52 + ".example.com", "at most 63", "too-long"),
                ("lamps", "as in lamps.example.com", "without-a-domain"),
                ("lamps.drakit.dev", "in drakit's own domain", "of-drakit"),
            )
        ),
        *(
            pytest.param(["lamps", "--image", name], f"--image {name!r}", told, id=f"image-{of}")
            for name, told, of in (
                ("registry.example.com/lamps:1.0", "has a tag", "a-tag"),
                ("lamps@sha256:abc", "has a tag or a digest", "a-digest"),
                ("registry.example.com/Lamps", "is not an image repository", "capitals"),
                ("https://registry.example.com/lamps", "not an image repository", "an-address"),
                ('a"b', "is not an image repository", "a-quote"),
            )
        ),
    ],
)
def test_an_invalid_name_is_refused(arguments, shown, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["new", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert shown in said.err
    assert told in said.err
    assert not list(tmp_path.iterdir())


def test_no_project_is_named_as_a_command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["--help"])
    names = re.findall(r"^    ([a-z][-a-z]*)\b", capsys.readouterr().out, re.M)
    assert {"new", "conformance"} <= set(names)
    for name in names:
        assert main(["new", name]) == 2
        assert "is reserved for drakit" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        pytest.param([], True, id="no-name-given"),
        pytest.param(["--driver", "lamps.example.com"], True, id="an-example-given"),
        pytest.param(["--driver", "lamps.vendor.test"], False, id="a-domain-of-ones-own"),
        pytest.param(["--driver", "lamps.my-example.com"], False, id="a-domain-that-ends-alike"),
    ],
)
def test_whoever_has_an_examples_domain_is_reported(arguments, warned, tmp_path, capsys):
    assert main(["new", "lamps", *arguments, "--directory", str(tmp_path / "lamps")]) == 0
    said = capsys.readouterr().out
    assert ("example.com is not yours" in said and "--driver" in said) == warned


@pytest.mark.parametrize("name", ["lamps", "l" * 19 + "-amps"])
def test_the_entry_of_a_backend_allows_the_edits_of_the_driver(name, tmp_path, capsys):
    assert main(["new", name, "--driver", "lamps.vendor.test", "--directory", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "needs no entry in backends.allowed" in said
    values = yaml.safe_load(said[said.index("backends:\n") :])
    validated(values)
    ((_, entry),) = NodePluginConfig.model_validate(values).backends.allowed.items()
    assert entry.driver == "lamps.vendor.test"
    source = (tmp_path / "values.yaml").read_text()
    ((directory, mode),) = entry.mounts.items()
    assert f"directory: {directory}\n" in source
    assert mode == "ro"


# ------------------------------------------------------------ folders


def test_without_a_directory_it_is_named_after_the_project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "lamps"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["lamps"]
    said = capsys.readouterr().out
    assert "\n  cd lamps\n" in said
    steps = said.partition("\nThen ")[0]
    told = [line.strip() for line in re.findall(r"^  .*", steps, re.M)[1:]]
    assert told[-1] == "pytest"
    assert set(told) <= set(commands(readme(tmp_path / "lamps")))


def test_a_folder_with_other_files_gets_the_project_beside_them(tmp_path, monkeypatch, capsys):
    (tmp_path / ".git").mkdir()
    (tmp_path / "LICENSE").write_text("mine")
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["new", "lamps", "--directory", "."]) == 0
    assert files_of(tmp_path) == {
        "LICENSE",
        *(name.format(package="lamps") for name in PLUGIN.files),
    }
    assert (tmp_path / "LICENSE").read_text() == "mine"
    assert "  cd " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("there", "named"),
    [
        pytest.param(["README.md"], "README.md", id="a-file"),
        pytest.param(["pod.yaml", "values.yaml"], "pod.yaml, values.yaml", id="files"),
        pytest.param(["src/lamps/driver.py"], "src/lamps/driver.py", id="a-file-below"),
        pytest.param(["README.md/"], "README.md", id="a-folder-instead-of-a-file"),
        pytest.param(["tests"], "tests", id="a-file-instead-of-a-folder"),
        pytest.param(["README.md@"], "README.md", id="a-link-to-nothing"),
        pytest.param(["src@"], "src", id="a-link-instead-of-a-folder"),
    ],
)
def test_nothing_is_overwritten(there, named, tmp_path, capsys):
    outside, folder = tmp_path / "outside", tmp_path / "lamps"
    for name in there:
        path = folder / name.rstrip("/@")
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        elif name.endswith("@"):
            path.symlink_to(outside)
        else:
            path.write_text("mine")
    if there == ["src@"]:
        outside.mkdir()
    before = sorted(folder.rglob("*"))

    assert main(["new", "lamps", "--directory", str(folder)]) == 1

    assert (
        f"{folder} has {named} already, and existing files are not overwritten"
        in capsys.readouterr().err
    )
    assert sorted(folder.rglob("*")) == before
    assert all(path.read_text() == "mine" for path in before if path.is_file())
    assert not outside.exists() or not list(outside.iterdir())


def test_a_file_instead_of_the_folder_is_reported(tmp_path, capsys):
    (tmp_path / "lamps").write_text("mine")
    assert main(["new", "lamps", "--directory", str(tmp_path / "lamps")]) == 1
    assert "lamps is not a directory" in capsys.readouterr().err
    assert (tmp_path / "lamps").read_text() == "mine"


@pytest.mark.parametrize("within", [".", "deep/lamps"])
def test_what_cannot_be_written_to_its_end_is_not_there(within, tmp_path):
    (tmp_path / "LICENSE").write_text("mine")
    # As on a disk that is full: the first file has room, the driver has not.
    program = (
        "import resource, sys; from drakit_cli.main import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000));"
        "sys.exit(main(['new', 'lamps', '--directory', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, str(tmp_path / within)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "File too large; the files written so far were removed" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.rglob("*")) == [tmp_path / "LICENSE"]


# ------------------------------------------------------------ the page


def test_the_page_shows_the_files_and_the_commands_of_the_project(lamps):
    files = (ROOT / PAGE).read_text().partition("| File | Content |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `([^`]+)` \|", files, re.M)
    assert sorted(named) == sorted(path.format(package="lamps") for path in PLUGIN.files)
    shown = {
        line.replace('"$IMAGE-nodeplugin:', '"registry.example.com/lamps-nodeplugin:').replace(
            '"', ""
        )
        for line in page_commands(PAGE)
    }
    given = [
        line.replace("BASE=registry.example.com/drakit-nodeplugin:0.1.0", "BASE=$BASE").replace(
            '"', ""
        )
        for line in commands(readme(lamps))
    ]
    # The page installs drakit and the project one after the other.
    others = [line for line in given if line not in shown]
    assert others[0] == "pip install $DRAKIT[testing] --editable '.[dev]'"
    assert {" ".join(line.split()[:2]) for line in others[1:]} <= {
        *("kubectl describe", "kubectl -n", "kubectl get")
    }


def test_the_page_explains_every_argument_of_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["new", "--help"])
    said = capsys.readouterr().out
    arguments = {"NAME", *re.findall(r"^  (--\w+)", said, re.M)}
    table = (ROOT / PAGE).read_text().partition("| Argument |")[2].partition("| File |")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", table, re.M)) == arguments
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "create a project for a new driver" in capsys.readouterr().out
