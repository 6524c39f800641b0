"""Coverage-guided fuzzing of parsers: `python -m tests.support.coverage_fuzzer CORPUS -max_total_time=60`.

libFuzzer tries hundreds of thousands of inputs and prefers those that reach new branches, which suits parsers of bytes.
`tests/unit/fuzz` reaches further with structured documents. Failures found here become an `@example` there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["remuda", "yaml", "tomllib"]):
    import yaml

    from remuda.adapters.github import responses
    from remuda.adapters.sqlite import documents
    from remuda.cli.workflow_file import load_workflow, parse_workflow
    from remuda.config.sources import load
    from remuda.domain.errors import RemudaError
    from remuda.domain.instance import Instance
    from remuda.domain.resources import PoolMessage, TypePatterns
    from remuda.domain.scale_down.idle_config import parse_cron
    from remuda.domain.serialization import to_document
    from remuda.domain.signals import Report
    from remuda.http import ClientResponse
    from tests.support.records import NOW, instance, message

GITHUB = {"run_id": "77", "run_attempt": "1", "repository": "octo/repo"}
WORKFLOW = {
    "on": "push",
    "jobs": {"a": {"runs-on": "x", "needs": [], "steps": [{"run": "echo ${{ github.run_id }}"}]}},
}
RUNNERS = {
    "total_count": 1,
    "runners": [{"id": 7, "name": "x", "status": "online", "busy": False, "labels": [{"name": "x"}]}],
}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _cron(data: bytes) -> object:
    return parse_cron(_text(data)).is_open(NOW, UTC)


def _page(data: bytes) -> object:
    return responses.parse_runner_page(responses.json_object(ClientResponse(200, {}, data)))


def _json(record: object) -> bytes:
    return json.dumps(to_document(record)).encode()


#: Parsers, each with a valid input as seed.
TARGETS: tuple[tuple[Callable[[bytes], object], bytes], ...] = (
    (lambda data: documents.decode(PoolMessage, _text(data)), _json(message())),
    (lambda data: documents.decode(Instance, _text(data)), _json(instance())),
    (lambda data: documents.decode(Report, _text(data)), _json(Report(instance_id="i-1", beat_at=NOW))),
    (lambda data: parse_workflow(load_workflow(data), GITHUB), yaml.safe_dump(WORKFLOW).encode()),
    (_page, json.dumps(RUNNERS).encode()),
    (_cron, b"0 */5 9-17 * JAN,5L MON#2"),
    (lambda data: TypePatterns.parse(_text(data)).matches("c6i.large"), b"c* m6i.large"),
    (lambda data: load({"idle_config": _text(data)}, environ={}), b'[{"cron": "* * * * *", "idleCount": 2}]'),
    (lambda data: load({"resource_class_config": _text(data)}, environ={}), b'{"large": {"cpu": 2, "mmem": 4096}}'),
)


def fuzz_one(data: bytes) -> None:
    """Pass all but the first byte to the parser that it selects. Any error but a rejected input is a failure."""
    if not data:
        return
    parse, _ = TARGETS[data[0] % len(TARGETS)]
    try:
        parse(data[1:])
    except (ValueError, RemudaError):
        return


def main() -> None:
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    for number, (_, seed) in enumerate(TARGETS):
        (corpus / f"seed-{number}").write_bytes(bytes([number]) + seed)
    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
