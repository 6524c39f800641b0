"""The dashboard's server as a process: what it answers, to whom, and how it ends."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from remuda.domain.instance import State
from tests.support.dashboard import LIMIT_S, Dashboard, Records, environment, living, remuda
from tests.support.sample_records import Life, with_store

TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return Records(tmp_path_factory.mktemp("records") / "state")


@pytest.fixture(scope="module")
def lives(records: Records) -> list[Life]:
    return records.fleet(30, 400)


@pytest.fixture(scope="module")
def dashboard(records: Records, lives: list[Life]) -> Iterator[Dashboard]:
    with Dashboard(records.folder) as started:
        yield started


@pytest.fixture
def client(dashboard: Dashboard) -> Iterator[httpx.Client]:
    # Commands run between two questions: a connection that was kept would be closed by the server meanwhile.
    unkept = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=dashboard.url, timeout=LIMIT_S, limits=unkept) as opened:
        yield opened


def events(response: httpx.Response) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, id and data of each; what is only a sign of life is left out."""
    name = tag = ""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name, tag = value, ""
        elif field == "id":
            tag = value
        elif field == "data" and name != "look":
            yield name, tag, json.loads(value)


def snapshot(client: httpx.Client, wanted: int = 0) -> dict[str, Any]:
    """When so many lanes are there to be seen."""
    while True:
        document: dict[str, Any] = client.get("/api/snapshot").raise_for_status().json()
        if sum(item["lane"] is not None for item in document["instances"].values()) >= wanted:
            return document


def scraped(client: httpx.Client) -> dict[tuple[str, str], float]:
    """Of each metric, by the value of one label that tells."""
    answer = client.get("/metrics").raise_for_status()
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: dict[tuple[str, str], float] = defaultdict(float)
    for family in parse_text(answer.text):
        for sample in family.samples:
            label = sample.labels.get("transition") or sample.labels.get("state") or ""
            found[sample.name, label] += sample.value
    return found


def test_metrics_say_what_status_says_and_count_what_happens(
    client: httpx.Client, records: Records, lives: list[Life]
) -> None:
    found = scraped(client)
    states = Counter(item["state"] for item in remuda(records.folder, "status")["instances"])
    assert {name: found["remuda_instances", name] for name in states} == states
    assert found["remuda_api_calls_total", ""] > 0
    claims = ("remuda_transitions_total", "claim")
    assert found[claims] == 0, "what is on record from before does not count"
    # One with little history: other tests look at the longest.
    idle, _ = min((life for life in lives if life[0].state is State.IDLE), key=lambda life: len(life[1]))
    assert records.move(idle.instance_id).state is State.CLAIMED
    while not (found := scraped(client))[claims]:
        pass
    assert found[claims] == 1
    again = scraped(client)
    assert all(again[key] >= value for key, value in found.items() if key[0].endswith("_total"))


def test_what_is_shown_is_what_the_commands_say(client: httpx.Client, records: Records, lives: list[Life]) -> None:
    document = snapshot(client, len(lives))
    assert set(document["instances"]) == {record.instance_id for record, _ in lives}
    status = remuda(records.folder, "status")
    states = {item["instance_id"]: item["state"] for item in status["instances"]}
    assert {name: document["instances"][name]["state"] for name in states} == states
    record, entries = max(lives, key=lambda life: len(life[1]))
    shown = document["instances"][record.instance_id]
    assert len(shown["lane"]) // 3 == len([entry for entry in entries if entry.target != "terminated"])
    assert set(shown["runs"]) == {entry.run_id for entry in entries}
    assert "credential" not in json.dumps(document)
    story = client.get("/api/story", params={"of": record.instance_id}).json()
    assert story["lines"] == remuda(records.folder, "explain", record.instance_id)["lines"]
    for subject, code in (("i-00000000000000000", 404), ("", 404), ("<b>", 404), ("9999", 404)):
        answer = client.get("/api/story", params={"of": subject})
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (code, True)


