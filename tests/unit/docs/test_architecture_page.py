"""docs/contributors/architecture.md names existing modules, and all the plugin's packages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "nodeplugin/drakit_nodeplugin"
TEXT = (ROOT / "docs/contributors/architecture.md").read_text()


def test_each_module_that_the_page_names_exists():
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", TEXT)
    assert len(named) > 30
    missing = [path for path in named if not any((at / path).is_file() for at in (PLUGIN, ROOT))]
    assert missing == []


def test_each_module_in_a_picture_exists():
    paths = [ROOT / "docs/pictures" / name for name in ("prepare.svg", "device-change.svg")]
    assert [path.name for path in paths if f"pictures/{path.name})" not in TEXT] == []
    pictures = "".join(path.read_text() for path in paths)
    named = set(re.findall(r"\b((?:kubelet|claims|endpoints|devices|slices)/[a-z_]+)", pictures))
    assert len(named) > 10
    modules = {name: PLUGIN / name for name in named}
    missing = [
        name
        for name, path in modules.items()
        if not (path.is_dir() or path.with_suffix(".py").is_file())
    ]
    assert missing == []


def test_each_package_is_on_the_page():
    packages = {path.parent.name for path in PLUGIN.glob("*/__init__.py")}
    assert [name for name in sorted(packages) if f"`{name}/`" not in TEXT] == []
