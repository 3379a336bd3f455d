"""The settings of control: shares, secrets that are never shown, and access."""

from __future__ import annotations

import pytest

from kvferry.config import Config, describe, show
from kvferry.core.quantities import parse_share, show_share
from kvferry.errors import ConfigError

TOKEN = "0123456789abcdef-secret"


@pytest.mark.parametrize(("given", "share"), [("25%", 0.25), (0.1, 0.1), ("0.5", 0.5), (0, 0.0)])
def test_shares_are_read(given, share):
    assert parse_share(given) == pytest.approx(share)
    assert parse_share(show_share(share)) == pytest.approx(share)


@pytest.mark.parametrize("given", ["25", 7, -0.1, "-5%", "101%", float("nan"), True, None, "a%"])
def test_what_is_no_share_is_refused(given):
    with pytest.raises(ConfigError, match="expected a share such as 25%"):
        parse_share(given)


def test_a_token_may_be_in_a_file_and_is_never_shown(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    config = Config(control="local", control_token=f"file:{file}")
    assert config.control_token == TOKEN
    assert TOKEN not in repr(config)
    assert TOKEN not in show("control_token", config.control_token)
    assert next(s for s in describe() if s.name == "control_token").default == "none"


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
    with pytest.raises(ConfigError, match=words) as refused:
        Config(control_token=token)
    assert "with a space" not in str(refused.value)


def test_control_without_a_token_is_refused():
    assert Config().control == "off"
    for where in ("local", "anywhere"):
        with pytest.raises(ConfigError, match=f"control: {where} needs a control_token"):
            Config(control=where)
