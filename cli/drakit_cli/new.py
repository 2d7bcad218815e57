"""
``drakit new``: creates a project for a driver that works without changes.

``templates/`` contains the files. The form of a project determines its files, some words in them,
and the next steps. This module derives the names in a project from the project's name, and writes
the files. It writes either all files or none, and never overwrites an existing file.

Does not depend on the driver contract, which the tests of the project check.
"""

from __future__ import annotations

import argparse
import json
import keyword
import os
import re
import shlex
import string
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from drakit_cli.answers import CommandError, UsageError
from drakit_formats.resource.limits import is_dns_label, is_dns_subdomain

MAX_NAME = 40
"""Maximum length of a project's name. The chart derives longer names from it, which can have up to
63 characters."""

MAX_ENTRY = 20
"""Maximum length of the name of an entry in ``backends.allowed``."""

MAX_DRIVER = 63
"""Maximum length of a driver's name (API: ``ResourceSliceSpec.driver``)."""

WIDTH = 88
"""The width of the output in columns."""

PROJECT_VERSION = "0.1.0"

TEMPLATES = Path(__file__).parent / "templates"
"""The directory of the file templates, which have the same paths as the files in a project. Some
are for all projects, others only for certain forms."""

_TAKEN = frozenset(
    {"drakit", "hostdev", "simulated"}
    | {"cdi", "conformance", "new", "node", "package", "schema", "setup", "version"}
)
"""Names of drakit's own drivers, packages and commands."""

_NOT_PACKAGES = frozenset(
    {"drakit_drivers", "drakit_nodeplugin", "drakit_operator", "drakit_proto"}
    | {"google", "grpc", "pydantic", "pytest", "ruff", "tests", "yaml"}
)
"""Packages that a driver or its tests import. A project's package with the same name would hide
them."""

_NOT_TEXTS = frozenset({"false", "n", "no", "null", "off", "on", "true", "y", "yes"})
"""Words that YAML does not parse as strings."""

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9][-A-Za-z0-9.]*(?::[0-9]{{1,5}})?/)?{_COMPONENT}(?:/{_COMPONENT})*"
)


class _Template(string.Template):
    # Don't use `$`, which is special in Dockerfiles, shells and workflows, or `@`, which is special
    # in workflows.
    delimiter = "@@"


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """The names in a project. Templates use these fields."""

    name: str
    """The name of the project, its entry point, its release and its namespace: ``rack-lamps``."""

    driver: str
    """The driver's name: ``lamps.example.com``."""

    image: str
    """The image's repository in the chart's values, without the component's suffix:
    ``…/rack-lamps``."""

    package: str
    """The Python package, such as ``rack_lamps``."""

    class_name: str
    """The driver's class, such as ``RackLampsDriver``."""

    prefix: str
    """The prefix of a container's environment variables: ``RACK_LAMPS``."""

    directory: str
    """The directory on a node that contains the example's devices."""

    plugin: str
    """The name of the node plugin's DaemonSet, as the chart derives it from the release name."""

    entry: str
    """The name of the driver's entry in ``backends.allowed``, if the driver runs in its own
    process."""

    version: str
    base: str
    """The node plugin's image, on which the project's image is based."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The differences between projects: the language, and where the driver runs."""

    folders: tuple[str, ...]
    """The folders of ``templates`` that contain the files of a project."""

    source: str
    """The path of the driver's source, as used in README.md and the manifests."""

    tests: str
    """The path of the tests that check the parameters in pod.yaml."""

    commands: tuple[str, ...]
    """The first commands to run in the project's folder, which test the project."""

    note: str
    """The last text that the command prints before the values that a backend needs."""

    values: str = "values.yaml, deviceclass.yaml, pod.yaml"
    """Further files that contain the mark REPLACE, apart from the tests."""

    component: str = ""
    """The suffix that follows the project's name in the name of its image."""

    read_config: str = ""
    """The statements in tests/test_driver.py that check the config in the chart's values."""

    @property
    def files(self) -> Mapping[str, Path]:
        """The files of a project, and the template of each. Paths can use the fields of
        `Project`."""
        return {
            str(path.relative_to(TEMPLATES / folder)).removesuffix(".in"): path
            for folder in self.folders
            for path in sorted((TEMPLATES / folder).rglob("*.in"))
        }


