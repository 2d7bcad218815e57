"""`drakit new`: what it writes is a project that works, and it writes over nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement

from drakit import Inventory
from drakit.cli.main import main
from drakit.cli.new import FILES, MAX_NAME, project_of
from drakit.resource.inventory import check_inventory
from drakit_nodeplugin.config import NodePluginConfig
from drakit_nodeplugin.endpoints.loading import LoadedDriver, load_drivers
from tests.fakes.node import StaticNode
from tests.unit.docs.listings import listings

# Programs are started in most of them.
pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[3]
PAGE = "docs/new-driver.md"

LONGEST = "rack-" * (MAX_NAME // 5 - 1) + "lamps"

PROJECTS = [
    pytest.param([], id="lamps"),
    pytest.param(["--name", "x"], id="the-shortest-name"),
    pytest.param(
        ["--name", LONGEST, "--driver", "a" * 51 + ".example.com"], id="the-longest-names"
    ),
    pytest.param(
        ["--name", "driver", "--image", "localhost:5000/a/b_c"], id="a-name-of-drakits-types"
    ),
]
"""Arguments of `drakit new`; names that are long or short break lines elsewhere."""


def write(folder: Path, *arguments: str) -> Path:
    """Write a project into a folder, which is made."""
    given = ["lamps", *arguments]
    if "--name" in arguments:
        given = [arguments[1], *arguments[2:]]
    assert main(["new", *given, "--directory", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def lamps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project `lamps`, which tests only read."""
    return write(tmp_path_factory.mktemp("new") / "lamps")


@pytest.fixture
def driver(lamps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedDriver:
    """The project's driver as the node plugin loads it for the project's values."""
    monkeypatch.syspath_prepend(str(installed(lamps)))
    (entry,) = values_of(lamps)["nodeplugin"]["drivers"]
    entries = NodePluginConfig.model_validate(
        {"drivers": [entry | {"config": {"directory": str(tmp_path)}}]}
    ).drivers
    (loaded,) = load_drivers(entries, file=Path("plugin.yaml"), node=StaticNode(name="node-1"))
    yield loaded
    for name in [name for name in sys.modules if name.partition(".")[0] == "lamps"]:
        del sys.modules[name]


def run(project: Path, *argv: str, status: int = 0, **env: str) -> str:
    """Run a module of this environment in a project; give its output."""
    done = subprocess.run(
        [sys.executable, "-B", "-m", *argv],
        cwd=project,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def installed(project: Path) -> Path:
    """Install the project where its Dockerfile expects it, as its README says."""
    target = project / "build" / "driver"
    if not target.exists():
        command = re.search(r"pip (install --no-deps .*) \.$", readme(project), re.M)
        assert command is not None
        run(project, "pip", *command[1].split(), "--quiet", "--no-build-isolation", ".")
    return target


def readme(project: Path) -> str:
    return (project / "README.md").read_text()


def commands(text: str) -> list[str]:
    """The commands of a README, those of several lines in one."""
    lines = "\n".join(re.findall(r"^    (.*)", text, re.M))
    return re.sub(r" *\\\n *", " ", lines).splitlines()


def values_of(project: Path) -> dict[str, Any]:
    return yaml.safe_load((project / "values.yaml").read_text())


def files_of(project: Path) -> set[str]:
    return {str(p.relative_to(project)) for p in project.rglob("*") if p.is_file()}


# ------------------------------------------------------------ the project works


def test_every_template_is_a_file_of_the_project(tmp_path):
    project = write(tmp_path / "lamps")
    assert files_of(project) == {path.format(package="lamps") for path in FILES}
    templates = ROOT / "drakit" / "cli" / "templates"
    assert sorted(FILES.values()) == sorted(path.name for path in templates.iterdir())
    assert not [name for name in files_of(project) if "@@" in (project / name).read_text()]


@pytest.mark.parametrize("arguments", PROJECTS)
def test_a_projects_tests_and_lint_pass(arguments, tmp_path):
    project = write(tmp_path / "project", *arguments)
    run(project, "ruff", "format", "--no-cache", "--check", ".")
    run(project, "ruff", "check", "--no-cache", ".")
    said = run(project, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_driver.py")
    assert re.fullmatch(r"\.+ +\[100%\]\n\d+ passed in .*\n", said)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("{device.request}__{device.name}", "{device.request}", id="variables"),
        pytest.param("if not file.is_file()", "if False", id="a-device-that-is-gone"),
        pytest.param('"broken" in', '"fine" in', id="health"),
        pytest.param("le=100", "le=1000", id="bounds-of-parameters"),
        pytest.param("if file.is_file()", "if not file.is_file()", id="devices"),
    ],
)
def test_a_projects_tests_notice_a_driver_that_is_wrong(right, wrong, tmp_path):
    project = write(tmp_path / "lamps")
    source = project / "src" / "lamps" / "driver.py"
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))
    tests = "tests/test_driver.py"
    assert "1 failed" in run(project, "pytest", "-p", "no:cacheprovider", tests, status=1)


