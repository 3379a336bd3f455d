"""The commands an operator uses, as they are typed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tests.fakes.endpoint import FakeEndpoint

import kvferry
from kvferry.cache.policies.load_or_compute import Verdict
from kvferry.config import describe
from kvferry.scheduler.journal import Reason
from kvferry.tools.cli.commands import kvferry as cli
from kvferry.tools.cli.explain import REASONS, VERDICTS


def invoke(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(cli, arguments, env=env)


@pytest.fixture
def endpoint():
    fake = FakeEndpoint()
    yield fake
    fake.close()


def test_version():
    assert invoke("--version").output == f"kvferry {kvferry.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("docter",), "Did you mean 'doctor'?"),
        (("top", "--onec"), "--once"),
    ],
)
def test_a_command_that_is_not_there_is_answered_with_the_nearest(typed, words):
    result = invoke(*typed)
    assert result.exit_code == 2
    assert words in result.output


def test_top_once(endpoint):
    result = invoke("top", endpoint.url, "--once", "--interval", "0.1")
    assert result.exit_code == 0, result.output
    for words in ("75%  hit rate", "10  requests", "700 of 1,000", "host → device", "evicted"):
        assert words in result.output
    assert "\x1b[" not in result.output  # plain when piped


def test_top_once_as_json(endpoint):
    result = invoke("top", endpoint.url, "--once", "--json", "--interval", "0.1")
    view = json.loads(result.output)
    assert view["hit_rate"] == 0.75
    assert [tier["name"] for tier in view["tiers"]] == ["host", "disk"]


def test_top_says_where_no_endpoint_answers(endpoint):
    endpoint.close()
    result = invoke("top", endpoint.url, "--once")
    assert result.exit_code == 1
    assert "cannot be reached" in result.output
    assert "Traceback" not in result.output
    assert invoke("top", "file:///etc/passwd", "--once").exit_code == 1


def test_a_running_kvferry_is_found(endpoint, monkeypatch):
    vllms, urls = "http://127.0.0.1:8000", [endpoint.url, "http://127.0.0.1:8000"]
    monkeypatch.setattr("kvferry.tools.cli.output.find_endpoints", lambda: urls)
    result = invoke("top", "--once", "--interval", "0.1")
    assert "75%  hit rate" in result.stdout
    assert result.stderr == f"Found {endpoint.url}, {vllms}. Using {endpoint.url}.\n"
    assert "There is no request yet." in invoke("explain").stdout


EVIL = "a\x1b[2J\x1b]0;pwned\x07[red]b\n\u202e"


def test_a_terminal_is_told_nothing_by_names_others_chose(endpoint):
    endpoint.requests = [{"request_id": EVIL, "reason": EVIL, "asked_tokens": 1, "host_tokens": 0}]
    for arguments in (("explain", "--url", endpoint.url), ("explain", EVIL, "--url", endpoint.url)):
        output = invoke(*arguments).output
        assert not set(output) & {"\x1b", "\x07", "\u202e"}
    assert "[red]b" in invoke("explain", "--url", endpoint.url).output


@pytest.fixture
def served():
    kv = [np.zeros((32, 2, 16, 2, 8), np.float32) for _ in range(2)]
    with kvferry.attach(kv, model="m", block_tokens=16, host="8MiB") as ferry:
        url = ferry.serve_metrics(0)
        keys = ferry.keys(np.arange(64))
        ferry.wait(ferry.store(keys, [0, 1, 2, 3]))
        hit = ferry.match(keys)
        ferry.wait(ferry.load(hit, [4, 5, 6, 7]))
        miss = ferry.match(ferry.keys(np.arange(9, 73)))
        ferry.poll()  # drains the event log
        yield url, hit.request.id, miss.request.id


def test_explain_tells_a_hit_a_miss_and_the_latest(served):
    url, hit, miss = served
    told = invoke("explain", hit, "--url", url).output
    assert "Tokens: 64 = 0 on the device, 64 in host memory, 0 not found" in told
    assert "host → device" in told
    assert "cpu" in told
    told = invoke("explain", miss, "--url", url).output
    assert "First missing token: 0." in told
    assert "never_stored" in told
    assert "Nothing was copied" in told
    listed = invoke("explain", "--url", url).output
    assert hit in listed
    assert miss in listed
    plain = json.loads(invoke("explain", hit, "--url", url, "--json").output)
    assert plain["copies"][0]["num_blocks"] == 4


def test_explain_says_when_a_request_is_not_remembered(served):
    result = invoke("explain", "who/is this?", "--url", served[0])
    assert result.exit_code == 1
    assert "nothing is remembered of request 'who/is this?'" in result.output


def test_every_reason_and_verdict_has_words():
    assert set(REASONS) == {reason.value for reason in Reason}
    assert set(VERDICTS) == {verdict.value for verdict in Verdict}


def test_config_shows_every_setting_and_its_source(tmp_path):
    file = tmp_path / "kvferry.toml"
    file.write_text('[kvferry]\nhost = "2GiB"\nload_policy = "always"\n')
    result = invoke("config", "--json", KVFERRY_CONFIG=str(file), KVFERRY_LOAD_POLICY="always")
    rows = json.loads(result.output)
    assert set(rows) == {setting.name for setting in describe()}
    assert (rows["host"]["value"], rows["host"]["source"]) == ("2GiB", str(file))
    assert (rows["load_policy"]["value"], rows["load_policy"]["source"]) == (
        "always",
        "KVFERRY_LOAD_POLICY",
    )
    assert rows["staging_ring"]["source"] == "default"
    basic = {setting.name for setting in describe() if setting.basic}
    for words, wanted in (((), {*basic, "load_policy"}), (("--all",), set(rows))):
        lines = invoke("config", *words, "--file", str(file)).output.splitlines()
        assert {line.split()[0] for line in lines if line[:1].isalpha()} - {"Setting"} == wanted


def test_vllms_arguments_are_printed_and_bad_ones_refused():
    prefix = "--kv-transfer-config.kv_connector"
    given = ("--host", "64GiB", "--disk-keep-free", "1GiB")
    assert invoke("vllm-args", *given).output == (
        f"{prefix} kvferry --kv-transfer-config.kv_role kv_both "
        f"{prefix}_extra_config.host 64GiB {prefix}_extra_config.disk_keep_free 1GiB\n"
    )
    assert "unknown unit in '1X'" in invoke("vllm-args", "--host", "1X").output
    store = ("vllm-args", "--remote", "s3://bucket/a?region=here")
    refused = invoke(*store)
    assert (refused.exit_code, "use --json" in refused.output) == (1, True)
    assert invoke(*store, "--json").exit_code == 0


def test_config_refuses_what_an_engine_would_refuse():
    result = invoke("config", KVFERRY_HOTS="1GiB")
    assert result.exit_code == 1
    assert "did you mean 'host'" in result.output


def test_the_shell_is_answered_with_commands_and_options():
    def complete(words: str) -> str:
        env = {
            "_KVFERRY_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": f"{len(words.split()) - 1}",
        }
        return CliRunner().invoke(cli, [], prog_name="kvferry", env=env).output

    assert "doctor" in complete("kvferry do")
    assert "--once" in complete("kvferry top --o")
    assert "purge" in complete("kvferry disk p")