def new(options: argparse.Namespace) -> int:
    """Write the project, and print the next steps."""
    project = project_of(
        options.name, driver=options.driver, image=options.image, drakit=version("drakit")
    )
    words = None
    if options.language == "go":
        if options.plugin:
            raise UsageError("--plugin is for Python: a driver in Go has its own process; omit it")
        form, words = GO, go_words(options.checkout)
    elif options.checkout is not None:
        raise UsageError("--checkout is only for --language go; omit it")
    else:
        form = _form_of(options)
    folder: Path = options.directory or Path(project.name)
    texts = render(project, form, words)
    _write(folder, texts)
    inside = [] if folder.resolve() == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]
    commands = "".join(f"  {line}\n" for line in (*inside, *form.commands))
    source = form.source.format(**asdict(project))
    steps = (
        f"Then replace the code marked REPLACE, first in {source}, then in {form.values} and the "
        f"tests. README.md describes how to build the image, install the driver and start a pod "
        f"with a device."
    )
    print(
        f"driver {project.driver}: {len(texts)} files in {folder}\n"
        f"\nNext, with the path of your clone of drakit in $DRAKIT (see README.md):\n"
        f"\n{commands}"
        f"\n{textwrap.fill(steps, WIDTH)}"
    )
    print(f"\n{form.note}\n\n{_backend_entry(project)}")
    if f".{project.driver}".endswith(".example.com"):
        print(
            "\nexample.com is not yours, and a driver's name is immutable: before you publish the\n"
            "driver, create the project again with --driver and a domain that you own."
        )
    return 0


def _form_of(options: argparse.Namespace) -> Form:
    if options.container:
        return CONTAINER
    if options.plugin or not sys.stdin.isatty():
        return PLUGIN
    answer = input(_QUESTION).strip().lower()
    if answer in ("", "1", "plugin"):
        return PLUGIN
    if answer in ("2", "container"):
        return CONTAINER
    raise UsageError(f"{answer!r} is neither 1 nor 2; set --plugin or --container instead")


_QUESTION = """\
Where does the driver run?
  1  In drakit's node plugin. You operate no other program, but the driver has no privileges: it can
     read files of the host, and cannot open device nodes. (--plugin)
  2  In its own container, with the privileges that you choose. It can also be a device plugin,
     for nodes without DRA. (--container)
Answer 1 or 2 [1]: """


_PLUGIN_NOTE = """\
This driver runs in the node plugin and needs no entry in backends.allowed. If you
write a backend in another language instead, it needs this entry in drakit's values:"""

_CONTAINER_NOTE = """\
This driver runs in its own container. Add this entry to drakit's values, so that
the node plugin accepts it (drakit-values.yaml has it, too):"""


def _backend_entry(project: Project) -> str:
    """Return the values for a backend that returns the same edits as the project's driver."""
    return (
        f"backends:\n"
        f"  enabled: true\n"
        f"  allowed:\n"
        f"    {project.entry}:\n"
        f"      driver: {project.driver}\n"
        f"      mounts: {{{project.directory}: ro}}\n"
        f'      env: ["{project.prefix}_*"]'
    )


PLUGIN = Form(
    folders=("any", "python", "plugin"),
    source="src/{package}/driver.py",
    tests="tests/test_driver.py",
    component="-nodeplugin",
    read_config="""\
    values = yaml.safe_load((PROJECT / "values.yaml").read_text())
    (entry,) = values["nodeplugin"]["drivers"]
    driver.Config.model_validate(entry.get("config", {}))""",
    commands=(
        "python3 -m venv ~/drakit-venv",
        "source ~/drakit-venv/bin/activate",
        "pip install \"$DRAKIT[testing]\" --editable '.[dev]'",
        "pytest",
    ),
    note=_PLUGIN_NOTE,
)
"""A Python driver that runs in the node plugin."""

GO = Form(
    folders=("any", "process", "go"),
    source="driver.go",
    tests="driver_test.go",
    commands=(
        "go test ./...",
        "python3 -m venv ~/drakit-venv",
        "source ~/drakit-venv/bin/activate",
        'pip install "$DRAKIT[testing]"',
        "bash conformance.sh",
    ),
    note=_CONTAINER_NOTE,
    values="conformance.sh, the files in chart, drakit-values.yaml, deviceclass.yaml, pod.yaml",
)
"""A Go driver that runs in its own process, and uses the Go module in a clone of drakit."""

