"""Settings from every source: the right value, or a ConfigError that can be read."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

import kvferry
from kvferry.config import REMOVED, Config, describe, show
from kvferry.core.quantities import (
    GiB,
    KiB,
    MiB,
    TiB,
    format_size,
    parse_count,
    parse_seconds,
    parse_share,
    parse_size,
    show_share,
)
from kvferry.errors import ConfigError
from kvferry.tools.cli.commands import kvferry as cli

NAMES = [setting.name for setting in describe()]
HUGE = "9" * 6000
TOKEN = "0123456789abcdef-secret"


def refused(call, *arguments) -> str:
    """The message; it must be one of ours, short, and on one line."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert len(message) < 1000
    assert message.isprintable()
    return message


def settings_or_error(call, *arguments) -> Config:
    """The settings, or the defaults where they are refused in words that can be printed."""
    message = ""
    try:
        return call(*arguments)
    except ConfigError as error:
        message = str(error)
    assert len(message) < 2000
    assert message.encode()
    return Config()


# -- sizes, times, counts, shares

RIGHT: dict[Any, dict[Any, Any]] = {
    parse_size: {
        4096: 4096, np.int64(4096): 4096, 1e9: 10**9, "4096": 4096, "1B": 1, "64GiB": 64 * GiB,
        "64 gib": 64 * GiB, " 1.5 GB ": 1_500_000_000, "2kB": 2000, "2KiB": 2 * KiB,
        "0.5MiB": MiB // 2, "1TiB": TiB, "3tb": 3 * 10**12, "1.1KiB": 1126,
    },
    parse_seconds: {
        30: 30.0, 0.5: 0.5, "30": 30.0, "500ms": 0.5, "2 min": 120.0, "1h": 3600.0, "1.5S": 1.5,
        "250us": 0.00025,
    },
    parse_share: {"25%": 0.25, 0.1: 0.1, "0.5": 0.5, 0: 0.0},
}  # fmt: skip
NO_NUMBERS = (True, None, "", [1], b"1", float("nan"), "many", "1e9x", 10**6000, -(10**6000), HUGE)
FOREIGN = ("\u0663", "\uff11\uff12", "\u09ea", "\u00b2", "1\u0663", "1_000", "1\u00a01", "\u22123")
WRONG: dict[Any, tuple[Any, ...]] = {
    parse_size: (
        0, -1, "0", "-1GiB", "0.1B", 1.5, "GiB", "1 GiB 2", "1,5GB", "1e9", "64G", "64 furlongs",
        float("inf"), 2**63, "1\u212aiB", "1K\u0131B",
    ),
    parse_seconds: (0, -1, "0s", "-3s", "soon", "inf", "3 fortnights", float("inf"), "1\u017f"),
    parse_count: (0, -1, "0", "1.5", 1.5),
    parse_share: ("25", 7, -0.1, "-5%", "101%", "a%"),
}  # fmt: skip


@pytest.mark.parametrize("parse", RIGHT)
def test_values_as_people_write_them(parse):
    for given_, meant in RIGHT[parse].items():
        assert parse(given_) == pytest.approx(meant, rel=1e-12), given_
        assert type(parse(given_)) is type(meant), given_


@pytest.mark.parametrize("parse", WRONG)
def test_values_that_cannot_be_right(parse):
    for value in (*WRONG[parse], *NO_NUMBERS, *FOREIGN, f"-{HUGE}", f"0.{HUGE}x"):
        with pytest.raises(ConfigError, match=r"^ring: "):
            parse(value, name="ring")
        refused(parse, value)


@given(st.integers(min_value=1, max_value=2**63 - 1), st.floats(0, 1))
def test_a_formatted_value_reads_back(size, share):
    assert parse_size(format_size(size)) == size
    assert parse_share(show_share(share)) == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize(
    ("bare", "meant"),
    [("64", "64GiB"), (64, "64GiB"), (" 1.5 ", "1.5GiB"), ("65536", "65536MiB")],
)
def test_a_size_without_a_unit_is_refused_unless_it_can_be_bytes(bare, meant):
    """Seen red: host="64" was 64 bytes, and a server that caches nothing."""
    sizes = [each.name for each in describe() if each.accepts.startswith("size")]
    assert sizes
    for name in sizes:
        words = rf"attach: {name}: .* did you mean {re.escape(meant)}\?"
        with pytest.raises(ConfigError, match=words):
            Config.load(None, {}, {name: bare}, source="attach")
        with pytest.raises(ConfigError, match=rf"^{name}: .* did you mean {re.escape(meant)}\?"):
            Config(**{name: bare})
    with pytest.raises(ConfigError, match=r"tiers: memory: .* did you mean 64GiB\?"):
        Config.load(None, {}, {"tiers": "memory:64"})
    for right in ("64B", str(MiB), MiB, "64GiB"):
        assert Config.load(None, {}, {"staging_ring": right}).staging_ring >= 64
    assert Config.load(None, {}, {"disk_keep_free": "0"}).disk_keep_free == 0
    small = Config.load(None, {}, {"host": "64B"})
    assert dataclasses.replace(small, block_tokens=1).host == 64


