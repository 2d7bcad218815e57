"""
The pytest plugin of ``drakit[testing]``.

It is loaded in every pytest session of an environment that has drakit: it must not import anything
that costs.
"""

from __future__ import annotations

__all__ = ()