CONTAINER = replace(
    PLUGIN,
    folders=("any", "python", "process", "container"),
    component="",
    read_config="""\
    values = yaml.safe_load((PROJECT / "chart" / "values.yaml").read_text())
    driver.Config.model_validate(values["config"])""",
    note=_CONTAINER_NOTE,
    values="the files in chart, drakit-values.yaml, deviceclass.yaml, both pods",
)
"""A Python driver that runs in its own container, with its own chart."""

FORMS: tuple[Form, ...] = (PLUGIN, CONTAINER, GO)


# ------------------------------------------------------------ names


def project_of(name: str, *, driver: str | None, image: str | None, drakit: str) -> Project:
    """
    Return the names in a project. Raises UsageError if one of them is malformed.

    :param drakit: the version of drakit for which the project is written.
    """
    if problem := _name_problem(name):
        raise UsageError(f"the project's name {name!r} {problem}")
    driver = driver or f"{name}.example.com"
    if problem := _driver_problem(driver):
        raise UsageError(f"--driver {driver!r} {problem}")
    image = image or f"registry.example.com/{name}"
    if problem := _image_problem(image):
        raise UsageError(f"--image {image!r} {problem}")
    camel = "".join(word.capitalize() for word in name.split("-"))
    return Project(
        name=name,
        driver=driver,
        image=image,
        package=name.replace("-", "_"),
        # The suffix makes it different from all names that the module imports.
        class_name=f"{camel}Driver",
        prefix=name.replace("-", "_").upper(),
        # A driver's name contains a dot, so the host is unlikely to have a directory of the same
        # name.
        directory=f"/var/lib/{driver}",
        plugin=f"{name if 'drakit' in name else f'{name}-drakit'}-nodeplugin",
        entry=name[:MAX_ENTRY].rstrip("-"),
        version=PROJECT_VERSION,
        base=f"{image[: image.rfind('/') + 1]}drakit-nodeplugin:{_release(drakit)}",
    )


def _name_problem(name: str) -> str | None:
    if len(name) > MAX_NAME or not is_dns_label(name) or not name[0].isalpha():
        better = (
            re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:MAX_NAME].strip("-")
        )
        return (
            f"must be a letter followed by at most {MAX_NAME - 1} lower-case letters, digits and "
            f"single dashes"
            + (f"; try {better}" if better and _name_problem(better) is None else "")
        )
    if "--" in name:
        return f"has two dashes in a row; try {re.sub('-+', '-', name)}"
    package = name.replace("-", "_")
    if package in _TAKEN:
        return "is reserved for drakit; choose another one"
    if package in _NOT_TEXTS or keyword.iskeyword(package):
        return "has a meaning in YAML or Python; choose another one"
    if package in _NOT_PACKAGES or package in sys.stdlib_module_names:
        return f"would hide the Python package {package}; choose another one"
    return None


def _driver_problem(driver: str) -> str | None:
    # The driver's name is also the vendor in CDI names, which must begin with a letter.
    if not is_dns_subdomain(driver, max_length=MAX_DRIVER) or not driver[0].isalpha():
        return (
            f"must be a DNS name of at most {MAX_DRIVER} lower-case letters, digits, dashes and "
            "dots that begins with a letter; for example lamps.example.com"
        )
    if "." not in driver:
        return f"has no domain; append a domain that you own, as in {driver}.example.com"
    if driver == "drakit.dev" or driver.endswith(".drakit.dev"):
        return "is in drakit's own domain; use a domain that you own"
    return None


def _image_problem(image: str) -> str | None:
    if _IMAGE.fullmatch(image):
        return None
    last = image.rpartition("/")[2]
    if ":" in last or "@" in last:
        return "has a tag or a digest; omit it, because values.yaml sets the tag"
    return "is not an image repository; use a name such as registry.example.com/lamps"


def _release(drakit: str) -> str:
    """Return the release to which a version belongs, such as 0.1.0 for the development version
    0.1.0.dev0."""
    numbers = re.match(r"\d+(?:\.\d+)*", drakit)
    found = [int(number) for number in numbers[0].split(".")] if numbers else []
    return ".".join(map(str, [*found, 0, 0, 0][:3]))


# ------------------------------------------------------------ the Go module

_MODULE = Path("proto") / "go"
"""The Go module in a clone of drakit."""


