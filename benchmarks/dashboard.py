"""The dashboard with 2,000 instances and 50,000 transitions: its first view, and 30 updates a second.

A real `remuda dashboard` on a real store; a process that writes transitions; a real HTTP client; and the real page,
where chromium is there. Counts are of updates: written, sent, merged, and how many the readers were behind.
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

from benchmarks.figures import Figure, Kind, Results, middle
from benchmarks.floor import Floor
from benchmarks.world import Size, World
from remuda.adapters.sqlite import tables
from remuda.adapters.sqlite.connection import transaction
from remuda.adapters.sqlite.schema import connect
from remuda.adapters.system.clock import SystemClock
from remuda.domain.instance import Instance, State
from tests.support import sample_records
from tests.support.dashboard import CHROMIUM, Dashboard, chromium

PROVISIONS = 500
#: As many lanes as a large screen shows.
IN_SIGHT = 50
FIRST_MOST_S = 1.0
PAGE_MOST_S = 2.0
SENT_MOST_KB = 1_000
RATE = 30
LIMIT_S = 120.0


@dataclass(kw_only=True)
class Follower:
    """One stream: which instance's epoch and state it has heard of, and when."""

    updates: int = 0
    merged: int = 0
    heard: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: How many transitions were written and not heard of, each time that an update came.
    lags: list[int] = field(default_factory=list)


class Writer:
    """Thirty transitions a second, one transaction each, at their times and not after one another."""

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
            place = number % len(self._records)
            record, (entry,) = sample_records.next_transition(self._records[place], now=clock.now())
            with transaction(connection):
                tables.write_instance(connection, record, entry)
            self._records[place] = record
            self.written[record.instance_id] = (record.epoch, record.state.value)
            self.count += 1
        connection.close()


def events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in response.iter_lines():
        what, _, value = line.partition(": ")
        if what == "event":
            name = value
        elif what == "data":
            yield name, json.loads(value)


def follow(url: str, tag: str, follower: Follower, writer: Writer, done: threading.Event) -> None:
    with (
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
        client.stream("GET", "/api/events", params={"since": tag}) as response,
    ):
        for name, data in events(response):
            if name == "change":
                follower.updates += 1
                follower.merged += data["board"]["version"] - data["since"] - 1
                for instance_id, item in (data["board"].get("instances") or {}).items():
                    follower.heard[instance_id] = (item["epoch"], item["state"])
                behind = sum(follower.heard.get(key) != value for key, value in list(writer.written.items()))
                follower.lags.append(behind)
            if done.is_set() and all(follower.heard.get(key) == value for key, value in writer.written.items()):
                return


@contextmanager
def pages(url: str, *, wanted: bool) -> Iterator[tuple[Any, float]]:
    """A page that nobody has opened before, and how long it took until it was there to be read."""
    if not wanted:
        yield None, 0.0
        return
    clock = SystemClock()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        began = clock.monotonic()
        page.goto(url)
        page.wait_for_selector("html[data-ready] #link[data-state=live]")
        yield page, clock.monotonic() - began


def lacking(document: dict[str, Any]) -> int:
    """Of the lanes that the page shows before anybody scrolls, those that are not there to be drawn."""
    machines = document["instances"].values()
    shown = sorted(machines, key=lambda item: (item["state"] == "terminated", -item["born"]))[:IN_SIGHT]
    return sum(item["lane"] is None for item in shown)


def first_views(dashboard: Dashboard, instances: int) -> dict[str, Any]:
    """The snapshot and the page's files, as a browser asks for them."""
    clock = SystemClock()
    with httpx.Client(base_url=dashboard.url, timeout=LIMIT_S) as client:
        began, used_s = clock.monotonic(), dashboard.cpu_s()
        # On a busy computer an answer may come before the server has looked: then it shows nothing.
        while not (first := client.get("/api/snapshot")).json().get("instances"):
            pass
        first_s, first_cpu_s = clock.monotonic() - began, dashboard.cpu_s() - used_s
        lanes = -1
        while lanes < instances:
            document = client.get("/api/snapshot").json()
            lanes = sum(item["lane"] is not None for item in document["instances"].values())
        complete_s, complete_cpu_s = clock.monotonic() - began, dashboard.cpu_s() - used_s
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
        "first_answer_missing": instances - len(first.json()["instances"]) + lacking(first.json()),
        "all_histories_s": round(complete_s, 3),
        "all_histories_cpu_s": round(complete_cpu_s, 3),
        "later_answer_s": round(sorted(again)[2], 3),
        "bytes_sent": size,
        "bytes_unpacked": len(json.dumps(document, separators=(",", ":"))),
        "tag": document["tag"],
    }


def stats(page: Any) -> dict[str, int]:
    words = page.inner_text("#stats").replace(".", "").replace(",", "").split()
    return {name: int(words[words.index(name) - back]) for name, back in (("received", 2), ("merged", 1), ("drawn", 2))}


