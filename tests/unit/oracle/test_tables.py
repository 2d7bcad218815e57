"""How the tables of Kubernetes' allocator tests are written."""

from __future__ import annotations

import pytest

from e2e.images.cache import ImageError
from tests.oracle.dumps import with_dump


def test_each_case_of_a_table_is_dumped() -> None:
    source = "\tfor name, tc := range testcases {\n\t\tt.Run(name, nil)\n\t}\n"
    head, call, *rest = with_dump(source).splitlines()
    assert head == source.splitlines()[0]
    assert call.startswith("\t\tdump(name, tc.features, ")
    assert rest[-2:] == source.splitlines()[1:]


@pytest.mark.parametrize("source", ["", "\tfor name, tc := range testcases {\n" * 2])
def test_a_table_whose_loop_has_changed_is_refused(source: str) -> None:
    with pytest.raises(ImageError, match="has changed"):
        with_dump(source)
