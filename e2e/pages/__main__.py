"""
`python -m e2e.pages`: lists the blocks of the pages for users that are not run, with the reasons.
"""

from e2e.pages.page import is_tested, parse, short, user_pages


def listing() -> list[str]:
    """Return a line for each page that is not run, and for each block that is not run."""
    lines: list[str] = []
    for path in user_pages():
        if not is_tested(path):
            lines.append(f"{short(path)}: has no `test` in its front matter")
            continue
        page = parse(path)
        lines += [
            f"{short(path)}:{one.line}: {one.language or 'text'}: {one.reason}"
            for one in page.not_run
        ]
    return lines


if __name__ == "__main__":
    print("\n".join(listing()))
