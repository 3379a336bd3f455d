"""Settings: one checked door, whichever way a value comes in."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvferry
from kvferry.config import REMOVED, RENAMED, Config, describe
from kvferry.core.quantities import (
    GiB,
    KiB,
    MiB,
    TiB,
    format_size,
    parse_count,
    parse_seconds,
    parse_size,
)
from kvferry.errors import ConfigError, UnknownSettingError

# -- sizes, times, counts


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        (np.int64(4096), 4096),
        (1e9, 10**9),
        ("4096", 4096),
        ("1B", 1),
        ("64GiB", 64 * GiB),
        ("64 gib", 64 * GiB),
        (" 1.5 GB ", 1_500_000_000),
        ("2kB", 2000),
        ("2KiB", 2 * KiB),
        ("0.5MiB", MiB // 2),
        ("1TiB", TiB),
        ("3tb", 3 * 10**12),
        ("1.1KiB", 1126),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    "bad",
    [
        0,
        -1,
        "0",
        "-1GiB",
        "0.1B",
        1.5,
        True,
        None,
        "",
        "GiB",
        "1 GiB 2",
        "1,5GB",
        "1e9",
        "64G",
        "64 furlongs",
        b"1",
        [1],
        float("nan"),
        float("inf"),
        2**63,
    ],
)
def test_sizes_that_cannot_be_right(bad):
    with pytest.raises(ConfigError, match=r"^ring: "):
        parse_size(bad, name="ring")


@given(st.integers(min_value=1, max_value=2**63 - 1))
def test_a_formatted_size_reads_back_exactly(size):
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (30, 30.0),
        (0.5, 0.5),
        ("30", 30.0),
        ("500ms", 0.5),
        ("2 min", 120.0),
        ("1h", 3600.0),
        ("1.5S", 1.5),
        ("250us", 0.00025),
    ],
)
def test_seconds(text, seconds):
    assert parse_seconds(text) == seconds
    assert type(parse_seconds(text)) is float


@pytest.mark.parametrize(
    "bad",
    [
        0,
        -1,
        "0s",
        "-3s",
        True,
        None,
        "",
        "soon",
        "inf",
        "never",
        "3 fortnights",
        float("inf"),
        float("nan"),
    ],
)
def test_times_that_cannot_be_right(bad):
    with pytest.raises(ConfigError, match=r"^wait: "):
        parse_seconds(bad, name="wait")


@pytest.mark.parametrize("bad", [0, -1, "0", "1.5", 1.5, "many", "", True, None])
def test_counts_that_cannot_be_right(bad):
    with pytest.raises(ConfigError, match=r"^blocks: "):
        parse_count(bad, name="blocks")


# -- the doors


def test_frozen_picklable_and_checked_again_on_replace():
    config = Config(host=2 * GiB)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.host = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(Config(host=2 * GiB))
    with pytest.raises(ConfigError, match="host: must be at least 1 bytes, got 0"):
        dataclasses.replace(config, host=0)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownSettingError) as caught:
        Config.from_dict({"load-deadlin": 3})
    assert str(caught.value).endswith("'load-deadlin'; did you mean 'load_deadline'?")


@pytest.mark.parametrize(("gone", "instead"), REMOVED.items())
def test_a_setting_that_was_removed_says_what_replaced_it(gone, instead):
    assert not hasattr(Config(), gone)
    with pytest.raises(UnknownSettingError, match=f"attach: {gone} was removed: "):
        Config.load(None, {}, {gone: "3ms"}, source="attach")
    assert instead


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_former_name_is_answered_with_the_present_one(tmp_path, old, new):
    assert hasattr(Config(), new)
    setting: dict[str, Any] = {old: 1}
    file = tmp_path / "kvferry.json"
    file.write_text(json.dumps({old: 1}))
    calls = (
        lambda: Config.from_dict({old: 1}),
        lambda: Config.from_env({f"KVFERRY_{old.upper()}": "1"}),
        lambda: Config.from_file(file),
        lambda: kvferry.attach([], model="m", **setting),
    )
    for call in calls:
        with pytest.raises(UnknownSettingError, match=f"{old}'? is now called '?{new}"):
            call()


@pytest.mark.parametrize("bad", ["teleport", None, 3, ""])
def test_a_choice_names_the_choices(bad):
    with pytest.raises(ConfigError, match="copy_path: expected one of auto, loop, dma, kernel"):
        Config.from_dict({"copy_path": bad})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'host = "2GiB"\nblock_tokens = 32\n'),
        ("b.toml", '[other]\nx = 1\n[kvferry]\nhost = "2GiB"\nblock_tokens = 32\n'),
        ("c.json", json.dumps({"host": 2 * GiB, "block_tokens": 32})),
        ("d.JSON", json.dumps({"kvferry": {"host": "2GiB", "block_tokens": 32}, "other": 1})),
    ],
)
def test_from_file(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert Config.from_file(path) == Config(host=2 * GiB, block_tokens=32)
    assert Config.from_file(str(path)) == Config(host=2 * GiB, block_tokens=32)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.toml", b"host = \n", "not valid TOML"),
        ("a.json", b"{", "not valid JSON"),
        ("a.toml", b"\xff\xfe", "not valid TOML"),
        ("a.yaml", b"host: 1", "ends in .toml or .json"),
        ("a.json", b"[1]", "expected a table"),
        ("a.json", b'{"kvferry": 3}', "expected a table"),
        ("a.toml", b"host = -1\n", "host: must be at least 1 bytes, got -1"),
        ("a.toml", b"hots = 1\n", "did you mean 'host'"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Config.from_file(path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


def test_a_missing_file_is_our_error(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        Config.from_file(tmp_path / "absent.toml")


def test_from_env():
    env = {
        "KVFERRY_HOST": "3GiB",
        "KVFERRY_STORE_DEADLINE": "5",
        "KVFERRY_LOG_LEVEL": "",
        "PATH": "/",
    }
    assert Config.from_env(env) == Config(host=3 * GiB, store_deadline=5.0)
    with pytest.raises(UnknownSettingError, match=r"KVFERRY_.*did you mean 'host'"):
        Config.from_env({"KVFERRY_HOTS": "1"})


@pytest.mark.parametrize(
    "service", ["KVFERRY", "KVFERRY_METRICS", "KVFERRY_VLLM_0", "KVFERRY_HOST"]
)
@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_what_kubernetes_puts_beside_a_service_named_like_us_is_no_setting(service, protocol):
    port = f"{service}_PORT_9475_{protocol.upper()}"
    env = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "9475",
        f"{service}_SERVICE_PORT_HTTP_METRICS": "9475",
        f"{service}_PORT": f"{protocol}://10.0.0.1:9475",
        port: f"{protocol}://10.0.0.1:9475",
        f"{port}_PROTO": protocol,
        f"{port}_PORT": "9475",
        f"{port}_ADDR": "10.0.0.1",
        "KVFERRY_TEST_PROFILE": "ci",
    }
    assert Config.from_env(env) == Config()


def test_a_port_that_is_a_number_is_ours_and_a_misspelt_one_is_refused():
    assert Config.from_env({"KVFERRY_METRICS_PORT": "9475"}).metrics_port == 9475
    for name in ("KVFERRY_PORT", "KVFERRY_METRIC_PORT", "KVFERRY_SERVICE", "KVFERRY_PORT_HTTP"):
        with pytest.raises(UnknownSettingError):
            Config.from_env({name: "9475"})


@pytest.mark.parametrize(
    ("given_", "meant"),
    [
        ("64", "64GiB"),
        (64, "64GiB"),
        (" 1.5 ", "1.5GiB"),
        (512.0, "512.0GiB"),
        ("65536", "65536MiB"),
    ],
)
def test_a_size_without_a_unit_is_refused_unless_it_can_be_bytes(given_, meant):
    sizes = [each.name for each in describe() if each.accepts.startswith("size")]
    assert len(sizes) >= 8
    for name in sizes:
        with pytest.raises(
            ConfigError, match=rf"attach: {name}: .* did you mean {re.escape(meant)}\?"
        ):
            Config.load(None, {}, {name: given_}, source="attach")
    with pytest.raises(ConfigError, match=r"tiers: memory: .* did you mean 64GiB\?"):
        Config.load(None, {}, {"tiers": "memory:64"})
    with pytest.raises(ConfigError, match=r"KVFERRY_HOST: host: .* no unit"):
        Config.from_env({"KVFERRY_HOST": "64"})
    for right in ("64B", str(MiB), MiB, "64GiB"):
        assert Config.load(None, {}, {"staging_ring": right}).staging_ring >= 64
    assert Config.load(None, {}, {"disk_keep_free": "0"}).disk_keep_free == 0
    small = Config.load(None, {}, {"host": "64B"})
    assert dataclasses.replace(small, block_tokens=1).host == 64


def test_precedence(tmp_path):
    path = tmp_path / "kvferry.toml"
    path.write_text("host = '1B'\nblock_tokens = 1\nstaging_ring = '1B'\n")
    env = {"KVFERRY_HOST": "2B", "KVFERRY_BLOCK_TOKENS": "2"}
    config = Config.load(path, env, {"host": "3B", "staging_ring": None})
    assert (config.host, config.block_tokens, config.staging_ring) == (3, 2, 1)
    assert config.load_deadline == 30
    assert Config.load(None, {**env, "KVFERRY_CONFIG": str(path)}).staging_ring == 1
    assert Config.load(None, {"KVFERRY_CONFIG": ""}) == Config()


def test_an_error_says_which_door_it_came_through(tmp_path):
    with pytest.raises(ConfigError, match=r"^environment variable KVFERRY_HOST: host"):
        Config.load(None, {"KVFERRY_HOST": "lots"})
    with pytest.raises(ConfigError, match=r"^overrides: host"):
        Config.load(None, {}, {"host": "lots"})


# -- describing


def test_describe_covers_every_field_and_its_defaults_read_back():
    described = describe()
    assert [s.name for s in described] == [f.name for f in dataclasses.fields(Config)]
    assert Config.from_dict({s.name: s.default for s in described}) == Config()
    assert Config.from_env({s.env: s.default for s in described}) == Config()
    for s in described:
        assert all(len(part.split()) <= 25 for part in re.split(r"(?<=[.:]) ", s.help))
        assert s.accepts
        assert s.name in str(s)
