"""Status, watch, explain, report and operator commands on a local pool."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.support.local_backend import LIMIT_S, LONG_LIFETIMES, LocalBackend


async def stdout_of(backend: LocalBackend, *arguments: str) -> str:
    """Run a command without --json and return its standard output."""
    process = await backend.start(*arguments)
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert b"Traceback" not in err
    return out.decode()


async def test_status_explain_and_report_of_a_pool(backend: LocalBackend) -> None:
    await backend.up(**LONG_LIFETIMES, margin_sec=10, sweeper=True)
    first = (await backend.provision("41", 2, "--log-format", "json")).document
    await backend.release("41")
    log = backend.folder / "instances" / first["instances"][0]["instance_id"] / "logs" / "agent.log"
    agent_log = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["instance_id"] for line in agent_log} == {first["instances"][0]["instance_id"]}
    released = next(line for line in agent_log if line["reason"] == "record state is releasing")
    assert (released["event"], released["run_id"], released["epoch"]) == ("state", "41", 1)
    logged = await backend.provision("42", 1, "--log-format", "json")
    events = {line["event"]: line for line in map(json.loads, logged.stderr.splitlines())}
    assert (events["claim-won"]["run_id"], events["claim-won"]["epoch"]) == ("42", 2)
    assert events["commit"]["reason"] == "the only instance of run 42 registered"
    second = logged.document
    (reused,) = [item["instance_id"] for item in second["instances"]]
    assert reused in {item["instance_id"] for item in first["instances"]}

    text = await stdout_of(backend, "status")
    for column in ("instance", "state", "run", "time left", "heartbeat", "type", "usage", "uses"):
        assert column in text
    assert re.search(rf"{reused} +running +42 ", text)
    status = (await backend.run("status")).document
    assert status["warnings"] == []
    assert status["open_provisions"] == []
    assert {item["state"] for item in status["instances"]} == {"running", "idle"}
    assert all(item["heartbeat_age_seconds"] < 60 and item["seconds_left"] > 0 for item in status["instances"])
    assert status["runs"][0]["outcome"]["reused"] == 1

    explanation = (await backend.run("explain", "42")).document
    texts = [line["what"] for line in explanation["events"] if line["instance_id"] in {reused, ""}]
    assert texts == [
        "attempt 1 requests 1 large runner",
        "claimed from the pool",
        "registered",
        "running, accepts jobs",
        texts[-1],
    ]
    assert texts[-1].startswith("complete after ")
    text = await stdout_of(backend, "explain", "42")
    assert text.splitlines()[0] == "Run 42: committed (all instances started)"
    assert "\x1b" not in text

    explanation = (await backend.run("explain", f"remuda-default-2-{reused}")).document
    assert (explanation["kind"], explanation["subject"]) == ("instance", reused)
    assert ("boots for run 41", "launched (provision)") in [
        (line["what"], line["why"]) for line in explanation["events"]
    ]

    report = (await backend.run("report", "--since", "1h")).document
    assert (report["reuse"]["reused"], report["reuse"]["created"]) == (1, 2)
    assert report["provision_seconds"]["warm"]["count"] == report["provision_seconds"]["cold"]["count"] == 1
    assert set(report["cost"]["by_run"]) == {"41", "42", ""}
    assert report["cost"]["total"] > 0
    assert re.search(r"reused +33% of 3 runners", await stdout_of(backend, "report"))
    page = backend.folder.parent / "page.html"
    assert (await backend.run("report", "--html", str(page))).document["page"] == str(page)
    assert page.read_text().startswith("<!doctype html>")
    prices = backend.folder.parent / "prices.json"
    prices.write_text(json.dumps({"currency": "EUR", "on-demand": {"c6i.large": 100}}))
    expensive = (await backend.run("report", "--prices", str(prices))).document["cost"]
    assert (expensive["currency"], expensive["total"] > 100 * report["cost"]["total"]) == ("EUR", True)

    error = (await backend.run("explain", "43", code=2)).document["error"]
    assert "42" in error["fix"]
    error = (await backend.run("explain", "i-0123456789abcdef0", code=2)).document["error"]
    assert reused in error["fix"]


async def test_watch_prints_changes_and_stops_on_sigterm(backend: LocalBackend) -> None:
    await backend.up(**LONG_LIFETIMES)
    lines = await backend.start("status", "--watch", "--every", "0.2")
    documents = await backend.start("status", "--watch", "--every", "0.2", "--json")
    assert lines.stdout is not None
    assert documents.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        assert (await lines.stdout.readline()).startswith(b"pool default at ")
        first = json.loads(await documents.stdout.readline())
        assert first["instances"] == []
        await backend.provision("41")
        seen = b""
        while b"is running for run 41" not in seen:
            seen = await lines.stdout.readline()
            assert seen, "the watch ended early"
        while not (found := json.loads(await documents.stdout.readline())["instances"]):
            pass
        assert found[0]["holder"]["run_id"] == "41"
        for process in (lines, documents):
            process.terminate()
            # Reads the remaining output until the process exits.
            await process.communicate()
            assert process.returncode == 130


async def test_status_warns_of_an_expired_instance(backend: LocalBackend) -> None:
    await backend.up(**{**LONG_LIFETIMES, "idle_time_sec": 2, "margin_sec": 1})
    (instance,) = (await backend.provision("41")).document["instances"]
    await backend.release("41")
    await backend.until(lambda: not backend.machines(), "the idle instance to terminate itself")
    found: set[tuple[str, str]] = set()
    async with asyncio.timeout(LIMIT_S):
        while ("expired", instance["instance_id"]) not in found:
            done = await backend.run("status")
            found = {(item["kind"], item["subject"]) for item in done.document["warnings"]}
    assert f"warning: expired {instance['instance_id']}: its threshold as idle passed" in done.stderr
    assert "expired" in await stdout_of(backend, "status")
    explanation = (await backend.run("explain", instance["instance_id"])).document
    assert "the next refresh terminates it" in explanation["next"][0]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--since", "soon"), "--since"),
        (("--since", "0d"), "--since"),
        (("--since", "9999999w"), "--since"),
        (("--since", "2999-01-01"), "--since"),
        (("--html", "/nowhere/at/all.html"), "--html"),
        (("--html", ""), "--html"),
        (("--prices", "/nowhere.json"), "--prices"),
    ],
)
async def test_report_rejects_invalid_options(tmp_path: Path, arguments: tuple[str, ...], field: str) -> None:
    backend = LocalBackend(tmp_path / "never-up")
    error = (await backend.run("report", *arguments, code=2)).document["error"]
    assert error["field"] == field


async def test_every_requires_watch(backend: LocalBackend) -> None:
    await backend.run("up")
    error = (await backend.run("status", "--every", "1", code=2)).document["error"]
    assert error["field"] == "--every"


async def test_drain_quarantine_and_terminate(backend: LocalBackend) -> None:
    await backend.up(**LONG_LIFETIMES)
    first = (await backend.provision("41", 3)).document
    odd, old, last = sorted(item["instance_id"] for item in first["instances"])
    await backend.release("41")

    plan = (await backend.run("drain", old, "--reason", "old image", "--dry-run")).document
    assert (plan["done"], backend.records()[old]["retireReason"]) == ([old], None)
    assert (await backend.run("drain", old, "--reason", "old image")).document["done"] == [old]
    assert (await backend.run("drain", old)).document["unchanged"] == [old]
    quarantined = await backend.run("quarantine", odd, "--for", "30m", "--reason", "looks odd")
    assert quarantined.document["done"] == [odd]
    assert f"{odd} was idle, quarantined: looks odd" in quarantined.stderr
    second = (await backend.provision("42", 1)).document
    assert [item["instance_id"] for item in second["instances"]] == [last]
    kept = (await backend.run("quarantine", odd, last, "--dry-run")).document
    assert kept["job_files"] == {last: str(backend.folder / "instances" / last / "work")}, "the other one is reset"

    await backend.sweep()
    states = {name: item["state"] for name, item in backend.records().items()}
    assert (states[odd], states[last]) == ("idle", "running")
    assert states[old] in {"terminating", "terminated"}

    unconfirmed = (await backend.run("terminate", "--all", code=2)).document["error"]
    assert unconfirmed["field"] == "--yes"
    ended = (await backend.run("terminate", "--all", "--yes", "--reason", "enough")).document
    assert {odd, last} == set(ended["done"])
    async with asyncio.timeout(LIMIT_S):
        while set(backend.states()) != {"terminated"}:
            await backend.sweep()
    explanation = (await backend.run("explain", odd)).document
    reasons = " ".join(line["why"] for line in explanation["events"])
    assert "quarantined: looks odd" in reasons
    assert "terminated by operator: enough" in reasons
    unknown = (await backend.run("terminate", "i-0123456789abcdef0", "--yes", code=2)).document["error"]
    assert unknown["field"] == "INSTANCE"
