"""The words of the documentation are counted: tables, but no code and no comments."""

from __future__ import annotations

from tools.site.words import count_words, words_per_section

PAGE = """---
description: not counted
---

# A title

Two *words* - `code`.

<!-- not run: this
neither -->
```bash
kubectl get pods
```

| a | b |
|---|---|
| c | 12 |

- in a list:

    ```yaml
    a: 1
    ```

The end.
"""


def test_words_of_text_and_tables_are_counted():
    assert count_words(PAGE) == 14


def test_a_section_is_a_folder(tmp_path):
    docs = tmp_path / "docs"
    (docs / "start").mkdir(parents=True)
    (docs / "index.md").write_text("one")
    (docs / "start" / "a.md").write_text("one two")
    (docs / "start" / "b.md").write_text("three")
    words = words_per_section(docs)
    assert words == {"docs": 1, "docs/start": 3}