# All rules take a minute and more: `make conformance` and the e2e test have them.
def test_a_project_is_held_to_the_rules(lamps):
    test = "tests/test_conformance.py"
    said = run(lamps, "pytest", "-p", "no:cacheprovider", test, "-k", "cdi-valid or names-stay")
    assert "2 passed" in said
    rules = run(lamps, "pytest", "-q", "-p", "no:cacheprovider", test, "--collect-only")
    assert len(re.findall(r"^tests/test_conformance\.py::test_conformance\[", rules, re.M)) > 20


def test_a_project_that_breaks_a_rule_is_told_which(tmp_path):
    project = write(tmp_path / "lamps")
    source = project / "src" / "lamps" / "driver.py"
    source.write_text(source.read_text().replace("device.parameters.level", "id(claim)"))
    test = "tests/test_conformance.py::test_conformance[prepare-again]"
    said = run(project, "pytest", "-p", "no:cacheprovider", test, status=1)
    assert "the rule: a claim that is prepared again gets the same result" in said


def test_a_projects_driver_is_tested_by_its_entry_point(lamps, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("directory: '{root}/devices'")
    given = ("--config", str(config), "--rule", "prepare")
    setup = ("--setup", "mkdir $DRAKIT_ROOT/devices && touch $DRAKIT_ROOT/devices/first")
    path = {"PYTHONPATH": str(installed(lamps))}
    run(tmp_path, "drakit.cli.main", "conformance", "lamps", *given, *setup, **path)


def test_a_projects_types_are_right(lamps, tmp_path):
    # From another folder, so that the settings of this repository do not hold.
    settings = {
        "typeCheckingMode": "basic",
        "include": [str(lamps)],
        "extraPaths": [str(lamps / "src"), str(ROOT)],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    said = run(tmp_path, "pyright", "--pythonpath", sys.executable)
    assert "0 errors, 0 warnings" in said


async def test_its_driver_is_found_by_its_entry_point_and_publishes_devices(driver, tmp_path):
    assert driver.name == "lamps.example.com"
    (tmp_path / "first").touch()
    made = driver.make()
    stream = made.devices()
    found = await anext(stream)
    await stream.aclose()
    assert [device.name for device in found] == ["first"]
    assert not check_inventory(Inventory(devices=found)).left_out


def test_the_package_is_where_the_dockerfile_takes_it_from(lamps):
    target = installed(lamps)
    text = (lamps / "Dockerfile").read_text()
    assert re.search(r"^COPY build/driver (\S+)\nENV PYTHONPATH=\1$", text, re.M)
    assert (lamps / ".dockerignore").read_text().splitlines() == ["*", "!build/driver"]
    assert {path.name for path in target.iterdir()} == {"lamps", "lamps-0.1.0.dist-info"}
    assert not list(target.rglob("*.pyc"))


# ------------------------------------------------------------ its files fit each other, and drakit


@pytest.mark.parametrize("arguments", PROJECTS)
def test_its_values_are_those_of_the_chart(arguments, tmp_path):
    def merged(defaults: Any, given: Any) -> Any:
        if not isinstance(defaults, dict):
            return given
        return defaults | {key: merged(defaults.get(key), given[key]) for key in given}

    chart = ROOT / "charts" / "drakit"
    defaults = yaml.safe_load((chart / "values.yaml").read_text())
    values = values_of(write(tmp_path / "project", *arguments))
    schema = json.loads((chart / "values.schema.json").read_text())
    jsonschema.validate(merged(defaults, values), schema)
    assert defaults.keys() >= values.keys()
    assert defaults["nodeplugin"].keys() >= values["nodeplugin"].keys()


def test_the_directory_of_its_devices_is_mounted_where_the_host_has_it(lamps):
    values = values_of(lamps)["nodeplugin"]
    ((entry,), (volume,), (mount,)) = (
        values[key] for key in ("drivers", "volumes", "volumeMounts")
    )
    directory = entry["config"]["directory"]
    assert (volume["hostPath"]["path"], mount["mountPath"]) == (directory, directory)
    assert volume["name"] == mount["name"]
    taken = re.findall(
        r"- name: ([-\w]+)\n\s+(?:hostPath|configMap)",
        (ROOT / "charts/drakit/templates/nodeplugin-daemonset.yaml").read_text(),
    )
    assert len(taken) > 5
    assert volume["name"] not in taken
    assert f"touch {directory}/first" in commands(readme(lamps))


@pytest.mark.parametrize("arguments", PROJECTS)
def test_its_manifests_fit_each_other(arguments, tmp_path):
    project = write(tmp_path / "project", *arguments)
    texts = "---\n".join((project / name).read_text() for name in ("deviceclass.yaml", "pod.yaml"))
    device_class, template, pod = yaml.safe_load_all(texts)
    (selector,) = device_class["spec"]["selectors"]
    name = device_class["metadata"]["name"]
    assert selector["cel"]["expression"] == f'device.driver == "{name}"'
    devices = template["spec"]["spec"]["devices"]
    (request,), (config,) = devices["requests"], devices["config"]
    assert request["exactly"]["deviceClassName"] == name
    assert (config["requests"], config["opaque"]["driver"]) == ([request["name"]], name)
    (source,) = pod["spec"]["resourceClaims"]
    assert source["resourceClaimTemplateName"] == template["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": source["name"]}]
    assert len(pod["metadata"]["name"]) <= MAX_NAME


async def test_its_pod_asks_for_what_its_driver_has(lamps, driver, tmp_path):
    _, template, pod = yaml.safe_load_all(
        (lamps / "deviceclass.yaml").read_text() + "---\n" + (lamps / "pod.yaml").read_text()
    )
    (tmp_path / "first").touch()
    made = driver.make()
    stream = made.devices()
    (device,) = await anext(stream)
    await stream.aclose()
    request = template["spec"]["spec"]["devices"]["requests"][0]
    (selector,) = request["exactly"]["selectors"]
    asked = re.fullmatch(
        rf'device\.attributes\["{driver.name}"\]\.(\w+) == "(.*)"', selector["cel"]["expression"]
    )
    assert asked is not None
    assert device.attributes[asked[1]] == asked[2]
    (config,) = template["spec"]["spec"]["devices"]["config"]
    given = made.parameters_type.model_validate(config["opaque"]["parameters"])
    assert given != made.parameters_type()
    command = pod["spec"]["containers"][0]["command"][-1]
    assert "grep ^LAMPS_" in command
    assert f"ls /run/{driver.name};" in command


def test_its_readme_names_what_its_values_name(lamps):
    image = values_of(lamps)["image"]
    name = f"{image['repository']}-nodeplugin:{image['tag']}"
    (base,) = re.findall(r"^ARG BASE=(.*)", (lamps / "Dockerfile").read_text(), re.M)
    given = commands(readme(lamps))
    assert f"docker build -t {name} --build-arg BASE={base} ." in given
    assert f"docker push {name}" in given
    assert base == "registry.example.com/drakit-nodeplugin:0.1.0"
    # As drakit's own README says it.
    (label,) = re.findall(r"pod-security\S+", readme(lamps))
    assert label in (ROOT / "README.md").read_text()


def test_it_asks_for_drakit_as_it_is_and_not_for_one_that_may_break_it(lamps):
    project = tomllib.loads((lamps / "pyproject.toml").read_text())["project"]
    (text,) = project["dependencies"]
    wanted = Requirement(text)
    assert wanted.name == "drakit"
    assert wanted.specifier.contains(version("drakit"), prereleases=True)
    assert not wanted.specifier.contains("0.2.0")
    extras = [Requirement(text) for text in project["optional-dependencies"]["dev"]]
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {extra.name for extra in extras} == {"drakit", "pytest", "ruff"}
    for extra in extras:
        assert extra.extras <= own["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("drakit", "requirement", "tag"),
    [
        pytest.param("0.1.0.dev0", "drakit>=0.1.0.dev0,<0.2", "0.1.0", id="before-a-release"),
        pytest.param("0.3.2", "drakit>=0.3.2,<0.4", "0.3.2", id="before-1"),
        pytest.param("1.4.2", "drakit>=1.4.2,<2", "1.4.2", id="after-1"),
        pytest.param("2.0rc1+local.7", "drakit>=2.0rc1,<3", "2.0.0", id="a-build-of-ones-own"),
    ],
)
def test_what_it_asks_for_follows_from_the_version_that_wrote_it(drakit, requirement, tag):
    project = project_of("lamps", driver=None, image=None, drakit=drakit)
    assert project.requirement == requirement
    assert project.base == f"registry.example.com/drakit-nodeplugin:{tag}"


def test_its_workflow_runs_what_its_readme_says_and_needs_no_secret(lamps):
    text = (lamps / ".github" / "workflows" / "ci.yaml").read_text()
    workflow = yaml.safe_load(text)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert "secrets" not in text
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 20 for job in workflow["jobs"].values())
    for step in steps:
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
    said = (
        readme(lamps).replace(".venv/bin/", "").replace("CHECKOUT", '"$DRAKIT"').replace("'", '"')
    )
    for step in steps:
        for line in step.get("run", "").splitlines():
            program = line.removeprefix("python -m ")
            if not program.startswith(("pytest", "docker")):
                assert program in said, line
    tests = [step["run"] for step in steps if step.get("run", "").startswith("pytest")]
    assert tests == [
        "pytest --ignore=tests/test_conformance.py",
        "pytest tests/test_conformance.py",
    ]
    for variable in re.findall(r"vars\.(\w+)", text):
        assert f"`{variable}`" in readme(lamps)


