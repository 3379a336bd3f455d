"""The mailbox: the engine's thread does little, does it once, and never waits for a client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvferry.scheduler.journal import Copy, Entry
from kvferry.telemetry import source
from kvferry.telemetry.source import Mailbox, Source


class Askers:
    """Threads that ask and wait. Owns them; their answers come in no particular order."""

    asked: threading.Semaphore
    """Released once for each question that is in the mailbox and waits for its answer."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.threads: list[threading.Thread] = []
        self.answers: list[object] = []

    def ask(self, work: Callable[..., object], *args: object) -> None:
        def run() -> None:
            self.answers.append(self._mailbox.query(work, *args, patience=30))

        thread = threading.Thread(target=run)
        self.threads.append(thread)
        thread.start()
        assert self.asked.acquire(timeout=30)

    def join(self) -> None:
        for thread in self.threads:
            thread.join()


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, is_done = threading.Semaphore(0), source._Call.is_done

    def noted(mail: Any, seconds: float) -> bool:
        asked.release()
        return is_done(mail, seconds)

    monkeypatch.setattr(Askers, "asked", asked, raising=False)
    monkeypatch.setattr(source._Call, "is_done", noted)


def answer_all(mailbox: Mailbox, askers: Askers) -> None:
    while any(thread.is_alive() for thread in askers.threads):
        mailbox.answer()
    askers.join()


def test_only_what_waited_at_entry_is_answered():
    """Clients that ask again as soon as they are answered must not keep the engine."""
    mailbox = Mailbox(pause=0)
    askers = Askers(mailbox)
    calls = []

    def greedy() -> None:
        calls.append(1)
        if len(calls) < 20:
            askers.ask(greedy)

    askers.ask(greedy)
    mailbox.answer()
    assert len(calls) == 1
    answer_all(mailbox, askers)


def test_one_step_answers_a_few_questions_only():
    mailbox = Mailbox(pause=0, most=3)
    askers = Askers(mailbox)
    calls: list[object] = []
    for number in range(10):
        askers.ask(calls.append, number)
    mailbox.answer()
    assert calls == [0, 1, 2]  # the longest waits first
    mailbox.answer()
    assert calls == [0, 1, 2, 3, 4, 5]
    answer_all(mailbox, askers)
    assert calls == list(range(10))


def test_between_two_answers_the_engine_is_left_alone():
    now = [0.0]
    mailbox = Mailbox(pause=0.05, clock=lambda: now[0])
    askers = Askers(mailbox)
    calls: list[object] = []
    askers.ask(calls.append, "a")
    mailbox.answer()
    askers.ask(calls.append, "b")
    for now[0] in (0.01, 0.04):
        mailbox.answer()
        assert calls == ["a"]
    now[0] = 0.06
    mailbox.answer()
    assert calls == ["a", "b"]
    askers.join()


def test_the_engine_does_not_wait_for_a_client_that_asks():
    mailbox = Mailbox(pause=0)
    askers = Askers(mailbox)
    askers.ask(abs, 1)
    with mailbox._lock:  # held by a client that puts a question down
        mailbox.answer()
        assert askers.answers == []
    mailbox.answer()
    askers.join()
    assert askers.answers == [1]


def test_an_engine_that_wakes_up_in_the_middle_of_a_look_does_not_fail_it():
    """A client that reads for itself may find a dictionary changed: then it reads again."""
    mailbox, counts, looks = Mailbox(), {"a": 1}, []

    def look() -> dict[str, int]:
        looks.append(1)
        found = {}
        for name, count in counts.items():
            found[name] = count
            if len(looks) < 3:
                counts[f"new {len(looks)}"] = 1  # the engine's thread, as it wakes up
        return found

    assert mailbox.query(look, patience=0.001)["a"] == 1
    assert len(looks) == 3


def test_a_question_is_answered_on_the_engines_thread():
    mailbox, done = Mailbox(), threading.Event()
    where: list[object] = []

    def ask():
        where.append(mailbox.query(threading.get_ident, patience=30))
        done.set()

    mailbox.before_answers = lambda: where.append("drained")
    asker = threading.Thread(target=ask)
    asker.start()
    while not done.wait(0.001):
        mailbox.answer()
    asker.join()
    assert where == ["drained", threading.get_ident()], "figures are up to date on that thread"


def test_an_error_is_raised_for_the_asking_client():
    mailbox = Mailbox()
    with pytest.raises(ZeroDivisionError):
        mailbox.query(lambda: 1 // 0, patience=0.001)

    def bad():
        raise ValueError("no")

    def ask():
        with pytest.raises(ValueError, match="no"):
            mailbox.query(bad, patience=30)

    asker = threading.Thread(target=ask)
    asker.start()
    while asker.is_alive():
        mailbox.answer()  # must not raise here
    asker.join()


class FakeScheduler:
    """Remembers on which thread it was asked."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.entry = Entry()
        self.entry.copies.append(Copy(1, "host", "device", 0, 4, 400, 0.1, ("cpu",)))

    def stats(self) -> str:
        self.threads.append(threading.get_ident())
        return "stats"

    def journal(self, request_id: str) -> Entry | None:
        self.threads.append(threading.get_ident())
        return self.entry if request_id == "cmpl-a-0-8b2677e5" else None

    def recent(self) -> tuple[str, ...]:
        self.threads.append(threading.get_ident())
        return ("cmpl-a-0-8b2677e5",)


def test_the_engines_thread_only_hands_out_facts():
    """The scheduler is asked on its own thread alone."""
    mailbox, scheduler = Mailbox(pause=0), FakeScheduler()
    # However late the engine answers, the client does not read for itself.
    mailbox.query = partial(mailbox.query, patience=30)  # type: ignore[method-assign]
    explaining = Source(scheduler, mailbox)  # type: ignore[arg-type]
    told: list[object] = []
    asker = threading.Thread(target=lambda: told.append(explaining.explain("cmpl-a")))
    asker.start()
    while asker.is_alive():
        mailbox.answer()
    asker.join()
    assert told[0]["copies"][0]["paths"] == ("cpu",)  # type: ignore[index]
    assert set(scheduler.threads) == {threading.get_ident()}


def test_an_explanation_no_longer_changes_when_it_has_been_handed_out():
    mailbox, scheduler = Mailbox(), FakeScheduler()
    mailbox.query = partial(mailbox.query, patience=0.001)  # type: ignore[method-assign]
    explaining = Source(scheduler, mailbox)  # type: ignore[arg-type]
    told = explaining.explain("cmpl-a-0-8b2677e5")
    assert told is not None
    scheduler.entry.copies.clear()  # the engine goes on meanwhile
    assert len(told["copies"]) == 1
