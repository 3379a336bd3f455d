"""The parts of a tier in a shared store that need no store: names and proofs, limits, settings."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from tests.fakes.doors import Passing, standing_open

from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.settings.tiers import read_remote
from kvferry.tiers.contract import TierSetup, Way
from kvferry.tiers.movers import open_tier
from kvferry.tiers.remote.client import Unavailable
from kvferry.tiers.remote.health import FIRST_WAIT, LONGEST_WAIT, CircuitBreaker
from kvferry.tiers.remote.stores import azure_config, ca_bundle, google_config, s3_config
from kvferry.tiers.remote.tier import open_remote
from kvferry.types import TierName


def test_a_breaker_waits_ever_longer_until_blocks_move() -> None:
    breaker, now, waits = CircuitBreaker(jitter=lambda: 1.0), 100.0, []
    for _ in range(12):
        breaker.failed("dead", now)
        waits.append(breaker.probe_at - now)
        now = breaker.probe_at
    assert waits[0] == FIRST_WAIT
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_WAIT
    breaker.probed()
    assert breaker.ailment == ""
    breaker.failed("dead again", now)
    assert breaker.probe_at - now == LONGEST_WAIT, "a probe that comes through is not yet a store"
    breaker.probed()
    breaker.worked(Way.FIND)
    breaker.failed("later", now)
    assert breaker.probe_at - now == FIRST_WAIT


def test_a_rank_that_does_not_say_what_its_blocks_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="say what they are"):
        open_remote(TierSetup(TierName("remote"), 64, options="s3://bucket"))


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (spec,) = Config.from_dict({"remote": "s3://bucket"}).all_tiers
    setup = TierSetup(TierName("remote"), 64, options=spec.options, shared_namespace=bytes(32))
    with pytest.raises(ConfigError, match=r"remote: s3://bucket .* needs obstore .*\.\[s3\]"):
        open_tier(spec, setup)


def test_credentials_come_from_where_tools_of_aws_look(tmp_path) -> None:
    config, credentials = tmp_path / "config", tmp_path / "credentials"
    config.write_text(
        "[default]\nregion = eu-1\n[profile x]\nregion = eu-2\nendpoint_url = http://x\n"
    )
    credentials.write_text(
        "[default]\naws_access_key_id = a\naws_secret_access_key = b\n"
        "[x]\naws_access_key_id = c\naws_secret_access_key = d%\naws_session_token = t\n"
    )
    files = {"AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(credentials)}
    assert s3_config({}, files) == {
        "access_key_id": "a",
        "secret_access_key": "b",
        "region": "eu-1",
    }
    assert s3_config({}, {**files, "AWS_PROFILE": "x"}) == {
        "access_key_id": "c",
        "secret_access_key": "d%",
        "session_token": "t",
        "region": "eu-2",
        "endpoint": "http://x",
    }
    env = {**files, "AWS_ACCESS_KEY_ID": "e", "AWS_SECRET_ACCESS_KEY": "f", "AWS_REGION": "r"}
    assert s3_config({}, {**env, "AWS_PROFILE": "x"}) == {
        "access_key_id": "e",
        "secret_access_key": "f",
        "region": "r",
        "endpoint": "http://x",
    }, "a token of one source never goes with keys of another"
    role = {**files, "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}
    assert s3_config({"endpoint": "http://y"}, role) == {"region": "eu-1", "endpoint": "http://y"}


@pytest.mark.parametrize(
    "broken", [b"no section = 1\n", b"[default\n", b"[default]\n\xff = 1\n", None]
)
def test_a_broken_file_of_aws_counts_as_none(tmp_path, broken: bytes | None) -> None:
    config, credentials = tmp_path / "config", tmp_path / "credentials"
    config.write_bytes(broken) if broken else config.mkdir()
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    files = {"AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(credentials)}
    keys = {"access_key_id": "a", "secret_access_key": "b"}
    assert s3_config({}, files) == {**keys, "region": "us-east-1"}
    swapped = {"AWS_CONFIG_FILE": str(credentials), "AWS_SHARED_CREDENTIALS_FILE": str(config)}
    assert s3_config({}, {**swapped, "AWS_REGION": "r"}) == {**keys, "region": "r"}
    only = {**swapped, "AWS_CONFIG_FILE": "", "HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="no credentials for S3"):
        s3_config({}, {**only, "AWS_EC2_METADATA_DISABLED": "true"})


def test_a_pods_identity_is_asked_for_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As EKS gives it: an address and a token's file. The client below asks there itself."""
    pytest.importorskip("obstore")
    from kvferry.tiers.remote import bucket

    asked: list[tuple[str, str]] = []

    class Agent(Passing):
        """Hands out keys, and is an S3 without anything."""

        def do_GET(self) -> None:  # noqa: N802
            asked.append((self.path, self.headers.get("Authorization", "")))
            keys = {"AccessKeyId": "pods", "SecretAccessKey": "s", "Token": "t"}
            body = json.dumps({**keys, "Expiration": "2999-01-01T00:00:00Z"}).encode()
            self.send_response(200 if self.path == "/keys" else 404)
            self.send_header("Content-Length", str(len(body) if self.path == "/keys" else 0))
            self.end_headers()
            if self.path == "/keys":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

    (tmp_path / "token").write_text("a token")
    env = {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    with standing_open(Agent) as port:
        url = f"http://127.0.0.1:{port}"
        env["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = f"{url}/keys"
        with pytest.raises(ConfigError, match="no credentials"):
            s3_config({}, env)
        env["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"] = str(tmp_path / "token")
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        client = bucket.BucketClient(
            read_remote("remote", f"s3://bucket?endpoint={url}"), 64, "f", env
        )
        assert asyncio.run(client.find(["block"], 64)) == [Unavailable()]
    assert asked[0] == ("/keys", "a token")
    assert "Credential=pods/" in asked[-1][1]


def test_authorities_of_ones_own_are_read_from_where_tools_of_aws_look(tmp_path) -> None:
    bundle, config = tmp_path / "roots.pem", tmp_path / "config"
    bundle.write_bytes(b"certificates")
    config.write_text(f"[default]\nca_bundle = {bundle}\n")
    home = {"HOME": str(tmp_path)}
    assert ca_bundle(home) is None
    assert ca_bundle({**home, "AWS_CA_BUNDLE": str(bundle)}) == b"certificates"
    from_profile = {**home, "AWS_CONFIG_FILE": str(config)}
    assert ca_bundle(from_profile) == b"certificates"
    assert s3_config({}, from_profile) == {"region": "us-east-1"}, "no word of it to the client"
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE.*not-here"):
        ca_bundle({**home, "AWS_CA_BUNDLE": str(tmp_path / "not-here")})


def test_azure_and_google_settings_come_from_where_their_tools_look() -> None:
    connection = "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k==;EndpointSuffix=x"
    env = {"AZURE_STORAGE_CONNECTION_STRING": connection}
    assert azure_config({}, env) == {"account_name": "a", "account_key": "k=="}
    env |= {"AZURE_STORAGE_ACCOUNT": "b", "AZURE_STORAGE_KEY": "l"}
    assert azure_config({}, env) == {"account_name": "b", "account_key": "l"}
    told = {"account": "c", "endpoint": "http://here"}
    assert azure_config(told, {}) == {"account_name": "c", "endpoint": "http://here"}
    with pytest.raises(ConfigError, match=r"\?account=NAME"):
        azure_config({}, {})
    assert google_config({}, {}) == {}
    assert google_config({"endpoint": "http://x"}, {}) == {"base_url": "http://x"}
