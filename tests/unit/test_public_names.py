"""The names of `import drakit`, and the cost of the import."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal

import drakit


def test_every_public_name_is_there():
    assert list(drakit.__all__) == sorted(drakit.__all__)
    for name in drakit.__all__:
        # A Literal or a union does not have a docstring.
        aliases = ("AttributeValue", "ConditionStatus", "RejectionReason", "TaintEffect")
        assert getattr(drakit, name).__doc__ or name in aliases


def test_vendors_calculate_with_amounts_however_they_are_written():
    assert (
        drakit.parse_quantity("39062500Ki") == drakit.parse_quantity("40G") == Decimal(40 * 10**9)
    )


def test_importing_it_loads_neither_grpc_nor_pydantic_nor_a_kubernetes_client():
    heavy = "{'grpc', 'pydantic', 'aiohttp', 'kubernetes_asyncio', 'kopf', 'yaml'}"
    program = f"import sys, drakit; assert not {heavy} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
