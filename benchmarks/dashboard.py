"""The dashboard with 2,000 instances and 50,000 transitions: first view, and 30 updates per second.

Uses the real `remuda dashboard` on a SQLite store, a thread that writes transitions, an HTTP client, and the page in
chromium if it is installed. Counts the updates written and received, and how far the reader lags behind.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.environment import BenchmarkEnvironment, Size
from benchmarks.figures import Figure, FigureKind, Results, median, timed
from benchmarks.floor import Floor
from remuda.adapters.sqlite import tables
from remuda.adapters.sqlite.connection import transaction
from remuda.adapters.sqlite.schema import connect
from remuda.adapters.system.clock import SystemClock
from remuda.domain.instance import Instance, State
from tests.support.dashboard import (
    CHROMIUM,
    Dashboard,
    chromium,
    next_transition,
    prepare_store,
    sample_fleet,
    sample_provisions,
    write_samples,
)

PROVISIONS = 500
#: Number of lanes that a large screen shows.
VISIBLE_LANES = 50
FIRST_LIMIT_S = 1.0
PAGE_LIMIT_S = 2.0
SENT_LIMIT_KB = 1_000
RATE = 30
LIMIT_S = 120.0


@dataclass(kw_only=True)
class StreamReader:
    """State of one event stream: the last received epoch and state of each instance."""

    updates: int = 0
    received: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: Number of transitions written but not received yet, at each update.
    lags: list[int] = field(default_factory=list)


class TransitionWriter:
    """Writes 30 transitions per second at fixed times, each in its own transaction."""

    def __init__(self, file: Path, records: list[Instance]) -> None:
        self._file = file
        self._records = records
        self.written: dict[str, tuple[int, str]] = {}
        self.count = 0
        self.late_s = 0.0

    def run(self, seconds: float) -> None:
        connection = connect(self._file, busy_timeout_s=10.0)
        clock = SystemClock()
        began = clock.monotonic()
        for number in range(int(seconds * RATE)):
            pause = began + number / RATE - clock.monotonic()
            if pause > 0:
                threading.Event().wait(pause)
            self.late_s = max(self.late_s, -pause)
            index = number % len(self._records)
            record, (entry,) = next_transition(self._records[index], now=clock.now())
            with transaction(connection):
                tables.write_instance(connection, record, entry)
            self._records[index] = record
            self.written[record.instance_id] = (record.epoch, record.state.value)
            self.count += 1
        connection.close()


def events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in response.iter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)


def read_stream(url: str, tag: str, reader: StreamReader, writer: TransitionWriter, done: threading.Event) -> None:
    with (
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
        client.stream("GET", "/api/events", params={"since": tag}) as response,
    ):
        for name, data in events(response):
            if name == "change":
                reader.updates += 1
                for instance_id, item in (data["changes"].get("instances") or {}).items():
                    reader.received[instance_id] = (item["epoch"], item["state"])
                behind = sum(reader.received.get(key) != value for key, value in list(writer.written.items()))
                reader.lags.append(behind)
            if done.is_set() and all(reader.received.get(key) == value for key, value in writer.written.items()):
                return


@contextmanager
def opened_page(url: str, *, enabled: bool) -> Iterator[tuple[Any, dict[str, float]]]:
    """Open the page without cache. Yield it, and the seconds until it was ready and those of the snapshot as text."""
    if not enabled:
        yield None, {}
        return
    clock = SystemClock()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        began = clock.monotonic()
        page.goto(f"{url}/api/snapshot")
        floor_s = clock.monotonic() - began
        began = clock.monotonic()
        page.goto(url)
        page.wait_for_selector("html[data-ready] #link[data-state=live]")
        yield page, {"page_shown_s": clock.monotonic() - began, "page_floor_s": floor_s}


def missing_lanes(document: dict[str, Any]) -> int:
    """Count the lanes without history among those visible without scrolling."""
    instances = document["instances"].values()
    shown = sorted(instances, key=lambda item: (item["state"] == "terminated", -item["created_at"]))[:VISIBLE_LANES]
    return sum(item["spans"] is None for item in shown)


def first_views(dashboard: Dashboard, instances: int) -> dict[str, Any]:
    """Measure the first snapshot, the first complete one, and later ones."""
    clock = SystemClock()
    with httpx.Client(base_url=dashboard.url, timeout=LIMIT_S) as client:
        began, used_s = clock.monotonic(), dashboard.cpu_s()
        # On a busy machine, the first response may come before the first poll.
        while not (first := client.get("/api/snapshot")).json().get("instances"):
            pass
        first_s, first_cpu_s = clock.monotonic() - began, dashboard.cpu_s() - used_s
        lanes = -1
        while lanes < instances:
            document = client.get("/api/snapshot").json()
            lanes = sum(item["spans"] is not None for item in document["instances"].values())
        complete_s = clock.monotonic() - began
        again = []
        size = 0
        for _ in range(5):
            began = clock.monotonic()
            with client.stream("GET", "/api/snapshot") as response:
                size = len(b"".join(response.iter_raw()))
            again.append(clock.monotonic() - began)
    return {
        "first_answers_s": [round(first_s, 3)],
        "first_answer_cpu_s": round(first_cpu_s, 3),
        "first_answer_missing": instances - len(first.json()["instances"]) + missing_lanes(first.json()),
        "all_histories_s": round(complete_s, 3),
        "later_answers_s": again,
        "bytes_sent": size,
        "tag": document["tag"],
    }


def measure_updates(url: str, tag: str, writer: TransitionWriter, page: Any, *, seconds: float) -> dict[str, Any]:
    reader, done = StreamReader(), threading.Event()
    reading = threading.Thread(target=read_stream, args=(url, tag, reader, writer, done))
    reading.start()
    writing = threading.Thread(target=writer.run, args=(seconds,))
    writing.start()
    while writing.is_alive():
        if page:
            page.wait_for_timeout(200)
        else:
            writing.join(0.2)
    done.set()
    reading.join(LIMIT_S)
    lags = sorted(reader.lags)
    return {
        "written": writer.count,
        "updates_received": reader.updates,
        "lag_p50": lags[len(lags) // 2],
        "max_lag": lags[-1],
        "never_received": sum(reader.received.get(key) != value for key, value in writer.written.items()),
    }


def first_answer_s(folder: Path) -> float:
    """Seconds until the first snapshot of a new process."""
    clock = SystemClock()
    with Dashboard(folder) as dashboard, httpx.Client(base_url=dashboard.url, timeout=LIMIT_S) as client:
        began = clock.monotonic()
        client.get("/api/snapshot").raise_for_status()
        return clock.monotonic() - began


def measure_dashboard(size: Size, *, browser: bool) -> dict[str, Any]:
    instances, transitions, seconds = size.shown, size.shown_transitions, size.shown_s
    now = SystemClock().now()
    with tempfile.TemporaryDirectory(prefix="remuda-dashboard-") as name:
        folder = Path(name) / "state"
        file = prepare_store(folder)
        samples = list(sample_fleet(instances, transitions, now=now, ended=0.2))
        write_samples(file, samples, sample_provisions(PROVISIONS, now=now, span_s=36_000), now=now)
        moving = [record for record, _ in samples if record.state in {State.RUNNING, State.RELEASING, State.IDLE}]
        with Dashboard(folder, "--every", str(1 / RATE)) as dashboard:
            found = first_views(dashboard, instances)
            tag = found.pop("tag")
            with opened_page(dashboard.url, enabled=browser) as (page, page_times):
                used_s = dashboard.cpu_s()
                found |= measure_updates(dashboard.url, tag, TransitionWriter(file, moving), page, seconds=seconds)
                found |= {"server_cpu_share": (dashboard.cpu_s() - used_s) / seconds, **page_times}
        found["first_answers_s"] += [first_answer_s(folder) for _ in range(size.samples - 1)]
    return found


async def run(environment: BenchmarkEnvironment, _floor: Floor) -> Results:
    size = environment.size
    browser = CHROMIUM.exists() and size.shown_in_browser
    found = await asyncio.to_thread(measure_dashboard, size, browser=browser)
    return Results(figures=tuple(figures(found, size.shown, size.shown_transitions)))


def figures(found: dict[str, Any], instances: int, transitions: int) -> Iterator[Figure]:
    dashboard = f"dashboard of {instances:,} instances"
    yield timed(
        *(f"{dashboard}: first view", found["first_answers_s"]),
        limit=FIRST_LIMIT_S,
        floor=median(found["later_answers_s"]),
        note=f"with {transitions:,} recorded transitions, from a server that has just started; "
        f"{found['first_answer_cpu_s']:.2f} s of a core; all histories after {found['all_histories_s']:.1f} s; "
        "the floor is a later view of the same server",
    )
    yield Figure(
        *(f"{dashboard}: missing in the first view", "", found["first_answer_missing"]),
        limit=0,
        note=f"instances, and histories of the first {VISIBLE_LANES}",
    )
    sent_kb = round(found["bytes_sent"] / 1_000)
    yield Figure(f"{dashboard}: first view, KB sent", "KB", sent_kb, limit=SENT_LIMIT_KB)
    if "page_shown_s" in found:
        yield timed(
            *(f"{dashboard}: first page in a browser", found["page_shown_s"]),
            limit=PAGE_LIMIT_S,
            floor=found["page_floor_s"],
            note="chromium without cache, until it is drawn and its stream is open; the floor is the same data as text",
        )
    yield Figure(
        *(f"{dashboard}: updates never received", "", found["never_received"]),
        limit=0,
        note=f"of {found['written']} transitions written at {RATE} per second; {found['updates_received']} messages, "
        f"{found['lag_p50']} behind (median); the server used {found['server_cpu_share']:.2f} of a core",
    )
    # The limit is one second of updates. It depends on the machine's load, like a time.
    yield Figure(f"{dashboard}: maximum lag, updates", "", found["max_lag"], limit=RATE, kind=FigureKind.TIME)
