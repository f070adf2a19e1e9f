"""Results as JSON."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlem_env.machine import json_text

# Strings with what JSON's own syntax is made of.
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('[]{},: \n"\\ab', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[ ]{\n"', max_size=4), inner),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text("ab[]\n ", max_size=4), values))
def test_what_is_written_is_what_is_read(payload: dict[str, Any]) -> None:
    assert json.loads(json_text(payload)) == payload


def test_plain_lists_are_on_a_line() -> None:
    text = json_text({"a": [1, 2.5, "b c"], "d": [[1, 2], [3]], "e": [{"f": []}]})
    lines = [line.strip() for line in text.splitlines()]
    assert '"a": [1, 2.5, "b c"],' in lines
    assert "[1, 2]," in lines and '"f": []' in lines


def test_infinity_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_text({"a": float("inf")})
