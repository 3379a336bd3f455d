"""Keys: the same everywhere, equal exactly as far as the tokens are, different under any doubt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.identity import FORMAT_VERSION, Namespace, adopt, adopt_one, chain, scope
from kvferry.core.keys import Key
from kvferry.errors import InputError


def namespace(**changes) -> Namespace:
    given: dict = {
        "model": "org/model-8b",
        "revision": "a1b2c3",
        "weights_digest": "",
        "dtype": "bfloat16",
        "layout": "NHD",
        "geometry": {"layers": 32, "kv_heads": 8, "head_size": 128},
        "block_tokens": 4,
        "overrides": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "salt": "tenant",
    }
    return Namespace(**{**given, **changes})


TOKENS = st.lists(st.integers(min_value=0, max_value=2**63 - 1), max_size=40)

# -- the same everywhere

GOLDEN_FINGERPRINT = "2e3befe3ac49f444075463c9af1eab73c73bb9c74d53ac3aa1485cd4524d884b"
GOLDEN_KEYS = [
    "03693ccaa3fa0f66252f8bbb9596aac0b09f23a6baea5cf23e32a320c9324fc5",
    "6d914857f02844acdb483b1d559ebc687640a26b509242268d5e927b2615b3fd",
]
GOLDEN_ADOPTED = [
    "f0cae36e720855dd798c3c2bb9169684ac028cd5d957cc2136f8b6568bfc858a",
    "a815c569185cb06867c905a0487e14d51299fa0c468aa8a4c789aa7fcd460e7b",
]
GOLDEN_SCOPE = "9e778cf545f674a1071eedca8986e8423100e04b2914ed07ddc3de8eff02cbf3"


def test_golden():
    """These are on users' disks. If this fails, raise FORMAT_VERSION or take the change back."""
    ns = namespace()
    assert FORMAT_VERSION == 2
    assert ns.fingerprint.hex() == GOLDEN_FINGERPRINT
    assert [key.hex() for key in chain(ns, [1, 2, 3, 4, 5, 6, 7, 2**63 - 1, 9])] == GOLDEN_KEYS
    adopted = adopt(ns, [b"content", bytes(range(32))])
    assert [key.hex() for key in adopted] == GOLDEN_ADOPTED
    salted = chain(ns, TWELVE, salt="tenant", extra={"image": "x"})
    assert salted[0].hex() == "de1373a16eb588cb1a335304f0916bbf1f6b2e0db367bc266208f9c09f14a9ad"
    assert [adopt_one(ns, bytes(range(32)))] == list(adopted)[1:]
    assert scope(0, 2).hex() == GOLDEN_SCOPE
    mixed = zip(scope(7, 0), scope(0, 2), strict=True)
    assert scope(7, 2) == bytes([one ^ other for one, other in mixed]), "a disk takes the 7 off"


# -- the chain


@given(TOKENS, TOKENS, TOKENS)
def test_two_chains_agree_exactly_as_far_as_their_full_blocks_do(shared, one, other):
    ns, one, other = namespace(), shared + one, shared + other
    same = 0
    while (
        same < min(len(one), len(other)) // 4
        and one[same * 4 : same * 4 + 4] == other[same * 4 : same * 4 + 4]
    ):
        same += 1
    left, right = chain(ns, one), chain(ns, other)
    assert left[:same] == right[:same]
    assert not set(left[same:]) & set(right)


@given(TOKENS, st.data())
def test_a_chain_goes_on_where_it_stopped(tokens, data):
    ns = namespace()
    whole = chain(ns, tokens)
    cut = data.draw(st.integers(min_value=0, max_value=len(whole)))
    parent = whole[cut - 1] if cut else None
    assert chain(ns, tokens[: cut * 4]) + chain(ns, tokens[cut * 4 :], parent=parent) == whole


# -- the namespace

CHANGES = {
    "model": "org/model-70b",
    "revision": "a1b2c4",
    "weights_digest": "sha256:00",
    "dtype": "float16",
    "layout": "HND",
    "geometry": {"layers": 32, "kv_heads": 8, "head_size": 64},
    "block_tokens": 5,
    "overrides": {"rope_scaling": {"type": "yarn", "factor": 8.0}},
    "salt": "another tenant",
    "epoch": 1,
    "format_version": FORMAT_VERSION + 1,
}