def go_words(checkout: Path | None) -> Mapping[str, str]:
    """
    Return the paths, versions and checksums that a Go project needs from a clone of drakit.

    :param checkout: the clone. The default is the clone from which this command was installed.
    """
    if checkout is None:
        checkout = next(filter(_has_module, _clones()), None)
        if checkout is None:
            raise UsageError(
                "drakit.dev/backend, the Go module of drakit, has no release yet, and this command "
                "was not installed from a clone of drakit; name a clone with --checkout PATH"
            )
    elif not _has_module(checkout):
        raise UsageError(
            f"--checkout {checkout} has no {_MODULE}/go.mod; name the root of a clone of drakit"
        )
    checkout = checkout.resolve()
    module = (checkout / _MODULE / "go.mod").read_text(encoding="utf-8")
    required = re.findall(r"^\t(\S+ v\S+)", module, re.M)
    (go,) = re.findall(r"^go (\S+)$", module, re.M)
    path = str(checkout / _MODULE)
    is_plain = re.fullmatch(r"[\w./+~-]+", path, re.A)
    return {
        "checkout": shlex.quote(str(checkout)),
        # In go.mod, a path with unusual characters must be quoted.
        "module": path if is_plain else json.dumps(path, ensure_ascii=False),
        "go": go,
        "requirements": "\n".join(f"\t{each} // indirect" for each in sorted(required)),
        "sums": (checkout / _MODULE / "go.sum").read_text(encoding="utf-8").rstrip("\n"),
    }


def _has_module(checkout: Path) -> bool:
    return (checkout / _MODULE / "go.mod").is_file()


def _clones() -> Iterator[Path]:
    """Yield the folders that may be a clone of drakit: the parents of this file, and the folder
    from which pip installed the package."""
    yield Path(__file__).resolve().parents[2]
    with suppress(PackageNotFoundError, ValueError):
        origin: object = json.loads(distribution("drakit").read_text("direct_url.json") or "{}")
        if isinstance(origin, dict):
            url = urlsplit(str(cast("dict[str, object]", origin).get("url", "")))
            if url.scheme == "file":
                yield Path(unquote(url.path))


# ------------------------------------------------------------ files


def render(
    project: Project, form: Form, given: Mapping[str, str] | None = None
) -> Mapping[str, str]:
    """Return the project's files, keyed by their paths in its folder."""
    names = asdict(project)
    words = {
        **names,
        "class": project.class_name,
        **(given or {}),
        "source": Path(form.source).name,
        "tests": form.tests,
        "component": form.component,
        "read_config": form.read_config,
        "allowed": _backend_entry(project),
    }
    return {
        path.format(**names): _Template(template.read_text(encoding="utf-8")).substitute(words)
        for path, template in form.files.items()
    }


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Create a folder and write files into it. Write all files or none, and never overwrite a
    file."""
    if in_the_way := _in_the_way(folder, list(texts)):
        raise CommandError(
            f"{folder} has {', '.join(in_the_way)} already, and existing files are not "
            "overwritten; name another directory with --directory"
        )
    undo: list[Callable[[], None]] = []
    try:
        for name, text in texts.items():
            path = folder / name
            _make_folder(path.parent, undo)
            with path.open("x", encoding="utf-8", newline="\n") as file:
                undo.append(path.unlink)
                file.write(text)
    except BaseException as error:
        for step in reversed(undo):
            with suppress(OSError):
                step()
        if isinstance(error, OSError):
            raise CommandError(
                f"{error.filename or folder} cannot be written: {os.strerror(error.errno or 0)}; "
                f"the files written so far were removed"
            ) from error
        raise


def _in_the_way(folder: Path, names: list[str]) -> list[str]:
    """Return the files that exist already, including files where the project needs folders."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise CommandError(f"{folder} is not a directory; name another one with --directory")
    found: set[str] = set()
    for name in names:
        if os.path.lexists(folder / name):
            found.add(name)
        for parent in Path(name).parents:
            # A symbolic link may lead out of the folder.
            there = folder / parent
            if (
                parent.name
                and os.path.lexists(there)
                and (there.is_symlink() or not there.is_dir())
            ):
                found.add(str(parent))
    return sorted(found)


def _make_folder(folder: Path, undo: list[Callable[[], None]]) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent, undo)
        folder.mkdir()
        undo.append(folder.rmdir)
