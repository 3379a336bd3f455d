"""The live page and the demo's report on a phone: nothing hangs over the edge."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_page import browse, needs_chromium
from tests.unit.test_screen import look

from kvferry.tools.demo.model import ModelShape
from kvferry.tools.demo.parts import Scenario, compare
from kvferry.tools.demo.report import render
from kvferry.tools.demo.workload import Chat

PAGE = Path(__file__).parents[2] / "src" / "kvferry" / "tools" / "top" / "page"

FRAME = """<!doctype html><iframe width="390" height="800" src="SRC"></iframe><p id="said"></p>
<script>
setTimeout(() => {
  const page = document.querySelector("iframe").contentDocument;
  const wide = [...page.querySelectorAll("*")].filter(
    (e) => e.getBoundingClientRect().right > 391 && !e.closest(".scroll"));
  const scrolls = [...page.querySelectorAll(".scroll")].filter(
    (e) => e.scrollWidth > e.clientWidth);
  document.getElementById("said").textContent = JSON.stringify({
    width: page.documentElement.scrollWidth,
    wide: wide.map((e) => e.outerHTML.slice(0, 80)),
    scrolls: scrolls.length,
    text: page.body.innerText,
  });
}, 1500);
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path):
    """A folder that a browser can open; (its path, its address)."""
    site = tmp_path / "site"
    site.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield site, f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


def on_a_phone(folder: tuple[Path, str], page: str, tmp_path: Path) -> dict[str, Any]:
    site, url = folder
    (site / "frame.html").write_text(FRAME.replace("SRC", page))
    dom = browse(f"{url}frame.html", tmp_path)
    found = re.search(r'<p id="said">(.*?)</p>', dom, re.DOTALL)
    assert found
    said = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    answer: dict[str, Any] = json.loads(said)
    return answer


@needs_chromium
def test_the_live_page(folder, tmp_path):
    rows = [
        {
            "request_id": f"chatcmpl-{'0123456789abcdef' * 3}-{n}",
            "reason": "nothing_missed",
            "asked_tokens": 1_234_567,
            "host_tokens": 1_234_567,
            "tier_hit_tokens": {"host": 1_234_567},
        }
        for n in range(3)
    ]
    view = look(leases=1, recent=rows, misses={"below_threshold": 123_456_789}).as_dict()
    for file in PAGE.iterdir():
        (folder[0] / file.name).write_bytes(file.read_bytes())
    data = {"interval": 1000, "error": "", "view": view}
    (folder[0] / "view.json").write_text(json.dumps(data))
    said = on_a_phone(folder, "index.html", tmp_path)
    assert said["width"] <= 390
    assert said["wide"] == []
    text = str(said["text"])
    for words in ("1 lease", "123,456,789", "700 of 1,000 slots", "1,234,567", "50.0 GB/s"):
        assert words in text
    assert "1 leases" not in text
    assert text.count("hit rate") <= 1


@needs_chromium
def test_the_report(folder, tmp_path):
    shape = ModelShape(vocab=64, width=32, num_layers=1, num_heads=1, num_kv_heads=1, hidden=32)
    chat = Chat(num_conversations=3, num_turns=2, opening_tokens=64, vocab=shape.vocab)
    setting = Scenario(chat=chat, shape=shape, device_blocks=20, host_bytes=8 << 20)
    page = render("kvferry demo", setting.describe(), [compare(setting)])
    head = re.findall(r'<th scope="col">(.*?)</th>', page)
    assert head == ["Small + kvferry", "Small device", "Big device"]
    (folder[0] / "report.html").write_text(page)
    said = on_a_phone(folder, "report.html", tmp_path)
    assert said["width"] <= 390
    assert said["wide"] == []
    assert said["scrolls"] == 0
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):  # ticks that cannot be told apart
        for anchor in ("end", "middle"):
            ticks = re.findall(rf'<text x="[^"]*" y="[^"]*" text-anchor="{anchor}">(.*?)<', svg)
            assert len(ticks) == len(set(ticks)), ticks
