"""Long lists of integers are read beside orjson, and no text is read differently for it."""

import json

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_bridge.server.integer_lists import MOST, SHORTEST, load_json

LONG = list(range(SHORTEST))


def restored(text: bytes) -> object:
    """The document with its arrays as lists again."""
    loaded = load_json(text)

    def walk(value: object) -> object:
        value = loaded.list_or_array(value)
        if isinstance(value, np.ndarray):
            assert value.dtype == np.int64
            return value.tolist()
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        return [walk(inner) for inner in value] if isinstance(value, list) else value

    return walk(loaded.document)


integers = st.integers(-(2**63), 2**64 - 1)
long_lists = st.lists(integers, min_size=SHORTEST - 2, max_size=SHORTEST + 2)
documents = st.recursive(
    st.one_of(st.none(), st.booleans(), integers, st.floats(allow_nan=False), st.text(), long_lists),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=12,
)  # fmt: skip


@given(documents, st.booleans())
def test_a_document_is_read_as_orjson_reads_it(document: object, spaced: bool) -> None:
    text = json.dumps(document, indent=1 if spaced else None).encode()
    try:
        expected = orjson.loads(text)
    except ValueError:  # lone surrogates
        with pytest.raises(ValueError):
            load_json(text)
        return
    assert restored(text) == expected


@given(st.data())
def test_a_spoilt_text_is_judged_as_orjson_judges_it(data: st.DataObject) -> None:
    text = bytearray(json.dumps({"a": LONG, "b": [-1, *LONG], "c": '[1,"\\'}).encode())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        expected = orjson.loads(bytes(text))
    except ValueError:
        with pytest.raises(ValueError):
            load_json(bytes(text))
    else:
        assert restored(bytes(text)) == expected


@pytest.mark.parametrize(
    "last",
    ["1.0", "1e2", "01", "-", "-0", "+1", "true", '"1"', "[1]", "null", str(2**63), "1 2", ""],
)
def test_a_list_with_anything_but_integers_is_left_to_orjson(last: str) -> None:
    text = ("[" + "7," * SHORTEST + last + "]").encode()
    try:
        expected = orjson.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            load_json(text)
        return
    loaded = load_json(text)
    taken = loaded.list_or_array(loaded.document)
    assert isinstance(taken, np.ndarray) == (last == "-0")
    assert list(taken) == expected


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63 - 1), -(2**63), 10**18, 0])
def test_integers_at_the_ends_of_the_range(value: int) -> None:
    assert restored(json.dumps([value] * SHORTEST).encode()) == [value] * SHORTEST


def test_a_list_in_a_string_stays_a_string() -> None:
    text = json.dumps({"user": json.dumps(LONG), "escaped": '\\"' + json.dumps(LONG)}).encode()
    assert load_json(text).arrays == []
    assert restored(text) == json.loads(text)


def test_more_lists_than_are_taken_out() -> None:
    document = [LONG] * (MOST + 3)
    loaded = load_json(json.dumps(document).encode())
    assert len(loaded.arrays) == MOST
    assert restored(json.dumps(document).encode()) == document