def test_every_field_is_covered_here():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Namespace)}


@pytest.mark.parametrize("name", CHANGES)
def test_any_changed_field_changes_every_key(name):
    one, other = namespace(), namespace(**{name: CHANGES[name]})
    assert one.fingerprint != other.fingerprint
    assert one != other
    tokens = list(range(40))
    assert not set(chain(one, tokens)) & set(chain(other, tokens))
    hashes = [bytes([i]) * 32 for i in range(10)]
    assert not set(adopt(one, hashes)) & set(adopt(other, hashes))


NAMES = ["model", "revision", "weights_digest", "dtype", "layout", "overrides", "salt"]


@given(st.lists(st.text("ab:=,\0", min_size=1, max_size=4), min_size=7, max_size=7), st.data())
def test_text_cannot_slip_from_one_field_into_the_next(values, data):
    """Length-prefixed: moving characters across a field boundary always changes the fingerprint."""
    at = data.draw(st.integers(min_value=0, max_value=5))
    moved = list(values)
    moved[at], moved[at + 1] = moved[at] + moved[at + 1][0], moved[at + 1][1:]
    one = namespace(**dict(zip(NAMES, values, strict=True)))
    try:
        other = namespace(**dict(zip(NAMES, moved, strict=True)))
    except InputError:  # a field that must not be empty became empty
        return
    assert one.fingerprint != other.fingerprint


def test_the_order_of_a_mapping_means_nothing():
    one = namespace(overrides={"a": 1, "b": {"c": [1, 2], "d": None}})
    other = namespace(overrides={"b": {"d": None, "c": (1, 2)}, "a": 1})
    assert one == other
    assert hash(one) == hash(other)
    assert one.fingerprint == other.fingerprint
    assert namespace(overrides={}) == namespace(overrides="")


@pytest.mark.parametrize(
    "bad",
    [
        {"model": ""},
        {"model": None},
        {"dtype": ""},
        {"dtype": np.dtype("f4")},
        {"layout": ""},
        {"geometry": ()},
        {"geometry": object},
        {"geometry": {1: 2}},
        {"geometry": {"a": {1, 2}}},
        {"block_tokens": 0},
        {"block_tokens": 1.0},
        {"block_tokens": True},
        {"epoch": -1},
        {"epoch": 2**63},
        {"overrides": {"x": float("nan")}},
        {"overrides": {"x": np.int64(1)}},
        {"overrides": {"x": b"bytes"}},
        {"overrides": 3},
        {"overrides": b""},
        {"salt": b"bytes"},
        {"salt": "\ud800"},
        {"format_version": 0},
    ],
    ids=repr,
)
def test_a_namespace_that_cannot_be_right(bad):
    (name,) = bad
    with pytest.raises(InputError, match=name):
        namespace(**bad)


# -- scope


def test_scopes_share_no_key_and_a_mask_undoes_itself():
    keys = chain(namespace(), range(40))
    seen: set[Key] = set()
    for epoch in range(8):
        for group in range(8):
            masked = keys.masked(scope(epoch, group))
            assert masked.masked(scope(epoch, group)) == keys
            assert not seen & set(masked)
            seen |= set(masked)
    assert len(seen) == 64 * len(keys)


# -- text and data that a careless writer would take for each other


def test_a_character_and_its_two_halves_are_not_the_same() -> None:
    """JSON escapes both as the same twelve characters."""
    whole, halves = "\U0001f600", "\ud83d\ude00"
    assert namespace(overrides={"x": whole}).fingerprint
    for data in ({"x": halves}, {halves: 1}, [halves], {"x": {"y": [halves]}}, halves):
        with pytest.raises(InputError, match=r"overrides.* UTF-8"):
            namespace(overrides=data)


def deep(tiers: int) -> list:
    data: list = []
    for _ in range(tiers):
        data = [data]
    return data


def itself() -> list:
    data: list = []
    data.append(data)
    return data


@pytest.mark.parametrize("data", [deep(100_000), itself(), {"x": 10**5000}, {"x": -(10**5000)}])
def test_data_that_cannot_be_written_is_refused_as_ours(data) -> None:
    with pytest.raises(InputError, match="overrides"):
        namespace(overrides=data)


