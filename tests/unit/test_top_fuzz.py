"""What is read off an endpoint, whatever it says: ValueError, or something that can be shown."""

from __future__ import annotations

import io
import json
import math
from contextlib import suppress
from dataclasses import asdict

from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from tests.fakes.endpoint import stats

from kvferry.telemetry.catalog import Snapshot, catalog, exposition
from kvferry.tools.cli import explain as cli_explain
from kvferry.tools.cli.top import Screen
from kvferry.tools.top.scrape import parse, read_json
from kvferry.tools.top.view import Watch

GOOD = exposition(Snapshot(stats(queries=10, moved=10), "1.2.3", {"host": 1_000_000})).decode()
NAMES = [metric.name for metric in catalog()]

MEMBERS = [
    *("requests", "request_id", "reason", "asked_tokens", "host_tokens", "others", "device_tokens"),
    *(
        "lower_tokens",
        "explanation",
        "copies",
        "first_missing",
        "decision",
        "verdict",
        "src",
        "dst",
    ),
    *("load_seconds", "compute_seconds", "why", "num_blocks", "num_bytes", "seconds", "paths"),
    *("tiers_away", "asked_blocks", "tier_hit_tokens"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=8)
    ),
    max_leaves=30,
)


def show(text: str) -> None:
    """As ``top`` would, at two widths."""
    watch = Watch("u", look=lambda url: parse(text, at=1.0), explain=lambda url: {})
    view = watch.look()
    json.dumps(asdict(view), allow_nan=False)
    for width in (20, 200):
        file = io.StringIO()
        Console(file=file, width=width, color_system=None).print(Screen(view))
        assert "\x1b" not in file.getvalue()


LINE = st.one_of(
    st.text(max_size=60),
    st.builds(
        "{}{}{} {}".format,
        st.sampled_from(["", "vllm:", " ", "x"]),
        st.sampled_from([*NAMES, "kvferry_", "kvferry_new_total"]),
        st.sampled_from(["", "{}", '{tier="host",state="free"}', '{tier="host"', '{a="b",a="c"}'])
        | st.builds("{{tier={},state={}}}".format, st.text(max_size=9), st.text(max_size=9))
        | st.builds('{{tier="{}",state="free"}}'.format, st.text(max_size=9)),
        st.sampled_from(
            ["1", "NaN", "+Inf", "-1", "1e400", "1 2", "0x10", "\u0661", "", "1_0", "1e5"]
        ),
    ),
)


@given(st.lists(LINE, max_size=12), st.booleans())
def test_any_text_is_an_error_or_a_view(some, with_good):
    text = "".join(f"{line}\n" for line in some) + (GOOD if with_good else "")
    try:
        reading = parse(text, at=0.0)
    except ValueError:
        return
    assert all(0 <= value < math.inf for some in reading.values.values() for value in some.values())
    show(text)


@given(JSON)
@example({"requests": [{"request_id": "a", "asked_tokens": True}]})
@example({"request_id": "a", "explanation": {"asked_tokens": 10**400}})
def test_any_json_is_an_error_or_can_be_shown(data):
    console = Console(file=io.StringIO(), width=60)
    try:
        answer = read_json(json.dumps(data).encode())
    except ValueError:
        return
    json.dumps(answer, allow_nan=False)
    with suppress(ValueError):
        cli_explain.print_recent(answer, console)
    with suppress(ValueError):
        cli_explain.print_explanation(answer, console)
