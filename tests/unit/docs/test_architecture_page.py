"""docs/contributors/architecture.md names existing modules, and all the plugin's packages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "nodeplugin/drakit_nodeplugin"
OPERATOR = ROOT / "operator/drakit_operator"
TEXT = (ROOT / "docs/contributors/architecture.md").read_text()


def test_each_module_that_the_page_names_exists():
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", TEXT)
    assert len(named) > 30
    places = (PLUGIN, OPERATOR, ROOT)
    missing = [path for path in named if not any((at / path).is_file() for at in places)]
    assert missing == []


def test_each_package_is_on_the_page():
    packages = {path.parent.name for path in PLUGIN.glob("*/__init__.py")}
    assert [name for name in sorted(packages) if f"`{name}/`" not in TEXT] == []
