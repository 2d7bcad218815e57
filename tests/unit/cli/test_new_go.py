"""`drakit new --language go` writes a project that works, on the Go module of this checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from drakit_cli import new
from drakit_cli.main import main
from drakit_formats.json_schema import JsonSchema
from drakit_nodeplugin.config import NodePluginConfig
from e2e.images.go import ENVIRONMENT
from tests.programs import needs_go
from tests.unit.chart.conftest import helm
from tests.unit.cli.projects import DEVICE_DRIVER, PROJECTS, commands, readme, run, write
from tests.unit.docs.listings import ROOT, validated
from tests.unit.docs.listings import commands as page_commands
from tools.go_proxy import write_proxy

__all__ = ("helm",)

# The first time gRPC is compiled.
pytestmark = pytest.mark.timeout(900)


def go(project: Path, *arguments: str, status: int = 0, program: str = "go", **env: str) -> str:
    done = subprocess.run(
        [program, *arguments],
        cwd=project,
        env={**os.environ, **ENVIRONMENT, **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def lamps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project `lamps` in Go, which tests only read."""
    folder = tmp_path_factory.mktemp("go") / "lamps"
    return write(folder, "--language", "go", "--checkout", str(ROOT))


# ------------------------------------------------------------ the checkout


def test_without_a_clone_it_is_refused_with_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(new, "__file__", str(tmp_path / "cli" / "drakit_cli" / "new.py"))
    monkeypatch.setattr(new, "distribution", lambda _: SimpleNamespace(read_text=lambda _: None))
    assert main(["new", "lamps", "--language", "go", "--directory", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "has no release yet" in said.err
    assert "name a clone with --checkout PATH" in said.err
    assert said.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--language", "go", "--checkout", "."], "--checkout . has no proto/go/go.mod"),
        (["--checkout", "."], "--checkout is only for --language go"),
    ],
    ids=["a-folder-that-is-no-clone", "a-driver-in-python"],
)
def test_a_checkout_that_cannot_be_used_is_refused(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "lamps", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_clone_is_the_one_from_which_pip_installed(tmp_path, monkeypatch):
    clone = tmp_path / "my clone"
    (clone / "proto" / "go").mkdir(parents=True)
    for name in ("go.mod", "go.sum"):
        shutil.copy(ROOT / "proto" / "go" / name, clone / "proto" / "go")
    origin = json.dumps({"url": clone.as_uri(), "dir_info": {}})
    monkeypatch.setattr(new, "__file__", str(tmp_path / "site-packages" / "drakit_cli" / "new.py"))
    monkeypatch.setattr(new, "distribution", lambda _: SimpleNamespace(read_text=lambda _: origin))
    project = write(tmp_path / "lamps", "--language", "go")
    module = (project / "go.mod").read_text()
    assert f'replace drakit.dev/backend => "{clone}/proto/go"' in module
    assert f"export DRAKIT='{clone}'" in readme(project)


# ------------------------------------------------------------ the files


def test_its_values_are_the_entry_that_is_printed_and_the_kit_gets(tmp_path, capsys):
    project = write(tmp_path / "lamps", "--name", "l" * 19 + "-amps", "--language", "go")
    said = capsys.readouterr().out
    values = yaml.safe_load((project / "drakit-values.yaml").read_text())
    assert yaml.safe_load(said[said.index("backends:\n") :].partition("\n\n")[0]) == values
    validated(values)
    ((name, entry),) = NodePluginConfig.model_validate(values).backends.allowed.items()
    assert yaml.safe_load((project / "chart" / "values.yaml").read_text())["backend"] == name
    # The kit tests the driver with the same entry, but for the directory.
    script = (project / "conformance.sh").read_text()
    tested = yaml.safe_load(script.partition("<< 'END'\n")[2].partition("\nEND\n")[0])
    assert tested["driver"] == entry.driver
    assert tested["env"] == list(entry.env)
    assert list(tested["mounts"].values()) == list(entry.mounts.values())


def test_its_chart_runs_the_image_that_the_readme_builds_and_waits_for_the_node_plugin(lamps, helm):
    chart = str(lamps / "chart")
    done = helm("template", "lamps", chart, "--namespace", "lamps", values={"probePort": 8082})
    assert done.returncode == 0, done.stderr
    (body,) = yaml.safe_load_all(done.stdout)
    pod = body["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = commands(readme(lamps))
    assert f"docker build -t {container['image']} ." in given
    assert f"docker push {container['image']}" in given
    (copied,) = re.findall(r"^COPY (\S+)", (lamps / "Dockerfile").read_text(), re.M)
    assert f"CGO_ENABLED=0 go build -trimpath -o {copied} ." in given
    assert (lamps / ".dockerignore").read_text().splitlines() == ["*", f"!{copied}"]
    values = yaml.safe_load((lamps / "drakit-values.yaml").read_text())
    ((name, entry),) = NodePluginConfig.model_validate(values).backends.allowed.items()
    parent = NodePluginConfig.model_validate({"backends": {"enabled": True}}).backends_directory
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    paths = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"]}
    assert {mount: paths[name] for mount, name in mounts.items()} == {
        "/run/drakit": f"{parent}/{name}",
        **dict.fromkeys(map(str, entry.mounts), *map(str, entry.mounts)),
    }
    assert container["args"][:2] == ["-socket=/run/drakit/lamps.sock", "-probe-port=8082"]
    (port,) = container["ports"]
    assert port == {"name": "probes", "containerPort": 8082}
    for probe, path in (("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}


def test_its_chart_has_the_schema_that_the_backend_announces(lamps, helm):
    main = (lamps / "main.go").read_text()
    schema = json.loads(main.partition("parameterSchema = `")[2].partition("`")[0])
    arguments = ("template", "lamps", str(lamps / "chart"), "--api-versions", DEVICE_DRIVER)
    done = helm(*arguments, values={})
    assert done.returncode == 0, done.stderr
    (body,) = [each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "DeviceDriver"]
    assert body["metadata"]["name"] == "lamps.example.com"
    assert body["spec"]["parameters"] == {"": schema}
    assert JsonSchema(schema).problems({"level": 100}) == []
    assert JsonSchema(schema).problems({"level": 101}) == ["level: must be at most 100"]


def test_the_commands_that_are_printed_are_those_of_the_readme(tmp_path, capsys):
    project = write(tmp_path / "lamps", "--language", "go")
    steps = capsys.readouterr().out.partition("\nThen ")[0]
    printed = [line.strip() for line in re.findall(r"^  .*", steps, re.M)[1:]]
    assert printed[-1] == "bash conformance.sh"
    assert set(printed) <= set(commands(readme(project)))


@pytest.mark.parametrize(
    ("drakit", "accepted"),
    [
        ("", False),
        ("https://git.example.com/drakit", False),
        ("https://git.example.com/drakit@0123abc", True),
    ],
    ids=["not-set", "without-a-commit", "a-commit"],
)
def test_its_workflow_fails_without_a_commit_of_drakit(drakit, accepted, lamps, tmp_path):
    workflow = yaml.safe_load((lamps / ".github" / "workflows" / "ci.yaml").read_text())
    steps = workflow["jobs"]["check"]["steps"]
    (step,) = [step for step in steps if step.get("name") == "drakit"]
    assert step["env"] == {"DRAKIT": "${{ vars.DRAKIT }}"}
    for name in ("git", "go", "python"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\nmkdir -p ../drakit\n')
        program.chmod(0o755)
    (tmp_path / "lamps").mkdir()
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=tmp_path / "lamps",
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "DRAKIT": drakit},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    calls = tmp_path / "calls"
    if not accepted:
        assert (done.returncode, calls.exists()) == (1, False)
        assert done.stdout.startswith("::error::drakit has no release yet. Set the repository")
        return
    assert done.returncode == 0, done.stderr
    assert calls.read_text().splitlines() == [
        "git clone --quiet https://git.example.com/drakit ../drakit",
        "git -C ../drakit checkout --quiet --detach 0123abc",
        f"go mod edit -replace drakit.dev/backend={tmp_path / 'drakit'}/proto/go",
        "python -m pip install ../drakit[testing]",
    ]


def test_its_page_shows_the_commands_of_the_readme(lamps):
    shown = page_commands("docs/vendors/go-backend.md")
    given = commands(readme(lamps))
    asked = ("kubectl describe", "kubectl get", "kubectl -n lamps logs")
    for line in given:
        if line.startswith(("go ", "bash ", "CGO_ENABLED", "docker ", "kubectl ")):
            assert line in shown or line.startswith(asked), line
    assert f'make -C "$DRAKIT" driver-image IMAGE=localhost/lamps:{new.PROJECT_VERSION}' in str(
        shown
    )


# ------------------------------------------------------------ the program


@needs_go
@pytest.mark.parametrize("arguments", PROJECTS)
def test_its_sources_are_formatted(arguments, tmp_path):
    project = write(tmp_path / "project", *arguments, "--language", "go")
    assert go(project, "-l", ".", program="gofmt") == ""


@needs_go
def test_its_tests_pass(lamps):
    go(lamps, "vet", "./...")
    assert go(lamps, "test", "./...").startswith("ok ")


MISTAKES = {
    "TestAContainerGetsTheDeviceAndItsLevel": (
        *("driver.go", 'device.GetRequest()+"__"+device.GetName())', "device.GetRequest())"),
    ),
    "TestADeviceThatIsGoneIsNamed": (
        "driver.go",
        "|| !found.Mode().IsRegular()",
        "&& found != nil",
    ),
    "TestABrokenDeviceIsUnhealthy": ("driver.go", "if bytes.Contains", "if !bytes.Contains"),
    "TestInvalidParametersAreRefused": ("driver.go", "given.Level > 100", "given.Level > 1000"),
    "TestAFileIsADevice": ("driver.go", "if entry.Type()", "if !entry.Type()"),
    "TestPrepareAndUnprepareLeaveTheDeviceAsItIs": (
        "driver.go",
        "\t\tprepared.Edits = append",
        '\t\tos.WriteFile(filepath.Join(d.directory, device.GetName()), []byte("on"), 0o644)\n'
        "\t\tprepared.Edits = append",
    ),
    "TestTheParametersInPodYAMLAreValid": ("pod.yaml", '"level": 80', '"lebel": 80'),
}
"""Mistakes in a project, by the test that notices them: file, right and wrong text."""


@needs_go
def test_its_tests_notice_mistakes(tmp_path):
    project = write(tmp_path / "lamps", "--language", "go")
    for name, right, wrong in MISTAKES.values():
        text = (project / name).read_text()
        assert text.count(right) == 1
        (project / name).write_text(text.replace(right, wrong))
    said = go(project, "test", "./...", status=1)
    assert set(re.findall(r"^--- FAIL: (\w+)", said, re.M)) == set(MISTAKES)


def conformance(project: Path, *arguments: str) -> str:
    # `drakit` of this environment runs the checkout that the tests are in.
    (project / "build").mkdir(exist_ok=True)
    program = project / "build" / "drakit"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m drakit_cli.main "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return go(project, "conformance.sh", *arguments, program="bash", PATH=path)


@needs_go
def test_it_is_held_to_the_rules(tmp_path):
    project = write(tmp_path / "lamps", "--language", "go")
    said = conformance(project, "--rule", "prepare", "--rule", "cdi-valid")
    assert "2 passed" in said


@needs_go
@pytest.mark.slow
def test_it_follows_all_rules(tmp_path):
    project = write(tmp_path / "lamps", "--language", "go")
    said = conformance(project)
    # The others are about what the project does not have, such as partitions and shares.
    found = re.search(r"^(\d+) passed, (\d+) skipped$", said, re.M)
    assert found is not None, said
    assert int(found[1]) > 30 > 10 > int(found[2])


# ------------------------------------------------------------ a module proxy


@needs_go
def test_the_module_is_built_from_a_module_proxy_without_the_checkout(tmp_path):
    """This is a vendor's workflow once the module is published, with a proxy in a folder."""
    proxy = tmp_path / "proxy"
    run(ROOT, "tools.go_proxy", str(proxy), "--version", "v0.3.0")
    project = write(tmp_path / "lamps", "--language", "go")
    module = "drakit.dev/backend"
    go(project, "mod", "edit", f"-dropreplace={module}", f"-require={module}@v0.3.0")
    downloads = Path(go(ROOT, "env", "GOMODCACHE").strip()) / "cache" / "download"
    env = {
        "GOFLAGS": f"{ENVIRONMENT['GOFLAGS']} -mod=mod -modcacherw",
        "GOMODCACHE": str(tmp_path / "modules"),
        "GOPROXY": f"{proxy.as_uri()},{downloads.as_uri()},{go(ROOT, 'env', 'GOPROXY').strip()}",
        "GONOSUMDB": module,
    }
    go(project, "get", f"{module}@v0.3.0", **env)
    go(project, "build", "-o", "program", ".", **env)
    listed = json.loads(go(project, "list", "-m", "-json", module, **env))
    assert (listed["Version"], "Replace" in listed) == ("v0.3.0", False)
    assert Path(listed["Dir"]).is_relative_to(tmp_path / "modules")
    assert "v0.3.0 h1:" in (project / "go.sum").read_text()
    built = go(project, "version", "-m", "program", **env)
    assert re.search(rf"\tdep\t{module}\tv0\.3\.0\th1:", built)


def test_the_archive_follows_the_rules_of_the_format(tmp_path):
    first = write_proxy(tmp_path, version="v0.1.0")
    write_proxy(tmp_path, version="v0.2.0")
    assert (first.parent / "list").read_text() == "v0.1.0\nv0.2.0\n"
    names = zipfile.ZipFile(first).namelist()
    prefix = "drakit.dev/backend@v0.1.0/"
    assert all(name.startswith(prefix) and not name.endswith("/") for name in names)
    assert {prefix + name for name in ("LICENSE", "go.mod", "backend.go", "v1/backend.pb.go")} <= {
        *names
    }
    assert len(names) == len({name.lower() for name in names})
    # The same sources have the same checksum, on every machine.
    again = write_proxy(tmp_path / "again", version="v0.1.0")
    assert again.read_bytes() == first.read_bytes()
