"""The kernel's tables in device memory: uploaded once per layout, never per transfer."""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.device.driver.base import Driver, Priority
from kvferry.device.kernels.rows import RowShape, RowTable, common_alignment, row_shape
from kvferry.device.layout.base import GroupLayout
from kvferry.errors import DriverError

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Uploaded:
    """A row table and where its copy on the device is."""

    rows: RowTable
    address: int


class UploadedTables:
    """Owns the tables on the device until ``close``. Safe to use from several threads."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        # Layouts are kept alive, so that an id is never that of another one.
        self._layouts: dict[int, tuple[GroupLayout, int]] = {}
        self._tables: dict[tuple[int, RowShape], Uploaded] = {}

    def get(self, layout: GroupLayout, alignment: int = 0) -> Uploaded:
        """The table for ``layout``, uploaded if it is new.

        ``alignment`` is what the addresses on the other side are multiples of, 0 if it does not
        matter; it limits how wide an access may be.
        """
        with self._lock:
            known = self._layouts.setdefault(id(layout), (layout, common_alignment(layout)))
            shape = row_shape(layout, math.gcd(known[1], alignment))
            key = (id(layout), shape)
            if key not in self._tables:
                rows = RowTable(layout, shape)
                self._tables[key] = Uploaded(rows, self._upload(rows))
            return self._tables[key]

    def close(self) -> None:
        """Free the tables; call only when no copy is in flight. Safe to call twice."""
        with self._lock:
            tables, self._tables = self._tables, {}
            self._layouts.clear()
        for table in tables.values():
            _give_back(self._driver.free_device, table.address)

    def _upload(self, rows: RowTable) -> int:
        """Copy on a stream of its own and wait: whoever uses the table next may be on any."""
        table = rows.tables()
        driver = self._driver
        pinned = driver.alloc_host(table.nbytes)
        try:
            ctypes.memmove(pinned, table.ctypes.data, table.nbytes)
            address = driver.alloc_device(table.nbytes)
            try:
                stream = driver.create_stream(Priority.HIGH)
                try:
                    driver.copy_async(address, pinned, table.nbytes, stream)
                    driver.synchronize_stream(stream)
                finally:
                    _give_back(driver.destroy_stream, stream)
            except DriverError:
                _give_back(driver.free_device, address)
                raise
        finally:
            _give_back(driver.free_host, pinned)
        return address


def _give_back(give: Callable[[int], None], handle: int) -> None:
    """Refused, it is lost, but the table is not: a raise here would leak that too."""
    try:
        give(handle)
    except DriverError as error:
        log.warning("part of a kernel's table was not given back: %s", error)
