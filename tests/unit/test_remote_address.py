"""Addresses of shared stores: what is read, and what is said about one that cannot be."""

from __future__ import annotations

import pytest

from kvferry.errors import ConfigError
from kvferry.settings.tiers import read_remote


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket",
        "s3://bucket/a?region=here",
        "s3://bucket/some/prefix?endpoint=http://127.0.0.1:9000&region=eu-west-1",
        "gs://a_bucket/kv?endpoint=https://127.0.0.1:4443",
        "az://container/kv?account=name",
        "file:///mnt/shared/kvferry",
        "mooncake://master:50051",
        "mooncake://[::1]:50051?segment=64GiB",
        "mooncake://10.0.0.1:50051?metadata=P2PHANDSHAKE&protocol=rdma&device=mlx5_0&host=10.0.0.7",
        "mooncake://10.0.0.1:50051?metadata=http://10.0.0.1:8080/metadata",
        "mooncake://10.0.0.1:50051?metadata=etcd://10.0.0.1:2379",
    ],
)
def test_an_address_is_read_and_said_again(address: str) -> None:
    read = read_remote("remote", address)
    assert str(read) == address
    assert read_remote("remote", str(read)) == read


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (7, "file:///DIRECTORY or mooncake://MASTER:PORT, got 7"),
        ("http://host/kv", "expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX"),
        ("s3://", "cannot be a bucket"),
        ("s3://Bucket", "cannot be a bucket"),
        ("s3://bucket/a b", "cannot be a prefix"),
        ("s3://bucket/a//b", "cannot be a prefix"),
        ("s3://bucket?endpoint", "is no address"),
        ("s3://bucket?endpoint=host:9000", "endpoint: expected http://HOST:PORT"),
        ("s3://bucket?endpoint=http://", "endpoint: expected http://HOST:PORT"),
        ("s3://bucket?endpoint=http://:9000", "endpoint: expected http://HOST:PORT"),
        ("s3://bucket?endpoint=http://host:port", "endpoint: expected http://HOST:PORT"),
        ("s3://bucket?endpoint=http://[::1", "endpoint: expected http://HOST:PORT"),
        ("az://container?account=no-name", "account: expected 3 to 24 small letters"),
        ("gs://bucket?region=x", "gs:// has no option 'region'"),
        ("file://host/path", "expected file:///DIRECTORY"),
        ("file:///", "expected file:///DIRECTORY"),
        ("file:///mnt/../etc", "cannot be a prefix"),
        ("s3://key:secret@bucket", "carries no credentials"),
        ("s3://bucket?endpoint=http://u:secret@host", "AWS_ACCESS_KEY_ID"),
        ("s3://bucket?endpoint=ftp://u:secret@host", "carries no credentials"),
        ("s3://bucket?endpoint=http%3A%2F%2Fu%3Asecret%40host", "carries no credentials"),
        ("s3://bucket?endpoint=http://u:secret%2540host", "carries no credentials"),
        ("s3://bucket?endpoint=http://u:secret@host\n", "carries no credentials"),
        ("http://u:secret@host/kv", "carries no credentials"),
        ("mooncake://u:secret@master:1", "carries no credentials"),
        ("mooncake://master:1?metadata=redis://:secret@h:1", "MC_REDIS_PASSWORD"),
        ("mooncake://master:1?metadata=mysql://u:secret@h:1", "carries no credentials"),
        ("s3://bucket?segment=1GiB", "s3:// has no option 'segment'; options: endpoint, region"),
        ("mooncake://master", "expected mooncake://MASTER:PORT"),
        ("mooncake://master:0", "expected mooncake://MASTER:PORT"),
        ("mooncake://master:port", "is no address"),
        ("mooncake://master:70000", "is no address"),
        ("mooncake://master:1/path", "expected mooncake://MASTER:PORT, got"),
        ("mooncake://master:1?protocol=udp", "protocol: expected one of tcp, rdma"),
        ("mooncake://master:1?segment=much", "segment: expected a size"),
        ("mooncake://master:1?segment=1GiB&segment=2GiB", "may be given once"),
        ("mooncake://master:1?metadata=master:8080", "metadata: expected P2PHANDSHAKE, or"),
        ("mooncake://master:1?metadata=http:///metadata", "metadata: expected P2PHANDSHAKE, or"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(address: object, says: str) -> None:
    with pytest.raises(ConfigError) as said:
        read_remote("remote", address)
    assert str(said.value).startswith("remote: ")
    assert says in str(said.value)
    assert "secret" not in str(said.value)
