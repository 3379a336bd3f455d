"""Which pins give way and end; and no call looks at all slots. Lives: ``test_pins_stateful``.

One-line breaks that were tried; each made a test of this module fail.

- ``Pins._weakest`` ignores ``below`` or ``spared``; goes by the highest priority; takes the
  beginning first
- ``Pins.expire`` looks at firm ends alone; leaves ``_least`` as it is
"""

from __future__ import annotations

import numpy as np

from kvferry.cache.pins import FOREVER, Pins


def test_the_oldest_gives_way_first_and_its_end_before_its_beginning() -> None:
    pins = Pins(100, 12)
    for number in range(3):
        pins.add(np.arange(4 * number, 4 * number + 4), FOREVER, 50)
    pins.add(np.arange(4), FOREVER, 50)  # the first is told again
    assert pins.give_way(1).tolist() == [7]
    assert pins.give_way(8).tolist() == [6, 5, 4, 11, 10, 9, 8, 3]


def test_the_lowest_priority_gives_way_first_and_what_is_firm_never() -> None:
    pins = Pins(100, 12)
    pins.add(np.arange(4), FOREVER, 80)
    pins.add(np.arange(4, 8), FOREVER, 40)
    pins.add(np.arange(8, 12), 5.0)
    pins.add(np.arange(8, 12), FOREVER, 20)  # softly, too
    assert [each.tolist() for each in pins.add(np.arange(20, 24), 9.0, 30)] == [[], []]
    came, gone = pins.add(np.arange(20, 22), 9.0, 60)
    assert (came.tolist(), gone.tolist()) == ([20, 21], [7, 6])
    assert pins.firmly(np.array([8, 20])).tolist() == [True, False]
    assert pins.expire(6.0).tolist() == []
    assert pins.give_way(2).tolist() == [11, 10], "what was firm is soft from then on"
    assert pins.expire(9.0).tolist() == [20, 21]
    assert pins.count == 8
    assert pins.num_refused == 4
    assert pins.all_pinned().tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    pins.drop(pins.all_pinned())
    assert not pins.give_way(100).size


def test_a_call_that_finds_no_room_looks_at_no_other_slots() -> None:
    """Where all is pinned, or matters more, thousands of calls cost what they name.

    Seen red with a look at every slot's hold for each of them.
    """
    pins = Pins(1 << 20, 1 << 10)
    pins.add(np.arange(1 << 10), FOREVER)
    looks = []

    class Watched(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
            plain = [np.asarray(each) for each in inputs]
            looks.append(max(np.size(each) for each in plain))
            return getattr(ufunc, method)(*plain, **kwargs)

    pins._soft, pins._firm = pins._soft.view(Watched), pins._firm.view(Watched)
    for number in range(50):
        first = 2000 + 10 * number
        came, gave_way = pins.add(np.arange(first, first + 10), 5.0, 36)
        assert not len(came)
        assert not len(gave_way)
    assert pins.num_refused == 500
    assert max(looks, default=0) <= 10
