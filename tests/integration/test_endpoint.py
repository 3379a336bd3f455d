"""The endpoint of a library user: real HTTP, a ferry at work behind it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from contextlib import closing
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pytest
from tests.fakes import tiers as tiers
from tests.fakes.ports import free_port

import kvferry
from kvferry.errors import ConfigError
from kvferry.telemetry.http import HttpServer, Reply


@pytest.fixture
def ferry():
    kv = [np.zeros((32, 2, 16, 2, 8), np.float32) for _ in range(2)]
    with kvferry.attach(kv, model="m", block_tokens=16, host="8MiB") as ferry:
        yield ferry


def ask(url: str, path: str, *, method: str = "GET", host: str | None = None):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        headers = {"Host": host} if host is not None else {}
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.headers
    finally:
        connection.close()


def work(ferry: kvferry.Ferry, first: int = 0) -> kvferry.Hit:
    keys = ferry.keys(np.arange(first, first + 64))
    ferry.wait(ferry.store(keys, [0, 1, 2, 3]))
    hit = ferry.match(keys)
    ferry.wait(ferry.load(hit, [4, 5, 6, 7]))
    return hit


def test_metrics_and_explanations_over_http(ferry):
    url = ferry.serve_metrics(0)
    assert url == ferry.serve_metrics(0)
    assert url.startswith("http://127.0.0.1:")
    hit = work(ferry)
    ferry.poll()  # an idle ferry counts what ended
    status, body, headers = ask(url, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert b"kvferry_hit_tokens_total 64.0" in body
    assert b'kvferry_slots{state="cached",tier="host"} 4.0' in body
    status, body, _ = ask(url, f"/explain/{hit.request.id}")
    told = json.loads(body)
    assert told["explanation"]["reason"] == "nothing_missed"
    assert [copy["paths"] for copy in told["copies"]] == [["cpu"]]
    assert hit.request.id in [
        r["request_id"] for r in json.loads(ask(url, "/explain")[1])["requests"]
    ]
    explained = ferry.explain(hit)
    assert explained is not None
    assert explained.host_tokens == 64
    assert ask(url, "/")[0] == 200


def test_a_tier_that_is_away_is_served_with_its_reason():
    kv = [np.zeros((32, 2, 16, 2, 8), np.float32) for _ in range(2)]
    tiers.opened.clear()
    setting = "memory=tests.fakes.tiers:open_mine"
    with kvferry.attach(kv, model="m", block_tokens=16, host="1MiB", tiers=setting) as ferry:
        url = ferry.serve_metrics(0)
        ferry.poll()
        assert b'kvferry_tier_unavailable{tier="memory"} 0.0' in ask(url, "/metrics")[1]
        assert json.loads(ask(url, "/explain")[1])["tiers_away"] == {}
        tiers.opened[-1][1].go_away("its cable was pulled")
        ferry.poll()
        body = ask(url, "/metrics")[1]
        assert b'kvferry_tier_unavailable{tier="memory"} 1.0' in body
        assert b'kvferry_slots{state="free",tier="memory"}' in body
        assert b'kvferry_slot_bytes{tier="memory"}' in body
        told = json.loads(ask(url, "/explain")[1])["tiers_away"]
        assert told == {"memory": "rank 0: its cable was pulled"}


def test_what_is_not_there_is_refused(ferry):
    url = ferry.serve_metrics(0)
    assert ask(url, "/nothing")[0] == 404
    assert ask(url, "/explain/unknown")[0] == 404
    assert ask(url, "/explain/a/b")[0] == 404
    assert ask(url, "/../../etc/passwd")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(ferry, method):
    url = ferry.serve_metrics(0)
    assert ask(url, "/metrics", method=method)[0] == 501
    assert ask(url, "/metrics", method="HEAD")[:2] == (200, b"")


def test_a_name_pointed_at_loopback_gets_nothing(ferry):
    url = ferry.serve_metrics(0)
    assert ask(url, "/metrics", host="evil.example:80")[0] == 403
    assert ask(url, "/metrics", host="")[0] == 403
    for name in ("localhost:1", "127.0.0.1", "[::1]:9"):
        assert ask(url, "/metrics", host=name)[0] == 200


def test_bound_to_all_addresses_any_name_will_do():
    with closing(HttpServer(lambda path: Reply(b"hello"), host="0.0.0.0")) as server:
        assert ask(server.url, "/", host="node-7.cluster:9475")[0] == 200


def test_settings_start_it():
    kv = [np.zeros((4, 2, 16, 2, 8), np.float32)]
    port = free_port()
    with kvferry.attach(kv, model="m", block_tokens=16, host="1MiB", metrics_port=port) as ferry:
        assert ferry.serve_metrics() == f"http://127.0.0.1:{port}/"
        assert ask(f"http://127.0.0.1:{port}/", "/metrics")[0] == 200


def test_a_port_in_use_is_named_and_nothing_is_left_behind():
    kv = [np.zeros((4, 2, 16, 2, 8), np.float32)]
    with (
        closing(HttpServer(lambda path: None)) as taken,
        pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken.port}"),
    ):
        kvferry.attach(kv, model="m", block_tokens=16, host="1MiB", metrics_port=taken.port)


def test_metrics_are_served_with_numpy_alone():
    """Whoever scrapes needs Prometheus' own library; who is scraped does not."""
    code = """
import sys
sys.modules["prometheus_client"] = None  # as if it were not installed
import numpy as np, kvferry
from urllib.request import urlopen
kv = [np.zeros((4, 2, 16, 2, 8), np.float32)]
with kvferry.attach(kv, model="m", block_tokens=16, host="1MiB") as ferry:
    print(urlopen(ferry.serve_metrics(0) + "metrics", timeout=60).read().decode())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "kvferry_lookups_total 0.0" in done.stdout


def test_an_answer_that_breaks_is_an_error_not_a_hang():
    def answer(path):
        raise RuntimeError("broken")

    with closing(HttpServer(answer)) as server:
        status, body, _ = ask(server.url, "/")
        assert status == 500
        assert b"RuntimeError: broken" in body


def test_scraped_by_many_while_it_works(ferry):
    """Readers on other threads see whole snapshots: every slot is in exactly one state."""
    url, stop, seen, errors = ferry.serve_metrics(0), threading.Event(), [], []

    def scrape():
        while not stop.is_set():
            try:
                with urlopen(f"{url}metrics", timeout=60) as reply:
                    text = reply.read().decode()
                seen.append(
                    sum(
                        float(x.split()[-1])
                        for x in text.splitlines()
                        if x.startswith("kvferry_slots{")
                    )
                )
            except Exception as error:
                errors.append(error)

    readers = [threading.Thread(target=scrape) for _ in range(4)]
    for reader in readers:
        reader.start()
    for number in range(60):
        work(ferry, 1000 * number)
    stop.set()
    while any(reader.is_alive() for reader in readers):
        ferry.poll()
    for reader in readers:
        reader.join()
    assert not errors
    assert set(seen) == {float(ferry.stats().pool.total)}
