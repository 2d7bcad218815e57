"""`drakit package`: the packages of a driver, for the Python and the processor of the image."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from drakit_cli.main import main
from drakit_cli.package import PYTHON_VERSION, foreign_modules
from e2e.images.__main__ import main as images
from tests.unit.cli.projects import write
from tests.unit.docs.listings import ROOT

HERE = f"cp{sys.version_info.major}{sys.version_info.minor}"
IMAGE = f"cp{PYTHON_VERSION.replace('.', '')}"


def wheel(
    folder: Path, name: str, version: str, *, tag: str, requires: tuple[str, ...] = ()
) -> None:
    """Write a wheel; one with a tag of CPython has a module in C."""
    python, _, platform = tag.split("-")
    info = f"{name}-{version}.dist-info"
    module = f"{name}/__init__.py"
    if python != "py3":
        machine = re.sub(r"^[a-z]+_(2_17_)?", "", platform)
        module = f"{name}/core.cpython-{python.removeprefix('cp')}-{machine}-linux-gnu.so"
    lines = [f"Requires-Dist: {each}" for each in requires]
    files = {
        module: "",
        f"{info}/METADATA": "\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]
        ),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as archive:
        for path, content in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, content)


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """An index with an SDK in C for several Pythons and processors, and its dependencies."""
    folder = tmp_path / "index"
    folder.mkdir()
    for python in {HERE, IMAGE}:
        # One of a package index, and one that a vendor built.
        for platform in ("manylinux_2_17_x86_64", "linux_aarch64"):
            tag = f"{python}-{python}-{platform}"
            requires = ("lampwire>=2", "pydantic>=2")
            wheel(folder, "lampsdk", "1.4.0", tag=tag, requires=requires)
    wheel(folder, "lampwire", "2.1.0", tag="py3-none-any")
    for version in (pinned("pydantic"), "99.0.0"):
        wheel(folder, "pydantic", version, tag="py3-none-any")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    # The build backend is the one of this environment.
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    return folder


def pinned(name: str) -> str:
    text = (ROOT / "requirements/nodeplugin.txt").read_text()
    (version,) = re.findall(rf"^{name}==(\S+)", text, re.M)
    return version


def project(folder: Path, *dependencies: str) -> Path:
    """A new project whose package has dependencies."""
    write(folder, "--container")
    file = folder / "pyproject.toml"
    listed = ", ".join(f'"{each}"' for each in dependencies)
    text = file.read_text()
    assert "\ndependencies = []\n" in text
    file.write_text(text.replace("\ndependencies = []\n", f"\ndependencies = [{listed}]\n"))
    return folder


def packages(target: Path) -> set[str]:
    return {f"{each.name} {each.version}" for each in distributions(path=[str(target)])}


@pytest.mark.parametrize(("architecture", "machine"), [("amd64", "x86_64"), ("arm64", "aarch64")])
def test_the_packages_are_for_the_image(index, tmp_path, capsys, architecture, machine):
    folder = project(tmp_path / "lamps", "lampsdk>=1.4,<2")
    old = folder / "build" / "driver" / "old"
    old.mkdir(parents=True)
    capsys.readouterr()

    assert main(["package", str(folder), "--architecture", architecture]) == 0

    target = folder / "build" / "driver"
    named = {"lamps 0.1.0", "lampsdk 1.4.0", "lampwire 2.1.0"}
    # The image has pydantic, and two of them would be one too many.
    assert packages(target) == named
    assert not (target / "pydantic").exists()
    assert [path.name for path in target.rglob("*.so")] == [
        f"core.cpython-{IMAGE.removeprefix('cp')}-{machine}-linux-gnu.so"
    ]
    assert foreign_modules(target, machine=machine) == []
    assert not old.exists()
    assert [path.name for path in target.parent.iterdir()] == ["driver"]
    assert capsys.readouterr().out == (
        f"{target}: {', '.join(sorted(named))}; for Python {PYTHON_VERSION} on {machine}\n"
    )


@pytest.mark.parametrize(
    ("dependency", "shown"),
    [
        pytest.param("pydantic>=99", "pydantic", id="another-version-of-the-images-package"),
        pytest.param("drakit>=99", "drakit", id="another-drakit"),
        pytest.param("lampsdk<1", "lampsdk", id="a-version-that-does-not-exist"),
    ],
)
def test_packages_that_cannot_be_installed_are_reported_and_nothing_changes(
    index, tmp_path, capsys, dependency, shown
):
    folder = project(tmp_path / "lamps", dependency)
    target = folder / "build" / "driver"
    target.mkdir(parents=True)
    (target / "kept").touch()
    capsys.readouterr()
    assert main(["package", str(folder)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert shown in said.err
    assert f"cannot install {folder} for the image" in said.err
    assert "Traceback" not in said.err
    assert (target / "kept").exists()


def test_a_package_without_a_wheel_for_the_image_is_refused(index, tmp_path, capsys):
    for path in index.glob(f"lampsdk-*-{IMAGE}-*"):
        path.unlink()
    folder = project(tmp_path / "lamps", "lampsdk")
    assert main(["package", str(folder)]) == 1
    assert "needs a wheel for Python 3.13" in capsys.readouterr().err
    assert not (folder / "build" / "driver").exists()


def test_a_folder_without_a_package_is_refused(tmp_path, capsys):
    assert main(["package", str(tmp_path)]) == 2
    assert "has no pyproject.toml" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_build_of_an_image_warns_of_modules_for_another_python(tmp_path, capsys, monkeypatch):
    driver = tmp_path / "build" / "driver"
    driver.mkdir(parents=True)
    own = f"hid.cpython-{IMAGE.removeprefix('cp')}-x86_64-linux-gnu.so"
    foreign = ("hid.cpython-311-x86_64-linux-gnu.so", own.replace("x86_64", "aarch64"))
    for name in (own, *foreign, "any.abi3.so", "libusb-1.0.so"):
        (driver / name).touch()
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("e2e.images.__main__.build_images", lambda *_, **__: [Path("a.tar")])
    monkeypatch.setattr("e2e.images.__main__.driver_image", lambda *_, **__: Path("b.tar"))
    monkeypatch.setattr(sys, "argv", ["images", "driver", "localhost/lamps:0.1.0", str(tmp_path)])
    images()
    said = capsys.readouterr()
    assert said.out == "b.tar\n"
    warned = re.findall(
        r"^warning: (\S+) is not for Python 3\.13 .*`drakit package`", said.err, re.M
    )
    assert sorted(warned) == sorted(str(driver / name) for name in foreign)


def test_the_python_of_the_command_is_that_of_the_image():
    base = re.findall(r"^ARG BASE=python:(\d+\.\d+)", (ROOT / "Dockerfile").read_text(), re.M)
    assert base == [PYTHON_VERSION]


@pytest.mark.timeout(180)  # it downloads packages
def test_sdks_of_the_package_index_are_for_the_image(tmp_path, capsys):
    """hidapi is in C; python-can needs wrapt, which is in C, and a package of the image."""
    folder = project(tmp_path / "lamps", "hidapi>=0.14,<1", "python-can>=4.5,<5")
    assert main(["package", str(folder), "--architecture", "amd64"]) == 0
    target = folder / "build" / "driver"
    names = {each.split()[0] for each in packages(target)}
    assert names == {"lamps", "hidapi", "python-can", "wrapt", "packaging"}
    modules = [path for path in target.rglob("*.so") if "cpython" in path.name]
    assert {path.name.partition(".")[0] for path in modules} >= {"hid", "_wrappers"}
    assert foreign_modules(target, machine="x86_64") == []
    # They are not for the Python that made them, unless it is the same.
    if sys.version_info[:2] != (3, 13):
        done = subprocess.run(
            [sys.executable, "-c", "import hid"],
            cwd=target,
            env={},
            capture_output=True,
            check=False,
        )
        assert done.returncode != 0
