"""The read side at the installed command: status, its watch, explain, on a pool at work and on one that has ended."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.local_backend import LIMIT_S, LONG_LIFETIMES, LocalBackend


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    backend = LocalBackend(tmp_path / "state")
    yield backend
    await backend.down()


async def told(backend: LocalBackend, *arguments: str) -> str:
    """What a person reads on stdout."""
    process = await backend.start(*arguments)
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert b"Traceback" not in err
    return out.decode()


async def test_a_pool_is_seen_and_explained(backend: LocalBackend) -> None:
    await backend.up(*LONG_LIFETIMES, "--margin-sec", "10", sweeper=True)
    first = (await backend.provision("41", 2, "--log-format", "json")).document
    await backend.release("41")
    log = backend.folder / "instances" / first["instances"][0]["instance_id"] / "logs" / "agent.log"
    told_by_agent = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["instance_id"] for line in told_by_agent} == {first["instances"][0]["instance_id"]}
    released = next(line for line in told_by_agent if line["reason"] == "record state is releasing")
    assert (released["event"], released["run_id"], released["epoch"]) == ("state", "41", 1)
    logged = await backend.provision("42", 1, "--log-format", "json")
    events = {line["event"]: line for line in map(json.loads, logged.stderr.splitlines())}
    assert (events["claim-won"]["run_id"], events["claim-won"]["epoch"]) == ("42", 2)
    assert events["commit"]["reason"] == "the one of run 42 is registered"
    second = logged.document
    (reused,) = [item["instance_id"] for item in second["instances"]]
    assert reused in {item["instance_id"] for item in first["instances"]}

    text = await told(backend, "status")
    for column in ("instance", "state", "run", "time left", "beat", "type", "usage", "uses"):
        assert column in text
    assert re.search(rf"{reused} +running +42 ", text)
    status = (await backend.run("status")).document
    assert status["warnings"] == []
    assert status["open_provisions"] == []
    assert {item["state"] for item in status["instances"]} == {"running", "idle"}
    assert all(item["heartbeat_age_seconds"] < 60 and item["seconds_left"] > 0 for item in status["instances"])
    assert status["runs"][0]["course"]["reused"] == 1

    story = (await backend.run("explain", "42")).document
    whats = [line["what"] for line in story["lines"] if line["instance_id"] in {reused, ""}]
    assert whats == [
        "attempt 1 asks for 1 large runner",
        "claimed from the pool",
        "registered",
        "running, takes jobs",
        whats[-1],
    ]
    assert whats[-1].startswith("complete after ")
    text = await told(backend, "explain", "42")
    assert text.splitlines()[0] == "Run 42: committed (all instances are running)"
    assert "\x1b" not in text

    story = (await backend.run("explain", f"remuda-default-2-{reused}")).document
    assert (story["kind"], story["subject"]) == ("instance", reused)
    assert ("boots", "launched for run 41 (provision)") in [(line["what"], line["why"]) for line in story["lines"]]

    report = (await backend.run("report", "--since", "1h")).document
    assert (report["reuse"]["reused"], report["reuse"]["created"]) == (1, 2)
    assert report["provision_seconds"]["warm"]["count"] == report["provision_seconds"]["cold"]["count"] == 1
    assert set(report["cost"]["by_run"]) == {"41", "42", ""}
    assert report["cost"]["total"] > 0
    assert re.search(r"reused +33% of 3 runners", await told(backend, "report"))
    page = backend.folder.parent / "page.html"
    assert (await backend.run("report", "--html", str(page))).document["page"] == str(page)
    assert page.read_text().startswith("<!doctype html>")
    prices = backend.folder.parent / "prices.json"
    prices.write_text(json.dumps({"currency": "EUR", "on-demand": {"c6i.large": 100}}))
    dear = (await backend.run("report", "--prices", str(prices))).document["cost"]
    assert (dear["currency"], dear["total"] > 100 * report["cost"]["total"]) == ("EUR", True)

    refused = (await backend.run("explain", "43", code=2)).document["error"]
    assert "42" in refused["fix"]
    refused = (await backend.run("explain", "i-0123456789abcdef0", code=2)).document["error"]
    assert reused in refused["fix"]


async def test_a_watch_tells_what_changes_and_ends_when_asked(backend: LocalBackend) -> None:
    await backend.up(*LONG_LIFETIMES)
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
            assert seen, "the watch ended by itself"
        while not (found := json.loads(await documents.stdout.readline())["instances"]):
            pass
        assert found[0]["run_id"] == "41"
        for process in (lines, documents):
            process.terminate()
            # Until the end of what it wrote: then it is over.
            await process.communicate()
            assert process.returncode == 130


async def test_what_a_dead_machine_leaves_is_warned_of(backend: LocalBackend) -> None:
    await backend.up(*LONG_LIFETIMES, "--idle-time-sec", "2", "--margin-sec", "1")
    (machine,) = (await backend.provision("41")).document["instances"]
    await backend.release("41")
    await backend.until(lambda: not backend.machines(), "the idle machine to end itself")
    found: set[tuple[str, str]] = set()
    async with asyncio.timeout(LIMIT_S):
        while ("expired", machine["instance_id"]) not in found:
            warnings = (await backend.run("status")).document["warnings"]
            found = {(item["kind"], item["subject"]) for item in warnings}
    assert "expired" in await told(backend, "status")
    story = (await backend.run("explain", machine["instance_id"])).document
    assert "the next refresh retires it" in story["next"][0]


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
async def test_a_report_refuses_bad_input_before_it_looks(
    tmp_path: Path, arguments: tuple[str, ...], field: str
) -> None:
    backend = LocalBackend(tmp_path / "never-up")
    error = (await backend.run("report", *arguments, code=2)).document["error"]
    assert error["field"] == field


async def test_every_needs_watch(backend: LocalBackend) -> None:
    await backend.run("up")
    error = (await backend.run("status", "--every", "1", code=2)).document["error"]
    assert error["field"] == "--every"


async def test_an_operator_takes_machines_out_of_use(backend: LocalBackend) -> None:
    await backend.up(*LONG_LIFETIMES)
    first = (await backend.provision("41", 3)).document
    odd, old, last = sorted(item["instance_id"] for item in first["instances"])
    await backend.release("41")

    plan = (await backend.run("drain", old, "--reason", "old image", "--dry-run")).document
    assert (plan["done"], backend.records()[old]["retire"]) == ([old], "")
    assert (await backend.run("drain", old, "--reason", "old image")).document["done"] == [old]
    assert (await backend.run("drain", old)).document["unchanged"] == [old]
    assert (await backend.run("quarantine", odd, "--for", "30m", "--reason", "looks odd")).document["done"] == [odd]
    second = (await backend.provision("42", 1)).document
    assert [item["instance_id"] for item in second["instances"]] == [last]

    await backend.sweep()
    states = {name: item["state"] for name, item in backend.records().items()}
    assert (states[odd], states[last]) == ("idle", "running")
    assert states[old] in {"terminating", "terminated"}

    unsure = (await backend.run("terminate", "--all", code=2)).document["error"]
    assert unsure["field"] == "--yes"
    ended = (await backend.run("terminate", "--all", "--yes", "--reason", "enough")).document
    assert {odd, last} == set(ended["done"])
    async with asyncio.timeout(LIMIT_S):
        while set(backend.states()) != {"terminated"}:
            await backend.sweep()
    story = (await backend.run("explain", odd)).document
    whys = " ".join(line["why"] for line in story["lines"])
    assert "quarantined: looks odd" in whys
    assert "terminated by an operator: enough" in whys
    unknown = (await backend.run("terminate", "i-0123456789abcdef0", "--yes", code=2)).document["error"]
    assert unknown["field"] == "INSTANCE"
