"""Stretches of network between the clients of a Mooncake store, which a test can cut or hold up."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any

from tests.fakes.doors import Passing, open_door
from tests.fakes.mooncake_store import Master
from tests.fakes.s3_servers import Wire


class DataWires:
    """Stands before a master's metadata server, where clients look up how to reach each other.

    Whoever asks for the address of a client's memory is told that of a wire to it instead, so that
    all bytes of blocks go through wires. What clients say of themselves is passed on as it is.
    """

    def __init__(self, master: Master) -> None:
        self._master = master
        self._wires: dict[tuple[str, int], Wire] = {}
        self._lock = threading.Lock()
        self.named: list[dict[str, Any]] = []
        """What clients have said of themselves, in order."""
        wires = self

        class Handler(Passing):
            def _pass_on(self) -> None:
                body = self.read_body()
                status, content = wires._ask(self.command, self.path, body)
                self.send_response_only(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_DELETE = _pass_on  # noqa: N815

        self._server = open_door(Handler)

    @property
    def metadata(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/metadata"

    @property
    def all(self) -> list[Wire]:
        """One to each client that has been looked up."""
        with self._lock:
            return list(self._wires.values())

    def _ask(self, command: str, path: str, body: bytes) -> tuple[int, bytes]:
        if command == "PUT" and b"tcp_data_port" in body:
            self.named.append(json.loads(body))
        line = http.client.HTTPConnection("127.0.0.1", self._master.metadata_port, timeout=30)
        try:
            line.request(command, path, body, {"Content-Type": "application/json"})
            answer = line.getresponse()
            content = answer.read()
        except OSError:
            return 503, b"the master is away"
        finally:
            line.close()
        if command == "GET" and answer.status == 200 and b"tcp_data_port" in content:
            content = self._led_through_a_wire(content)
        return answer.status, content

    def _led_through_a_wire(self, content: bytes) -> bytes:
        said = json.loads(content)
        where = (said["tcp_data_host"], said["tcp_data_port"])
        with self._lock:
            if where not in self._wires:
                self._wires[where] = Wire(where[1], to_host=where[0])
            wire = self._wires[where]
        return json.dumps(
            {**said, "tcp_data_host": "127.0.0.1", "tcp_data_port": wire.port}
        ).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for wire in self.all:
            wire.close()
