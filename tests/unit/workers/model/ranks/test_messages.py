"""What ranks tell each other arrives as it was, and is data only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from workers.model.ranks.messages import DTYPES, Message, decode, encode

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
ARRAYS = st.sampled_from(sorted(DTYPES)).flatmap(lambda dtype: arrays.arrays(np.dtype(dtype), SHAPES))


@given(st.lists(ARRAYS, max_size=5), st.floats(), st.text())
def test_a_message_arrives_as_it_was(sent: list[np.ndarray], number: float, text: str) -> None:
    heard = decode(encode(Message("kind", {"number": number, text: [text, None]}, sent)))
    assert heard.kind == "kind"
    assert heard.fields[text] == [text, None] or text == "number"
    np.testing.assert_equal(heard.fields["number"], number if text != "number" else [text, None])
    for mine, theirs in zip(sent, heard.arrays, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        np.testing.assert_array_equal(mine, theirs)


def test_views_arrive_as_what_they_show() -> None:
    numbers = np.arange(12).reshape(3, 4)
    (heard,) = decode(encode(Message("kind", {}, [numbers.T[1:, ::2]]))).arrays
    np.testing.assert_array_equal(heard, numbers.T[1:, ::2])


def test_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot carry arrays of"):
        encode(Message("kind", {}, [np.array([object()])]))