def test_all_templates_are_in_the_wheel(tmp_path):
    run(ROOT, "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    folder = Path("drakit/cli/templates")
    assert {path.name for path in names if path.parent == folder} == set(FILES.values())


# ------------------------------------------------------------ names


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command where it must be refused as wrong use; give what it says."""
    assert main(["new", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        pytest.param("", "does not begin with a letter", id="empty"),
        pytest.param("Rack_Lamps", "try rack-lamps", id="capitals-and-underscores"),
        pytest.param("3lamps", "try lamps", id="a-digit-first"),
        pytest.param("lamps-", "try lamps", id="a-dash-last"),
        pytest.param("../lamps", "try lamps", id="a-path"),
        pytest.param("l" * 41, f"try {'l' * 40}", id="too-long"),
        pytest.param("rack--lamps", "two dashes in a row; try rack-lamps", id="two-dashes"),
        pytest.param("lämpchen", "lower-case letters", id="no-ascii"),
        pytest.param("lamps\n", "try lamps", id="a-line-end"),
        pytest.param("class", "a meaning in YAML or Python", id="a-python-word"),
        pytest.param("null", "a meaning in YAML or Python", id="a-yaml-word"),
        pytest.param("json", "would hide the Python package json", id="of-the-standard-library"),
        pytest.param("tests", "would hide the Python package tests", id="the-tests"),
        pytest.param(
            "drakit-proto", "hide the Python package drakit_proto", id="a-package-of-ours"
        ),
        pytest.param("hostdev", "is drakit's own", id="a-driver-of-ours"),
    ],
)
def test_a_projects_name_is_refused(name, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "--", name)
    assert f"the project's name {name!r}" in said
    assert told in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("driver", "told"),
    [
        pytest.param("Lamps.example.com", "is no DNS name", id="capitals"),
        pytest.param("1lamp.example.com", "begins with a letter", id="a-digit-first"),
        pytest.param("lamps..com", "is no DNS name", id="an-empty-part"),
        pytest.param("a" * 52 + ".example.com", "at most 63", id="too-long"),
        pytest.param("lamps", "as in lamps.example.com", id="without-a-domain"),
        pytest.param("lamps.drakit.dev", "in drakit's own domain", id="of-drakit"),
    ],
)
def test_a_drivers_name_is_refused(driver, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "lamps", "--driver", driver)
    assert f"--driver {driver!r}" in said
    assert told in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("image", "told"),
    [
        pytest.param("registry.example.com/lamps:1.0", "has a tag", id="a-tag"),
        pytest.param("lamps@sha256:abc", "has a tag or a digest", id="a-digest"),
        pytest.param("registry.example.com/Lamps", "is no repository", id="capitals"),
        pytest.param("https://registry.example.com/lamps", "is no repository", id="an-address"),
        pytest.param('a"b', "is no repository", id="a-quote"),
    ],
)
def test_an_image_is_refused(image, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "lamps", "--image", image)
    assert f"--image {image!r}" in said
    assert told in said
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------ folders


def test_without_a_directory_it_is_named_after_the_project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "lamps"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["lamps"]
    said = capsys.readouterr().out
    assert "\n  cd lamps\n" in said
    told = [line.strip() for line in re.findall(r"^  .*", said, re.M)[1:]]
    assert set(told) <= set(commands(readme(tmp_path / "lamps")))


def test_a_folder_with_other_files_gets_the_project_beside_them(tmp_path, monkeypatch, capsys):
    (tmp_path / ".git").mkdir()
    (tmp_path / "LICENSE").write_text("mine")
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["new", "lamps", "--directory", "."]) == 0
    assert files_of(tmp_path) == {"LICENSE", *(name.format(package="lamps") for name in FILES)}
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

    assert f"{folder} has {named} already, and nothing is overwritten" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before
    assert all(path.read_text() == "mine" for path in before if path.is_file())
    assert not outside.exists() or not list(outside.iterdir())


def test_a_file_instead_of_the_folder_is_told(tmp_path, capsys):
    (tmp_path / "lamps").write_text("mine")
    assert main(["new", "lamps", "--directory", str(tmp_path / "lamps")]) == 1
    assert "lamps is no folder" in capsys.readouterr().err
    assert (tmp_path / "lamps").read_text() == "mine"


@pytest.mark.parametrize("within", [".", "deep/lamps"])
def test_what_cannot_be_written_to_its_end_is_not_there(within, tmp_path):
    (tmp_path / "LICENSE").write_text("mine")
    # As on a disk that is full: the first file has room, the driver has not.
    program = (
        "import resource, sys; from drakit.cli.main import main;"
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
    assert "File too large; what was written before was removed" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.rglob("*")) == [tmp_path / "LICENSE"]


# ------------------------------------------------------------ the page


def test_the_page_shows_the_files_and_the_commands_of_the_project(lamps):
    text = (ROOT / PAGE).read_text()
    files = text.partition("| file | what |")[2]
    named = re.findall(r"^\| `([^`]+)` \|", files, re.M)
    assert sorted(named) == sorted(path.format(package="lamps") for path in FILES)
    shown = "\n".join(listings(PAGE, "console"))
    given = [
        line.removeprefix("$ ").strip()
        for line in re.sub(r" *\\\n *", " ", shown).splitlines()
        if line.startswith(("$ ", "node# "))
    ]
    given = [line.removeprefix("node# ").partition("   #")[0] for line in given]
    first, *others = given
    assert first == "drakit new lamps && cd lamps"
    assert others == [line for line in commands(readme(lamps)) if line in others]
    assert len(others) >= 14
