"""A registrar that refuses, dawdles or hangs where it is told to, and knows what it still holds."""

from __future__ import annotations

import threading
import time

from kvferry.errors import DriverError


class FakeRegistrar:
    """Counts from 1; call number ``fail_at`` is refused, each takes ``seconds``."""

    def __init__(
        self, *, fail_at: int | None = None, always_fails: bool = False, seconds: float = 0.0
    ) -> None:
        self.fail_at = fail_at
        self.always_fails = always_fails
        self.seconds = seconds
        self.gate = threading.Event()
        self.gate.set()
        self.held: dict[int, int] = {}
        self.num_calls = 0
        self.most_at_once = 0
        self._inside = 0
        self._lock = threading.Lock()

    def register_host(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self.num_calls += 1
            number = self.num_calls
            self._inside += 1
            self.most_at_once = max(self.most_at_once, self._inside)
        try:
            self.gate.wait()
            time.sleep(self.seconds)
            if self.always_fails or number == self.fail_at:
                raise DriverError(f"register_host({num_bytes} bytes): refused", code=2)
            with self._lock:
                assert not any(
                    start < address + num_bytes and address < start + size
                    for start, size in self.held.items()
                ), "registered twice"
                self.held[address] = num_bytes
        finally:
            with self._lock:
                self._inside -= 1

    def unregister_host(self, address: int) -> None:
        with self._lock:
            del self.held[address]
