"""What bounds a bucket: removal by age, a lifecycle rule, and what a person removes."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
from click.testing import CliRunner, Result
from tests.fakes import remote, s3_servers
from tests.fakes.remote import SIZE, Store

from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.tiers.contract import Way
from kvferry.tiers.remote.listing import Expiry, list_ours
from kvferry.tiers.remote.objects import ObjectFormat
from kvferry.tools.cli.commands import kvferry as command

ALL = list(range(8))
FOLDER = "tests/"
every_server = pytest.mark.parametrize("kind", [*s3_servers.SERVERS, "directory"])
DOCS = Path(__file__).parents[2] / "docs" / "fleet.md"


def address_of(kind: str) -> str:
    if kind == "directory":
        return f"file://{s3_servers.directory()}/tests"
    endpoint = s3_servers.server(kind).endpoint
    return f"s3://{s3_servers.BUCKET}/tests?endpoint={endpoint}"


@pytest.fixture
def store(kind: str) -> Iterator[Store]:
    """Alone in its bucket."""
    bucket = remote.bucket(kind)
    for page in obstore.list(bucket):
        obstore.delete(bucket, [each["path"] for each in page])
    namespace = secrets.token_bytes(32)
    tier = remote.open_s3("", SIZE, namespace=namespace, address=address_of(kind))
    yield Store(tier, namespace)
    tier.close()


def expiry(kind: str, ttl: float, turn: int = 0, **more: Any) -> Expiry:
    settle = {"settle": 0.3, **more}
    bucket = remote.bucket(kind)
    made = Expiry(bucket, FOLDER, ttl, lambda *_: None, clock=lambda: turn * 60.0, **settle)
    assert made.turn_seconds == 60.0
    return made


def names(kind: str) -> set[str]:
    pages = list_ours(remote.bucket(kind), FOLDER)
    return {each.path for page in pages for each in page}


@every_server
def test_what_is_old_goes_and_what_is_young_stays(kind: str, store: Store) -> None:
    store.write(ALL[:4])
    time.sleep(3.0)
    store.write(ALL[4:])
    other = "tests/not-ours"
    obstore.put(remote.bucket(kind), other, b"stays")
    assert expiry(kind, 2.0).take_turn() == 5, "four blocks and the probe"
    assert store.reads(ALL) == [False] * 4 + [True] * 4
    assert not store.tier.ailment
    assert obstore.head(remote.bucket(kind), other)["size"] == 5
    time.sleep(3.0)
    assert expiry(kind, 2.0, turn=1).take_turn() == 4
    assert not names(kind)
    store.write(ALL)
    assert store.reads(ALL) == [True] * 8, "what was removed is written again"


@every_server
def test_one_server_at_a_time(kind: str, store: Store) -> None:
    store.write(ALL)
    time.sleep(1.5)

    def race(turn: int) -> list[int]:
        rivals = [expiry(kind, 0.5, turn) for _ in range(8)]
        with ThreadPoolExecutor(8) as threads:
            return sorted(threads.map(lambda rival: rival.take_turn(), rivals))

    assert race(1) == [0] * 7 + [9]
    assert race(1) == [0] * 8, "this turn was taken"
    store.write(ALL)
    time.sleep(1.5)
    assert race(2) == [0] * 7 + [8]
    turns = [
        each["path"]
        for page in obstore.list(remote.bucket(kind))
        for each in page
        if "kvferry-turns" in each["path"]
    ]
    assert len(turns) == 1, "past turns leave nothing behind"


@every_server
def test_readers_meet_misses_and_nothing_else(kind: str, store: Store) -> None:
    """Blocks are removed and written again while another server reads them."""
    reader = Store(
        remote.open_s3("", SIZE, namespace=store.objects.namespace, address=address_of(kind)),
        store.objects.namespace,
    )
    reader.rows[:] = store.rows
    came: list[bool] = []
    for turn in range(6):
        store.write(ALL)
        remover = expiry(kind, -60.0, turn, settle=0.0)  # everything is old

        with ThreadPoolExecutor(1) as threads:
            removing = threads.submit(remover.take_turn)
            while not removing.done():
                came += reader.reads(ALL)  # verifies what comes
            removing.result()
    assert not reader.tier.ailment
    assert True in came
    assert False in came
    reader.tier.close()


@every_server
def test_a_server_removes_what_is_old_by_itself(kind: str, store: Store) -> None:
    store.write(ALL)
    time.sleep(1.5)
    left = 60.0 - time.time() % 60.0
    if left < 20.0:  # a turn that ends before the removal begins leaves it to the next
        time.sleep(left)
    keeper = remote.open_s3("", SIZE, address=address_of(kind), remote_ttl=1.0)
    store.wait(lambda: not store.do(Way.FIND, ALL).ok.any())
    keeper.close()


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="master evicts by itself"):
        Config(remote="mooncake://here:1", remote_ttl="1h")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a read-only server removes nothing"):
        Config(remote="s3://bucket", remote_ttl="1d", remote_mode="read-only")  # type: ignore[arg-type]
    assert Config(remote="s3://bucket", remote_ttl="7d").remote_ttl == 604800.0  # type: ignore[arg-type]


def test_the_documented_lifecycle_rule_is_one_and_covers_our_names() -> None:
    boto3 = pytest.importorskip("boto3")
    (rule,) = [
        json.loads(text)
        for text in re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
        if "Expiration" in text
    ]
    client = boto3.client(
        "s3",
        endpoint_url=s3_servers.server("moto").endpoint,
        aws_access_key_id=s3_servers.ACCESS,
        aws_secret_access_key=s3_servers.SECRET,
        region_name="us-east-1",
    )
    client.put_bucket_lifecycle_configuration(Bucket=s3_servers.BUCKET, LifecycleConfiguration=rule)
    (kept,) = client.get_bucket_lifecycle_configuration(Bucket=s3_servers.BUCKET)["Rules"]
    name = ObjectFormat(bytes(32), SIZE).names([bytes(32)])[0]
    assert f"kv/{name}".startswith(kept["Filter"]["Prefix"])
    assert kept["Status"] == "Enabled"
    assert kept["Expiration"]["Days"] >= 1


@pytest.fixture
def run(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in [name for name in os.environ if name.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)
    for name, value in remote.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KVFERRY_REMOTE", address_of(kind))

    def invoke(*words: str, **more: Any) -> Result:
        return CliRunner().invoke(command, ["remote", *words], **more)

    return invoke


@every_server
def test_what_is_there_is_listed_and_removed(kind: str, store: Store, run: Any) -> None:
    store.write(ALL)
    mine = store.objects.namespace.hex()
    listed = json.loads(run("ls", "--json").stdout)["namespaces"]
    assert [(each["namespace"], each["objects"], each["ranks"]) for each in listed] == [
        (mine, 9, [0])
    ]
    assert listed[0]["bytes"] > 8 * SIZE
    shown = run("ls")
    assert shown.exit_code == 0
    assert mine[:12] in shown.stdout
    assert "a-model" in shown.stdout
    assert "9 objects" in shown.stdout

    assert "Nothing to remove" in run("purge", "--older-than", "1h", "--yes").stdout
    assert "Nothing to remove" in run("purge", "--all", "--namespace", "ffff00", "--yes").stdout
    refused = run("purge", "--all", input="n\n")
    assert refused.exit_code == 1
    assert "Remove 9 objects" in refused.stderr
    assert store.reads(ALL) == [True] * 8
    assert json.loads(run("purge", "--all", "--yes", "--json").stdout)["removed"] == 9
    assert store.reads(ALL) == [False] * 8
    assert "Nothing of kvferry's" in run("ls").stdout


@pytest.mark.parametrize("kind", ["moto"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["purge"], "give either --all or --older-than"),
        (["purge", "--all", "--older-than", "1h"], "give either --all or --older-than"),
        (["purge", "--older-than", "soon"], "--older-than: expected a time"),
        (["ls", "mooncake://here:1"], "cannot be listed"),
        (["ls", "s3://x"], "cannot be a bucket"),
        (["ls", "s3://nowhere-bucket?endpoint=http://127.0.0.1:9"], "Connection refused"),
    ],
)
def test_mistakes_are_said(words: list[str], says: str, run: Any) -> None:
    result = run(*words)
    assert result.exit_code in (1, 2)
    assert says in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("kind", ["moto"])
def test_without_an_address_it_is_asked_for(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_REMOTE")
    assert "no address is named" in run("ls").output


def test_a_directory_is_not_made_where_nothing_is_mounted(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    namespace = secrets.token_bytes(32)
    tier = remote.open_s3("", SIZE, namespace=namespace, address=f"file://{mount}", is_well=False)
    store = Store(tier, namespace)
    try:
        assert "directory of its address is not there" in tier.ailment
        assert not store.do(Way.WRITE, ALL).ok.any()
        assert not mount.exists()
        mount.mkdir()
        store.wait_healed()
        store.write(ALL)
        assert store.reads(ALL) == [True] * 8
    finally:
        tier.close()