# -- one setting


def test_frozen_picklable_and_checked_again_on_replace():
    config = Config(host=2 * GiB)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.host = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(Config(host=2 * GiB))
    with pytest.raises(ConfigError, match="host: must be at least 1 bytes, got 0"):
        dataclasses.replace(config, host=0)


@pytest.mark.parametrize("bad", ["teleport", None, 3, ""])
def test_a_choice_names_the_choices(bad):
    with pytest.raises(ConfigError, match="host_pin: expected one of auto, required, never"):
        Config.from_dict({"host_pin": bad})


@pytest.mark.parametrize("port", [65536, "65536", 2**40, HUGE, -1, 0], ids=range(6))
def test_ports_that_are_none(port):
    assert "metrics_port" in refused(Config.from_dict, {"metrics_port": port})


def test_addresses():
    wrong = (
        "a\0b",
        "a b",
        "",
        "a\nb",
        "\x1b[2J",
        "a" * 300,
        "http://a",
        "127.0.0.1:80",
        "ä",
        "[::1",
    )
    for address in wrong:
        refused(Config.from_dict, {"metrics_host": address})
    for address in ("0.0.0.0", "::1", "::", "node-7.cluster_a", "fe80::1%eth0"):
        for written in (address, f" {address} "):
            assert Config.from_dict({"metrics_host": written}).metrics_host == address


def test_a_token_may_be_in_a_file_and_is_never_shown(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    config = Config(control_token=f"file:{file}")
    assert config.control_token == TOKEN
    assert TOKEN not in repr(config)
    assert TOKEN not in show("control_token", config.control_token)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("short", "at least 16 characters, this one 5"),
        ("with a space in the middle", "printable ASCII without spaces"),
        ("file:/nowhere/at/all", "'/nowhere/at/all' cannot be read: No such file"),
        (17, "expected text"),
    ],
)
def test_a_token_that_will_not_do_is_refused_without_being_said(token, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Config(control_token=token)
    assert "with a space" not in str(caught.value)


# -- names


def test_an_unknown_name_is_answered_with_the_nearest():
    assert refused(Config.from_dict, {"load-deadlin": 1}).endswith(
        "'load-deadlin'; did you mean 'load_deadline'?"
    )
    far = refused(Config.from_dict, {"qqqq": 1})
    assert far.endswith("'qqqq'; kvferry config --all lists the settings")


@pytest.mark.parametrize(("gone", "instead"), REMOVED.items())
def test_a_setting_that_was_removed_says_what_replaced_it(gone, instead):
    assert not hasattr(Config(), gone)
    assert not instead.startswith("use ") or hasattr(Config(), instead.removeprefix("use "))
    with pytest.raises(ConfigError, match=f"attach: {gone} was removed: "):
        Config.load(None, {}, {gone: "3ms"}, source="attach")
    with pytest.raises(ConfigError, match=f"KVFERRY_{gone.upper()}: {gone} was removed: "):
        Config.load(None, {f"KVFERRY_{gone.upper()}": "1"})


# -- files


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
    assert Config.load(path, {}) == Config(host=2 * GiB, block_tokens=32)
    assert Config.load(str(path), {}) == Config(host=2 * GiB, block_tokens=32)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "host = \n", "not valid TOML"),
        ("a.json", "{", "not valid JSON"),
        ("a.toml", "\udcff\udcfe", "not valid TOML"),
        ("a.yaml", "host: 1", "ends in .toml or .json"),
        ("a.json", "[1]", "expected a table"),
        ("a.json", '{"kvferry": 3}', "expected a table"),
        ("a.toml", "host = -1\n", "host: must be at least 1 bytes, got -1"),
        ("a.toml", "hots = 1\n", "did you mean 'host'"),
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.toml", "host = " + "[" * 100_000, "nested too deep"),
        ("a.toml", "a" + ".a" * 100 + " = 1", "no setting 'a'"),
        ("a.json", '{"host": ' + HUGE + "}", "digits"),
        ("a.toml", "host = " + HUGE, "digits"),
        ("a.json", '{"host": NaN}', "host"),
        ("a.json", '{"load_deadline": 1e999}', "load_deadline"),
        ("a.toml", 'host = "1GiB"\n' + "# x\n" * 1_000_000, "more than 1MiB"),
        ("a.json", '{"' + "x" * 100_000 + '": 1}', "there is no setting"),
        ("a.toml", 'log_level = "' + "x" * 100_000 + '"', "log_level"),
        ("a.json", json.dumps({"host": list(range(10_000))}), "host"),
    ],
    ids=range(19),
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content.encode(errors="surrogateescape"))
    message = refused(Config.load, path, {})
    assert message.startswith(str(path))
    assert words in message


