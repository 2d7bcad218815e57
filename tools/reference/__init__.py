"""
Generates the pages of docs/reference/ that repeat what the code declares: ``make reference``.

Each module writes one page. :mod:`.markdown` and :mod:`.docstrings` are shared.

It must not know how the site is built.
"""
