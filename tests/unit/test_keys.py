"""Keys: a batch is its rows of bytes, whatever way it was cut, and never changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.keys import KEY_BYTES, KEY_WORDS, Keys
from kvferry.errors import InputError

raw_keys = st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=12)


@given(raw_keys)
def test_bytes_in_bytes_out(raw: list[bytes]) -> None:
    keys = Keys.from_bytes(raw)
    assert len(keys) == len(raw)
    assert list(keys) == raw
    assert [keys[i] for i in range(len(raw))] == raw


@given(raw_keys, st.slices(12))
def test_a_slice_is_a_slice_of_the_bytes(raw: list[bytes], cut: slice) -> None:
    assert list(Keys.from_bytes(raw)[cut]) == raw[cut]


@given(raw_keys, raw_keys)
def test_joining_equality_and_hash(left: list[bytes], right: list[bytes]) -> None:
    joined = Keys.from_bytes(left) + Keys.from_bytes(right)
    assert list(joined) == left + right
    assert joined == Keys.from_bytes(left + right)
    assert hash(joined) == hash(Keys.from_bytes(left + right))
    assert (Keys.from_bytes(left) == Keys.from_bytes(right)) == (left == right)
    assert joined != left + right


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=9))
def test_a_key_that_is_there_twice_is_found(words: list[tuple[int, int]]) -> None:
    """Also among keys that share their first word."""
    array = np.zeros((len(words), KEY_WORDS), dtype="<u8")
    array[:, [0, 2]] = np.array(words, dtype="<u8").reshape(-1, 2)
    assert Keys(array).has_duplicates() == (len(set(words)) != len(words))


@given(raw_keys, st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES))
def test_a_mask_is_its_own_inverse(raw: list[bytes], mask: bytes) -> None:
    keys = Keys.from_bytes(raw)
    masked = keys.masked(mask)
    assert list(masked) == [bytes(a ^ b for a, b in zip(key, mask, strict=True)) for key in raw]
    assert masked.masked(mask) == keys


def test_a_batch_cannot_be_written_to() -> None:
    array = np.zeros((2, KEY_WORDS), dtype="<u8")
    keys = Keys(array)
    with pytest.raises(ValueError, match="read-only"):
        keys.array[0, 0] = 1
    assert array.flags.writeable, "the caller's own array stays as it was"


@pytest.mark.parametrize("wrong", ["x" * KEY_BYTES, bytearray(KEY_BYTES), 7, None, b"", bytes(33)])
def test_what_is_no_key_is_named_by_position_and_type(wrong: object) -> None:
    what = f"{len(wrong)} bytes" if isinstance(wrong, bytes) else type(wrong).__name__
    with pytest.raises(InputError, match=f"key 1 must be a key .* got {what}"):
        Keys.from_bytes([bytes(KEY_BYTES), wrong])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, KEY_WORDS), dtype=np.int64),
        np.zeros((2, KEY_WORDS), dtype=">u8"),
        np.zeros((2, KEY_WORDS + 1), dtype="<u8"),
        np.zeros((2, KEY_WORDS - 1), dtype="<u8"),
        np.zeros(KEY_WORDS, dtype="<u8"),
        np.zeros((1, 2, KEY_WORDS), dtype="<u8"),
    ],
)
def test_an_array_of_another_shape_or_type_is_refused(array: np.ndarray) -> None:
    with pytest.raises(InputError) as error:
        Keys(array)
    assert str(array.shape) in str(error.value)
    assert str(array.dtype) in str(error.value)