def held(url: str, tag: str, writer: Writer, page: Any, *, seconds: float) -> dict[str, Any]:
    follower, done = Follower(), threading.Event()
    reading = threading.Thread(target=follow, args=(url, tag, follower, writer, done))
    reading.start()
    before = stats(page) if page else {}
    clock = SystemClock()
    began = clock.monotonic()
    writing = threading.Thread(target=writer.run, args=(seconds,))
    writing.start()
    while writing.is_alive():
        if page:
            page.wait_for_timeout(200)
        else:
            writing.join(0.2)
    wrote_s = clock.monotonic() - began
    done.set()
    reading.join(LIMIT_S)
    caught_up_s = clock.monotonic() - began - wrote_s
    lags = sorted(follower.lags)
    found = {
        "written": writer.count,
        "written_a_second": round(writer.count / wrote_s, 1),
        "updates_received": follower.updates,
        "updates_a_second": round(follower.updates / wrote_s, 1),
        "updates_merged": follower.merged,
        "lag_p50": lags[len(lags) // 2],
        "lag_most": lags[-1],
        "left_behind": sum(follower.heard.get(key) != value for key, value in writer.written.items()),
        "caught_up_s": round(caught_up_s, 3),
    }
    if page:
        page.wait_for_timeout(500)
        after = stats(page)
        found |= {f"page_{name}": after[name] - before[name] for name in after}
    return found


def first_answer_s(folder: Path) -> float:
    """Of another process that has just started."""
    clock = SystemClock()
    with Dashboard(folder) as dashboard, httpx.Client(base_url=dashboard.url, timeout=LIMIT_S) as client:
        began = clock.monotonic()
        client.get("/api/snapshot").raise_for_status()
        return clock.monotonic() - began


def measured(size: Size, *, browser: bool) -> dict[str, Any]:
    instances, transitions, seconds = size.shown, size.shown_transitions, size.shown_s
    now = SystemClock().now()
    with tempfile.TemporaryDirectory(prefix="remuda-dashboard-") as name:
        folder = Path(name) / "state"
        file = sample_records.prepare(folder)
        samples = list(sample_records.fleet(instances, transitions, now=now, ended=0.2))
        sample_records.write(file, samples, sample_records.provisions(PROVISIONS, now=now, span_s=36_000), now=now)
        moving = [record for record, _ in samples if record.state in {State.RUNNING, State.RELEASING, State.IDLE}]
        with Dashboard(folder, "--every", str(1 / RATE)) as dashboard:
            found = first_views(dashboard, instances)
            tag = found.pop("tag")
            with pages(dashboard.url, wanted=browser) as (page, shown_s):
                used_s = dashboard.cpu_s()
                found |= held(dashboard.url, tag, Writer(file, moving), page, seconds=seconds)
                found["server_cpu_share"] = round((dashboard.cpu_s() - used_s) / seconds, 2)
                if page:
                    found["page_shown_s"] = round(shown_s, 3)
        found["first_answers_s"] += [first_answer_s(folder) for _ in range(size.samples - 1)]
    return found


async def run(world: World, _floor: Floor) -> Results:
    size = world.size
    browser = CHROMIUM.exists() and size.shown_in_browser
    found = await asyncio.to_thread(measured, size, browser=browser)
    return Results(figures=tuple(figures(found, size.shown, size.shown_transitions)))


def figures(found: dict[str, Any], instances: int, transitions: int) -> Iterator[Figure]:
    def figure(name: str, unit: str, most: float, ours: float, kind: Kind, **more: Any) -> Figure:
        told = f"dashboard of {instances:,} machines: {name}"
        return Figure(name=told, unit=unit, before="—", most=most, ours=ours, kind=kind, **more)

    yield figure(
        *("first view", "s", FIRST_MOST_S, middle(found["first_answers_s"]), Kind.TIME),
        samples=len(found["first_answers_s"]),
        note=f"with {transitions:,} transitions on record, from a server that has just started; "
        f"{found['first_answer_cpu_s']:.2f} s of a core; every lane after {found['all_histories_s']:.1f} s",
    )
    yield figure(
        *("missing in the first view", "", 0, found["first_answer_missing"], Kind.COUNT),
        note=f"machines, and lanes of the first {IN_SIGHT}",
    )
    yield figure("first view, KB sent", "KB", SENT_MOST_KB, round(found["bytes_sent"] / 1_000), Kind.COUNT)
    if "page_shown_s" in found:
        yield figure(
            *("first page in a browser", "s", PAGE_MOST_S, found["page_shown_s"], Kind.TIME),
            note="chromium, nothing cached, until it is drawn and its stream is open",
        )
    yield figure(
        *("updates never heard of", "", 0, found["left_behind"], Kind.COUNT),
        note=f"of {found['written']} transitions written at {RATE} a second; {found['updates_received']} messages, "
        f"{found['lag_p50']} behind on the median; the server used {found['server_cpu_share']:.2f} of a core",
    )
    # A second's worth. It hangs on what else the computer does, as times do.
    yield figure("behind at the most, updates", "", RATE, found["lag_most"], Kind.TIME)