def test_what_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        Config.load(tmp_path / "absent.toml", {})
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    assert "it is no file" in refused(Config.load, tmp_path / "zero.json", {})
    os.mkfifo(tmp_path / "pipe.toml")
    refused(Config.load, tmp_path / "pipe.toml", {})
    refused(Config.load, None, {"KVFERRY_CONFIG": "a\0b.toml"})
    refused(Config.load, f"{'x' * 5000}.toml", {})


# -- the environment, and all sources together


def test_from_env():
    env = {"KVFERRY_HOST": "3GiB", "KVFERRY_STORE_DEADLINE": "5", "KVFERRY_LOG_LEVEL": "", "A": "/"}
    assert Config.load(None, env) == Config(host=3 * GiB, store_deadline=5.0)
    assert "did you mean 'host'" in refused(Config.load, None, {"KVFERRY_HOTS": "1"})
    assert Config.load(None, {"KVFERRY_Block_Tokens": "32"}).block_tokens == 32
    found = CliRunner().invoke(cli, ["config", "--json"], env={"KVFERRY_Block_Tokens": "32"})
    assert json.loads(found.output)["block_tokens"]["source"] == "KVFERRY_Block_Tokens"


@pytest.mark.parametrize("service", ["KVFERRY", "KVFERRY_METRICS", "KVFERRY_HOST"])
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
    assert Config.load(None, env) == Config()
    assert Config.load(None, {"KVFERRY_METRICS_PORT": "9475"}).metrics_port == 9475
    for name in ("KVFERRY_PORT", "KVFERRY_METRIC_PORT", "KVFERRY_SERVICE", "KVFERRY_PORT_HTTP"):
        refused(Config.load, None, {name: "9475"})


@given(
    st.dictionaries(
        st.sampled_from([f"KVFERRY_{name.upper()}" for name in NAMES]) | st.text(max_size=9),
        st.text(max_size=30),
        max_size=4,
    )
)
@example({"KVFERRY_HOST": "\udcff"})
@example({"KVFERRY_\udcff": "1"})
def test_any_environment_is_settings_or_an_error(env):
    settings_or_error(lambda env: Config.load(None, env), env)


def test_precedence_and_the_source_in_an_error(tmp_path):
    path = tmp_path / "kvferry.toml"
    path.write_text("host = '1B'\nblock_tokens = 1\nstaging_ring = '1B'\n")
    env = {"KVFERRY_HOST": "2B", "KVFERRY_BLOCK_TOKENS": "2"}
    config = Config.load(path, env, {"host": "3B", "staging_ring": None})
    assert (config.host, config.block_tokens, config.staging_ring) == (3, 2, 1)
    assert Config.load(None, {**env, "KVFERRY_CONFIG": str(path)}).staging_ring == 1
    assert Config.load(None, {"KVFERRY_CONFIG": ""}) == Config()
    path.write_text("host = 'lots'\n")
    for load, source in (
        (lambda: Config.load(path, {}), str(path)),
        (lambda: Config.load(None, {"KVFERRY_HOST": "lots"}), "environment variable KVFERRY_HOST"),
        (lambda: Config.load(None, {}, {"host": "lots"}, source="attach"), "attach"),
        (lambda: kvferry.attach([], model="m", host="lots"), "attach"),
    ):
        assert refused(load).startswith(f"{source}: host: ")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=5)
    | st.sampled_from(["1GiB", "auto", "none", "30s", "::1", "kernel", 10**4000, "9" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5) | st.integers(), VALUES))
def test_any_dictionary_is_settings_or_an_error(settings):
    config = settings_or_error(Config.from_dict, settings)
    assert dataclasses.replace(config) == config


def test_describe_covers_every_field_and_its_defaults_read_back():
    described = describe()
    assert [s.name for s in described] == [f.name for f in dataclasses.fields(Config)]
    assert Config.from_dict({s.name: s.default for s in described}) == Config()
    assert Config.load(None, {s.env: s.default for s in described}) == Config()
    for s in described:
        assert s.help
        assert all(len(part.split()) <= 25 for part in re.split(r"(?<=[.:]) ", s.help))