def test_a_snapshot_is_not_sent_twice(client: httpx.Client, lives: list[Life]) -> None:
    first = client.get("/api/snapshot")
    while True:
        tag = first.headers["etag"]
        again = client.get("/api/snapshot", headers={"if-none-match": tag})
        if again.status_code == 304:
            break
        first = again
    assert again.content == b""
    assert first.headers["content-encoding"] == "gzip"
    plain = client.get("/api/snapshot", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers


def test_changes_come_by_themselves_and_a_stream_is_resumed(
    client: httpx.Client, records: Records, lives: list[Life]
) -> None:
    tag = snapshot(client, len(lives))["tag"]
    one, other = living(lives)[:2]
    with client.stream("GET", "/api/events", params={"since": tag}) as response:
        told = events(response)
        moved = records.move(one.instance_id)
        while True:
            name, tag, data = next(told)
            assert name == "change"
            if (data["board"].get("instances") or {}).get(one.instance_id, {}).get("state") == moved.state.value:
                break
    moved = records.move(other.instance_id)
    seen: set[str] = set()
    with client.stream("GET", "/api/events", headers={"last-event-id": tag}) as response:
        for number, (name, _, data) in enumerate(events(response)):
            assert (name, data["since"]) == ("change", int(tag.rpartition("-")[2])) or number
            seen |= set(data["board"].get("instances") or {})
            if other.instance_id in seen:
                break
    # Only what has changed, not everything again; the last change's history may be read once more.
    assert seen <= {one.instance_id, other.instance_id}
    for unknown in ("", "of-another-life-3", "nonsense"):
        with client.stream("GET", "/api/events", headers={"last-event-id": unknown}) as response:
            assert next(events(response))[0] == "reset"


def test_a_record_that_cannot_be_read_hides_no_others(tmp_path: Path) -> None:
    records = Records(tmp_path / "state")
    (bad_history, _), (bad_record, _), *others = records.fleet(6, 60)

    def spoil(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE history SET doc = '{' WHERE instance_id = ?", (bad_history.instance_id,))
        connection.execute(
            "UPDATE instances SET doc = '{}', state = 'idle' WHERE instance_id = ?", (bad_record.instance_id,)
        )

    with_store(records.file, spoil)
    with Dashboard(records.folder) as dashboard, httpx.Client(base_url=dashboard.url, timeout=LIMIT_S) as client:
        document = snapshot(client, 5)
    assert set(document["instances"]) == {bad_history.instance_id, *(record.instance_id for record, _ in others)}
    assert document["instances"][bad_history.instance_id]["state"] == bad_history.state.value
    assert [item["kind"] for item in document["facts"]["warnings"]["shown"]] == ["unreadable"]
    assert bad_record.instance_id in document["facts"]["warnings"]["shown"][0]["text"]


def test_only_reading_by_this_machines_name_is_answered(client: httpx.Client, dashboard: Dashboard) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert "server" not in page.headers
    for path in ("/", "/api/snapshot", "/style.css", "/nothing"):
        assert client.get(path, headers={"host": f"evil.example:{dashboard.port}"}).status_code == 421
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/snapshot").status_code == 405
    assert client.get("/../pyproject.toml").status_code == 404
    refused = client.get("/nothing")
    assert (refused.status_code, refused.headers["content-security-policy"]) == (404, policy)
    for path in ("/api/snapshot", "/api/story?of=1", "/metrics"):
        assert client.get(path, headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert client.get(path, headers={"sec-fetch-site": "same-origin"}).status_code != 403
    assert page.headers["cache-control"] == "private, no-cache"
    etag = page.headers["etag"]
    assert client.get("/", headers={"if-none-match": etag}).status_code == 304


def test_with_a_token_nothing_is_shown_without_it(records: Records, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    with (
        Dashboard(records.folder, "--token-file", str(file), "--host", "0.0.0.0") as dashboard,  # noqa: S104 - with one
        httpx.Client(base_url=f"http://127.0.0.1:{dashboard.port}", timeout=LIMIT_S) as client,
    ):
        for path in ("/api/snapshot", "/api/events", "/api/story?of=1", "/app.js", "/nothing"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/").headers["location"] == "/login"
        assert client.get("/login").status_code == client.get("/style.css").status_code == 200
        assert client.get("/api/snapshot", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        for body in (b"", b"token=wrong", b"token=" + b"x" * 100_000, b"\xff\xfe"):
            answer = client.post("/login", content=body)
            assert (answer.headers["location"], "set-cookie" in answer.headers) == ("/login?refused=1", False)
        answer = client.post("/login", data={"token": TOKEN})
        assert "HttpOnly" in answer.headers["set-cookie"]
        assert "SameSite=strict" in answer.headers["set-cookie"]
        assert TOKEN not in str(answer.headers)
        assert client.get("/api/snapshot").status_code == 200
        # By whatever name it is reached: the token is what counts.
        assert client.get("/api/snapshot", headers={"host": "ci.example"}).status_code == 200
        code, told = dashboard.interrupt()
    assert (code, TOKEN in told) == (130, False)


def test_behind_a_proxy_a_token_is_what_counts(records: Records) -> None:
    with (
        Dashboard(records.folder, REMUDA_DASHBOARD_TOKEN=TOKEN) as dashboard,
        httpx.Client(base_url=dashboard.url, timeout=LIMIT_S, headers={"host": "ci.example"}) as client,
    ):
        assert client.get("/api/snapshot").status_code == 401
        assert client.get("/api/snapshot", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        for scheme, secure in (("https", True), ("https, http", True), ("http", False)):
            answer = client.post("/login", data={"token": TOKEN}, headers={"x-forwarded-proto": scheme})
            assert ("Secure" in answer.headers["set-cookie"]) == secure


def test_it_ends_at_once_with_streams_open(records: Records) -> None:
    with Dashboard(records.folder) as dashboard, httpx.Client(base_url=dashboard.url, timeout=LIMIT_S) as client:
        with client.stream("GET", "/api/events") as response:
            stream = events(response)
            assert next(stream)[0] == "reset"
            code, told = dashboard.interrupt()
            # The stream is ended, not cut.
            assert [name for name, _, _ in stream if name != "change"] == []
        assert (code, "Traceback" in told) == (130, False)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--host", "0.0.0.0"), "--host"),  # noqa: S104 - what is refused
        (("--since", "soon"), "--since"),
        ((), "--dir"),
    ],
)
def test_bad_input_is_refused_before_anything_is_opened(tmp_path: Path, arguments: tuple[str, ...], field: str) -> None:
    command = [str(Path(sys.executable).parent / "remuda"), "dashboard", "--dir", str(tmp_path / "none"), "--json"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, timeout=LIMIT_S, env=environment()
    )
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["error"]["field"] == field


def test_a_port_that_is_taken_is_said_so(records: Records, dashboard: Dashboard) -> None:
    command = [str(Path(sys.executable).parent / "remuda"), "dashboard", "--dir", str(records.folder), "--json"]
    done = subprocess.run(
        [*command, "--port", str(dashboard.port)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env=environment(),
    )
    assert (done.returncode, json.loads(done.stdout)["error"]["fix"]) == (2, "--port 0 takes a free one")
