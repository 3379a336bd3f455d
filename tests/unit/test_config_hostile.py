"""Malformed settings: a ConfigError that can be read, or the right value."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.config import Config, describe
from kvferry.core.quantities import parse_count, parse_rate, parse_seconds, parse_size
from kvferry.errors import ConfigError
from kvferry.tools.cli.commands import kvferry as cli

NAMES = [setting.name for setting in describe()]
HUGE = "9" * 6000


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


PARSERS = (parse_size, parse_seconds, parse_count, parse_rate)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "value",
    [10**6000, -(10**6000), HUGE, f"-{HUGE}", f"0.{HUGE}x", f"1{'0' * 2_000_000}", [HUGE]],
    ids=range(7),
)
def test_numbers_of_thousands_of_digits(parse, value):
    refused(parse, value)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "value",
    [
        "\u0663",
        "\uff11\uff12",
        "\u09ea",
        "\u00b2",
        "1\u0663",
        "1_000",
        "\uff11.5",
        "1\u00a0",
        "\u22123",
    ],
)
def test_foreign_digits_are_no_digits(parse, value):
    refused(parse, value)


@pytest.mark.parametrize(
    ("parse", "value"),
    [(parse_size, "1\u212aiB"), (parse_size, "1K\u0131B"), (parse_seconds, "1\u017f")],
)
def test_letters_that_only_look_like_a_unit(parse, value):
    refused(parse, value)


@pytest.mark.parametrize("port", [65536, 99999, "65536", 2**40, HUGE, -1, 0], ids=range(7))
def test_ports_that_are_none(port):
    message = refused(Config.from_dict, {"metrics_port": port})
    assert "metrics_port" in message


@pytest.mark.parametrize(
    "address",
    [
        "a\0b",
        "\0",
        "a b",
        "",
        "a\nb",
        "\x1b[2J",
        "a" * 300,
        "http://a",
        "127.0.0.1:80",
        "ä",
        "[::1",
    ],
)
def test_addresses_that_are_none(address):
    refused(Config.from_dict, {"metrics_host": address})


@pytest.mark.parametrize(
    ("given_", "read"),
    [
        ("0.0.0.0", "0.0.0.0"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("::", "::"),
        ("node-7.cluster_a", "node-7.cluster_a"),
        (" localhost ", "localhost"),
        ("fe80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_addresses_as_people_write_them(given_, read):
    assert Config.from_dict({"metrics_host": given_}).metrics_host == read


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.json", '{"host":' * 100_000, "nested too deep"),
        ("a.toml", "host = " + "[" * 100_000, "nested too deep"),
        ("a.toml", "a" + ".a" * 3_000 + " = 1", "no setting 'a'"),
        ("a.json", '{"host": ' + HUGE + "}", "digits"),
        ("a.toml", "host = " + HUGE, "digits"),
        ("a.json", '{"host": 1, "block_tokens": 2, "host": 3}', "'host' is there twice"),
        ("a.json", '{"kvferry": {"host": 1}, "kvferry": {"host": 3}}', "'kvferry' is there twice"),
        ("a.toml", "host = 1\nhost = 2", "not valid TOML"),
        ("a.json", '{"host": NaN}', "host"),
        ("a.json", '{"prefill_rate": 1e999}', "prefill_rate"),
        ("a.toml", 'host = "1GiB"\n' + "# x\n" * 1_000_000, "more than 1MiB"),
        ("a.json", '{"' + "x" * 100_000 + '": 1}', "there is no setting"),
        ("a.toml", 'log_level = "' + "x" * 100_000 + '"', "log_level"),
        ("a.json", json.dumps({"host": list(range(10_000))}), "host"),
    ],
    ids=range(15),
)
def test_files_that_go_too_far(tmp_path, name, text, words):
    file = tmp_path / name
    file.write_text(text)
    assert words in refused(Config.from_file, file)


def test_a_name_that_no_file_can_have():
    refused(Config.from_file, "a\0b.toml")
    refused(Config.load, None, {"KVFERRY_CONFIG": "a\0b.toml"})
    refused(Config.from_file, f"{'x' * 5000}.toml")


def test_a_file_without_an_end_is_not_read_to_it(tmp_path):
    file = tmp_path / "zero.json"
    file.symlink_to("/dev/zero")
    assert "it is no file" in refused(Config.from_file, file)


def test_a_pipe_without_a_writer_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    refused(Config.from_file, tmp_path / "pipe.toml")


@given(st.sampled_from([".toml", ".json"]), st.binary(max_size=200) | st.text(max_size=200))
def test_any_file_is_settings_or_an_error(tmp_path_factory, suffix, content):
    file = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    data = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    file.write_bytes(data)
    settings_or_error(Config.from_file, file)


def test_two_spellings_of_one_variable():
    message = refused(Config.from_env, {"KVFERRY_HOST": "1GiB", "KVFERRY_Host": "2GiB"})
    assert "KVFERRY_HOST" in message
    assert "KVFERRY_Host" in message
    assert Config.from_env({"KVFERRY_Block_Tokens": "32"}).block_tokens == 32


def test_config_names_the_spelling_it_found():
    result = CliRunner().invoke(
        cli, ["config", "--json"], env={"KVFERRY_Block_Tokens": "32", "KVFERRY_HOST": "1GiB"}
    )
    rows = json.loads(result.output)
    assert rows["block_tokens"]["source"] == "KVFERRY_Block_Tokens"
    assert rows["host"]["source"] == "KVFERRY_HOST"


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
    settings_or_error(Config.from_env, env)


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
