"""What is said of the ports that tests give to real servers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.fakes import ports


def test_no_port_is_given_twice() -> None:
    given = [ports.free_port() for _ in range(200)]
    assert len(set(given)) == len(given)


def test_ports_of_one_wish_follow_each_other_and_are_all_free() -> None:
    first = ports.free_ports(3)
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for number, sock in enumerate((one, two, three)):
            sock.bind(("127.0.0.1", first + number))


@pytest.mark.parametrize("text", ["32768 60999", "1024 30000", "16000 65535"])
def test_the_system_hands_out_none_of_them(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    file.write_text(text)
    monkeypatch.setattr(ports, "_RANGE", file)
    low, high = map(int, text.split())
    port = ports.free_port()
    assert not low <= port <= high or (low <= 20_000 and high == 65_535)  # there is no outside


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_ports(2)
    monkeypatch.setattr(ports, "_given", set())
    monkeypatch.setattr(ports, "_outside", lambda: range(first, first + 2))
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        assert ports.free_port() == first + 1
