"""Who may use an object that is not thread-safe, where the system gives a number out again."""

from __future__ import annotations

import threading

import pytest

from kvferry.core.lifecycle import OneThread
from kvferry.errors import StateError


def test_a_thread_with_the_number_of_one_that_ended_is_an_owner_like_any_other() -> None:
    """Seen red with owners told apart by their numbers: a third thread was let in beside it.

    The system gives a number out again as it likes, so this is tried many times.
    """
    num_alike = 0
    for _ in range(100):
        owner = OneThread("the thing")
        numbers: list[int] = []
        is_used, may_end = threading.Event(), threading.Event()

        def use(owner: OneThread = owner, numbers: list[int] = numbers) -> None:
            numbers.append(threading.get_ident())
            owner.require()

        def use_for_long(
            is_used: threading.Event = is_used, end: threading.Event = may_end
        ) -> None:
            use()
            is_used.set()
            end.wait()

        first = threading.Thread(target=use)
        first.start()
        first.join()
        second = threading.Thread(target=use_for_long)
        second.start()
        is_used.wait()
        num_alike += numbers[0] == numbers[1]
        try:
            with pytest.raises(StateError, match="belongs to thread"):
                owner.require()
        finally:
            may_end.set()
            second.join()
        owner.require()
        if num_alike:
            return
    pytest.skip("no thread had the number of another here")
