"""EC2 and GitHub servers on loopback with a scripted fleet and faults, for scale-down.

They implement the calls of scale-down and count them. The script sets launch times and instance ids, which no existing
EC2 test server allows.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

from remuda.domain.scale_down.fleet import GHR_ORPHAN_TAG
from tests.support.user_data import serve

TOKEN = "github_pat_scale_down"
PER_PAGE = 100
EC2_PAGE = 100
HANG_S = 600.0
_RUNNERS = re.compile(r"/(?:orgs/(?P<org>[^/]+)|repos/(?P<repo>[^/]+/[^/]+))/actions/runners(?:/(?P<id>\d+))?")


@dataclass
class FleetInstance:
    instance_id: str
    launched_at: datetime | None
    state: str
    tags: dict[str, str]
    platform: str = ""


@dataclass
class FleetRunner:
    runner_id: int
    name: str
    owner: str
    status: str = "online"
    busy: bool = False
    list_view: dict[str, Any] = field(default_factory=dict)
    get_view: dict[str, Any] = field(default_factory=dict)
    hidden_from_get: bool = False
    hidden_from_list: bool = False

    def document(self, view: Mapping[str, Any]) -> dict[str, Any]:
        shown = {"status": self.status, "busy": self.busy, **view}
        return {"id": self.runner_id, "name": self.name, "os": "linux", "labels": [], **shown}


@dataclass
class CycleEffects:
    """The changes and calls of one scale-down cycle."""

    terminated: list[str] = field(default_factory=list)
    tagged: list[str] = field(default_factory=list)
    untagged: list[str] = field(default_factory=list)
    deregistered: list[int] = field(default_factory=list)
    #: Terminated although a lookup of one of its runners returned busy and online.
    killed_busy: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)

    def github_calls(self) -> int:
        return sum(count for name, count in self.calls.items() if name.startswith("github "))


class FleetState:
    def __init__(self) -> None:
        self.machines: dict[str, FleetInstance] = {}
        self.runners: dict[int, FleetRunner] = {}
        #: Owners that the credential has access to.
        self.owners: set[str] = set()
        self.github_faults: list[dict[str, Any]] = []
        self.ec2_faults: list[dict[str, Any]] = []
        self.effects = CycleEffects()
        #: Instances per page of DescribeInstances.
        self.ec2_page = EC2_PAGE
        self.lock = threading.RLock()
        self.closing = threading.Event()
        #: Called in a server thread when a call starts to hang.
        self.on_hang: Callable[[], object] = lambda: None
        self._seen: Counter[int] = Counter()

    @classmethod
    def from_scenario(cls, scenario: Mapping[str, Any]) -> FleetState:
        fleet = cls()
        now = datetime.fromisoformat(scenario["config"]["now"])
        for item in scenario["instances"]:
            offset = item["launch_offset_seconds"]
            launched_at = None if offset is None else now + timedelta(seconds=offset)
            fleet.add_machine(FleetInstance(item["id"], launched_at, item["state"], dict(item["tags"])))
        for owner in scenario["github"]["owners"]:
            if owner["app_installed"]:
                fleet.owners.add(owner["owner"])
        for item in scenario["github"]["runners"]:
            fleet.add_runner(item)
        return fleet

    def add_machine(self, machine: FleetInstance) -> None:
        self.machines[machine.instance_id] = machine

    def add_runner(self, item: Mapping[str, Any]) -> None:
        named = {key: value for key, value in item.items() if key != "id"}
        self.runners[item["id"]] = FleetRunner(runner_id=item["id"], **named)

    def begin_cycle(self, *, changes: Mapping[str, Any] | None = None, faults: Mapping[str, Any] | None = None) -> None:
        """Apply the changes and faults of a new cycle and reset the effects."""
        for item in (changes or {}).get("github_add", ()):
            self.add_runner(item)
        for item in (changes or {}).get("instances_update", ()):
            self.machines[item["id"]].tags.update(item.get("tags_add", {}))
        self.github_faults = [dict(fault) for fault in (faults or {}).get("github", ())]
        self.ec2_faults = [dict(fault) for fault in (faults or {}).get("ec2", ())]
        self._seen.clear()
        self.effects = CycleEffects()

    def fault(self, faults: list[dict[str, Any]], **call: Any) -> dict[str, Any] | None:
        """The first fault that matches this call. `nth` and `times` count the matching calls."""
        for fault in faults:
            keys = {"op", "owner", "runner_id", "page", "scope", "action" if "code" in fault else ""} & set(fault)
            if any(fault[key] != call.get(key) for key in keys):
                continue
            if "instance_id" in fault and fault["instance_id"] not in call.get("instance_ids", ()):
                continue
            self._seen[id(fault)] += 1
            number = self._seen[id(fault)]
            if number > fault.get("times", number) or number != fault.get("nth", number):
                continue
            return fault
        return None

    # EC2

    def describe(self, filters: Mapping[str, list[str]]) -> list[FleetInstance]:
        def fits(machine: FleetInstance) -> bool:
            for name, values in filters.items():
                own = {"instance-state-name": machine.state, "instance-id": machine.instance_id}
                if own.get(name, machine.tags.get(name.removeprefix("tag:"))) not in values:
                    return False
            return True

        return [machine for machine in self.machines.values() if fits(machine)]

    def terminate(self, names: list[str]) -> None:
        for name in names:
            self.machines[name].state = "terminated"
            self.effects.terminated.append(name)
            for runner in self.runners.values():
                seen = runner.document(runner.get_view)
                if runner.name.endswith(name) and seen["busy"] and seen["status"] == "online":
                    self.effects.killed_busy.append(name)

    def tag(self, names: list[str], tags: Mapping[str, str]) -> None:
        for name in names:
            self.machines[name].tags.update(tags)
            self.effects.tagged += [name] if GHR_ORPHAN_TAG in tags else []

    def untag(self, names: list[str], keys: list[str]) -> None:
        for name in names:
            for key in keys:
                self.machines[name].tags.pop(key, None)
            self.effects.untagged += [name] if GHR_ORPHAN_TAG in keys else []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    #: One packet per response: otherwise each waits for an acknowledgement.
    wbufsize = 1 << 16
    fleet: ClassVar[FleetState]

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class _Github(_Handler):
    def do_GET(self) -> None:
        self._serve("GET")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        found = _RUNNERS.fullmatch(parts.path)
        owner = (found["org"] or found["repo"]) if found else ""
        runner_id = int(found["id"]) if found and found["id"] else None
        page = int(query.get("page", "1"))
        op = "list_runners" if runner_id is None else {"GET": "get_runner", "DELETE": "delete_runner"}[method]
        with self.fleet.lock:
            self.fleet.effects.calls[f"github {op}"] += 1
            fault = self.fleet.fault(self.fleet.github_faults, op=op, owner=owner, runner_id=runner_id, page=page)
        if fault is not None and self._inject(fault):
            return
        with self.fleet.lock:
            status, document, headers = self._answer(op, owner, runner_id, page)
        body = b"" if document is None else json.dumps(document).encode()
        self.answer(status, body, "application/json", headers)

    def _inject(self, fault: Mapping[str, Any]) -> bool:
        if fault["action"] == "hang":
            self.fleet.on_hang()
            self.fleet.closing.wait(HANG_S)
            self.close_connection = True
            return True
        if fault["action"] == "reset":
            self.close_connection = True
            self.connection.close()
            return True
        body = json.dumps({"message": fault.get("message", "injected")}).encode()
        self.answer(fault["status"], body, "application/json", fault.get("headers"))
        return True

    def _answer(self, op: str, owner: str, runner_id: int | None, page: int) -> tuple[int, Any, dict[str, str]]:
        fleet = self.fleet
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"message": "Bad credentials"}, {}
        if owner not in fleet.owners:
            return 404, {"message": "Not Found"}, {}
        if op == "list_runners":
            mine = [item for item in fleet.runners.values() if item.owner == owner and not item.hidden_from_list]
            shown = [item.document(item.list_view) for item in mine[(page - 1) * PER_PAGE : page * PER_PAGE]]
            more = {"Link": '<http://x/?page=2>; rel="next"'} if page * PER_PAGE < len(mine) else {}
            return 200, {"total_count": len(mine), "runners": shown}, more
        runner = fleet.runners.get(runner_id or 0)
        if runner is None or runner.owner != owner:
            return 404, {"message": "Not Found"}, {}
        if op == "get_runner":
            if runner.hidden_from_get:
                return 404, {"message": "Not Found"}, {}
            return 200, runner.document(runner.get_view), {}
        if runner.document(runner.get_view)["busy"]:
            return 422, {"message": "Bad request - FleetRunner is still running a job"}, {}
        del fleet.runners[runner.runner_id]
        fleet.effects.deregistered.append(runner.runner_id)
        return 204, None, {}


class _Ec2(_Handler):
    def do_POST(self) -> None:
        form = dict(parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode(), keep_blank_values=True))
        action = form["Action"]
        names = _listed(form, "InstanceId") or _listed(form, "ResourceId")
        filters = {form[f"Filter.{n}.Name"]: _listed(form, f"Filter.{n}.Value") for n in _numbers(form, "Filter")}
        scope = "orphans" if f"tag:{GHR_ORPHAN_TAG}" in filters else "all"
        with self.fleet.lock:
            self.fleet.effects.calls[f"ec2 {action}"] += 1
            fault = self.fleet.fault(self.fleet.ec2_faults, action=action, scope=scope, instance_ids=names)
            if fault is not None:
                self._fail(fault)
                return
            body = getattr(self, f"_{action}")(form, names, filters)
        text = f"<{action}Response><requestId>r</requestId>{body}</{action}Response>"
        self.answer(200, text.encode(), "text/xml")

    def _fail(self, fault: Mapping[str, Any]) -> None:
        error = f"<Error><Code>{fault['code']}</Code><Message>injected</Message></Error>"
        body = f"<Response><Errors>{error}</Errors><RequestID>r</RequestID></Response>"
        self.answer(fault["http_status"], body.encode(), "text/xml")

    def _DescribeInstances(self, form: dict[str, str], _: list[str], filters: dict[str, list[str]]) -> str:  # noqa: N802
        start = int(form.get("NextToken") or 0)
        found = self.fleet.describe(filters)
        page = self.fleet.ec2_page
        more = f"<nextToken>{start + page}</nextToken>" if start + page < len(found) else ""
        shown = "".join(f"<item><instancesSet>{_xml(item)}</instancesSet></item>" for item in found[start:][:page])
        return f"<reservationSet>{shown}</reservationSet>{more}"

    def _DescribeTags(self, _: dict[str, str], __: list[str], filters: dict[str, list[str]]) -> str:  # noqa: N802
        found = self.fleet.describe({"instance-id": filters["resource-id"]})
        shown = "".join(
            f"<item><resourceId>{machine.instance_id}</resourceId><resourceType>instance</resourceType>"
            f"<key>{escape(key)}</key><value>{escape(machine.tags[key])}</value></item>"
            for machine in found
            for key in filters["key"]
            if key in machine.tags
        )
        return f"<tagSet>{shown}</tagSet>"

    def _TerminateInstances(self, _: dict[str, str], names: list[str], __: Any) -> str:  # noqa: N802
        self.fleet.terminate(names)
        return "<instancesSet/>"

    def _CreateTags(self, form: dict[str, str], names: list[str], _: Any) -> str:  # noqa: N802
        self.fleet.tag(names, {form[f"Tag.{n}.Key"]: form[f"Tag.{n}.Value"] for n in _numbers(form, "Tag")})
        return "<return>true</return>"

    def _DeleteTags(self, form: dict[str, str], names: list[str], _: Any) -> str:  # noqa: N802
        self.fleet.untag(names, [form[f"Tag.{n}.Key"] for n in _numbers(form, "Tag")])
        return "<return>true</return>"


def _numbers(form: Mapping[str, str], prefix: str) -> list[int]:
    return sorted({int(key.split(".")[1]) for key in form if key.startswith(f"{prefix}.")})


def _listed(form: Mapping[str, str], prefix: str) -> list[str]:
    numbered = [(int(key.rsplit(".", 1)[1]), value) for key, value in form.items() if key.rsplit(".", 1)[0] == prefix]
    return [value for _, value in sorted(numbered)]


def _xml(machine: FleetInstance) -> str:
    tags = "".join(
        f"<item><key>{escape(key)}</key><value>{escape(value)}</value></item>" for key, value in machine.tags.items()
    )
    launched = machine.launched_at.isoformat().replace("+00:00", "Z") if machine.launched_at else ""
    return (
        f"<item><instanceId>{machine.instance_id}</instanceId>"
        f"<instanceState><code>16</code><name>{machine.state}</name></instanceState>"
        + (f"<launchTime>{launched}</launchTime>" if launched else "")
        + (f"<platform>{machine.platform}</platform>" if machine.platform else "")
        + f"<tagSet>{tags}</tagSet></item>"
    )


@dataclass(frozen=True)
class FleetUrls:
    github_url: str
    ec2_url: str


@contextmanager
def serve_fleet(fleet: FleetState) -> Iterator[FleetUrls]:
    github, ec2 = (type(kind.__name__, (kind,), {"fleet": fleet}) for kind in (_Github, _Ec2))
    with serve(github) as github_url, serve(ec2) as ec2_url:
        try:
            yield FleetUrls(github_url=github_url, ec2_url=ec2_url)
        finally:
            fleet.closing.set()
