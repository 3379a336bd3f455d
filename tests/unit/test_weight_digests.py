"""Weight digests notice a changed word, whatever the number format and however the tensor lies."""

from __future__ import annotations

import pytest

from kvferry.transfer.digests import WeightDigests

torch = pytest.importorskip("torch")


def digests_of(*tensors):
    taken = WeightDigests(tensors[0].device)
    taken.mark()
    return taken.begin(tensors).result()


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
)
def test_one_changed_element_is_seen(dtype):
    weight = torch.randn(64, 48).to(getattr(torch, dtype))
    other = torch.randn(3, 5)
    before = digests_of(weight, other)
    assert digests_of(weight, other) == before
    weight.view(torch.uint8).reshape(-1)[1234] ^= 1
    after = digests_of(weight, other)
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_views_are_read_where_they_lie():
    memory = torch.randn(8, 6)
    part = memory[2:4, :]
    before = digests_of(part)
    memory[0] += 1
    assert digests_of(part) == before
    memory[3, 5] += 1
    assert digests_of(part) != before


@pytest.mark.parametrize(
    "weight", [torch.randn(4, 6).t(), torch.randn(1).expand(5, 5)], ids=["turned", "expanded"]
)
def test_tensors_that_are_not_contiguous_are_no_error(weight):
    before = digests_of(weight)
    weight.untyped_storage().fill_(1)
    assert digests_of(weight) != before


def test_of_a_long_tensor_only_the_beginning_is_summed(monkeypatch):
    monkeypatch.setattr("kvferry.transfer.digests.MOST_WORDS", 100)
    weight = torch.ones(50, 4, dtype=torch.int64)
    assert digests_of(weight) == (100,)


def test_classes_that_engines_give_their_weights_take_no_turn():
    turns = []

    class Weight(torch.nn.Parameter):  # type: ignore[name-defined]
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            turns.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    plain = torch.randn(8, 4)
    weight = Weight(plain.clone(), requires_grad=False)
    device = plain.device
    taken = WeightDigests(device)
    turns.clear()
    found = taken.begin([weight]).result()
    assert not turns
    assert found == digests_of(plain)
