"""What bounds a bucket: a lifecycle rule, and what a person lists and removes."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from click.testing import CliRunner, Result
from tests.fakes import remote, s3_servers
from tests.fakes.remote import SIZE, Store

from kvferry.tiers.contract import Way
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
