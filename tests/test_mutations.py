"""Each mutation of mutations.py still has the code that it is to break. Needs the repository, not only the tests."""

from __future__ import annotations

import pytest

from mutations import MUTATIONS, ROOT, Mutation, tests_before


@pytest.mark.skipif(not (ROOT / "csrc" / "cpu").is_dir(), reason="the repository is not here")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.rows}: {m.what}")
def test_the_code_to_be_changed_is_there_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old


def test_the_table_has_all_of_them() -> None:
    assert list(tests_before()) == [m.what for m in MUTATIONS]