def test_text_that_writes_itself_differently_is_taken_by_its_characters() -> None:
    class Alike(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "the same"

    one, other = namespace(revision=Alike("a")), namespace(revision=Alike("b"))
    assert one.fingerprint != other.fingerprint
    assert one == namespace(revision="a")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def same_data(one: object, other: object) -> bool:
    """Whether two plain values are the same, as a reader would say it: 1, 1.0 and True differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_data(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_data, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@given(PLAIN, PLAIN)
def test_any_two_data_share_a_fingerprint_only_if_they_are_the_same(one, other) -> None:
    try:
        pair = [namespace(overrides={"x": value}).fingerprint for value in (one, other)]
    except InputError:  # an infinity
        return
    assert (pair[0] == pair[1]) == same_data(one, other)


# -- what a request adds

EXTRAS: list = ["cat", "dog", b"cat", ["cat"], {"cat": 1}, {"image": "cat"}]
TWELVE = list(range(12))


def test_salt_and_extra_change_every_key() -> None:
    ns = namespace()
    chains = [
        chain(ns, TWELVE),
        *(chain(ns, TWELVE, extra=extra) for extra in EXTRAS),
        *(chain(ns, TWELVE, salt=salt) for salt in ("cat", "dog")),
        chain(ns, TWELVE, salt="cat", extra="dog"),
        chain(ns, TWELVE, salt="catd", extra="og"),
        chain(namespace(salt="cat"), TWELVE),
    ]
    assert len({key for keys in chains for key in keys}) == 3 * len(chains)
    assert chain(ns, TWELVE, salt="", extra="") == chains[0]
    assert chain(ns, TWELVE, extra={"a": 1, "b": 2}) == chain(ns, TWELVE, extra={"b": 2, "a": 1})


def test_a_chain_goes_on_under_what_it_began_with() -> None:
    ns = namespace()
    whole = chain(ns, TWELVE, salt="a", extra="b")
    assert whole[:1] + chain(ns, TWELVE[4:], parent=whole[0]) == whole
    with pytest.raises(InputError, match="parent key covers"):
        chain(ns, TWELVE[4:], parent=whole[0], salt="a")


REFUSED: list[tuple[str, Callable[[Any], object], list[Any]]] = [
    (
        "parent must be a key",
        lambda bad: chain(namespace(), TWELVE, parent=bad),
        [b"", bytes(33), 3],
    ),
    (r"hash \d must be bytes", lambda bad: adopt(namespace(), bad), [[b""], [123], [b"ok", "x"]]),
    ("epoch|group", lambda bad: scope(*bad), [(-1, 0), (0, -1), (1.5, 0), ("1", 0), (2**63, 0)]),
    ("epoch", lambda bad: namespace(epoch=bad), [10**5000]),
    ("token", lambda bad: chain(namespace(), bad), [[1, 10**5000], [-1]]),
    (
        "extra",
        lambda bad: chain(namespace(), TWELVE, extra=bad),
        [3, 0, None, True, False, 1.5, object(), bytearray(b"x"), {"x": {1}}, {1: 2}],
    ),
    (
        "salt",
        lambda bad: chain(namespace(), TWELVE, salt=bad),
        [3, 0, None, b"", b"x", ["x"], "\ud800"],
    ),
]


@pytest.mark.parametrize(("words", "call", "values"), REFUSED, ids=[each[0] for each in REFUSED])
def test_what_cannot_be_right_is_refused_by_name(words, call, values) -> None:
    for bad in values:
        with pytest.raises(InputError, match=words):
            call(bad)


@pytest.mark.parametrize("nothing", ["", b"", [], (), {}])
def test_no_extra_in_any_form_is_no_extra(nothing) -> None:
    assert chain(namespace(), TWELVE, extra=nothing) == chain(namespace(), TWELVE)
    salted = chain(namespace(), TWELVE, salt="a")
    assert chain(namespace(), TWELVE, salt="a", extra=nothing) == salted


# -- torch


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "uint8"])
def test_torch_tokens_are_tokens(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tokens = torch.arange(12, dtype=getattr(torch, dtype))
    assert chain(namespace(), tokens) == chain(namespace(), range(12))
    assert chain(namespace(), torch.arange(24, dtype=getattr(torch, dtype))[::2]) == chain(
        namespace(), range(0, 24, 2)
    )
