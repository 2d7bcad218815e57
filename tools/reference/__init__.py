"""
Generates the pages of docs/reference/ that repeat declarations of the code: ``make reference``.

Each module writes one page. :mod:`.markdown` and :mod:`.docstrings` are shared.
"""
