"""Who holds an instance: what is derived from the holder, and its document."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remuda.domain.holder import Holder, RunHolder, SetHolder, StartedJob, describe_holder, set_of_subject, set_subject
from remuda.domain.instance import Instance, State
from remuda.domain.serialization import from_document, to_document
from tests.support.records import in_set, in_state, run_holder, set_holder

RUN = RunHolder(run_id="123", attempt=2, provision_id="p-1")
LISTENING = SetHolder(name="large", provision_id="p-2")
UNNAMED = SetHolder(name="large", job=StartedJob(), provision_id="p-2")
WITH_JOB = SetHolder(name="large", job=StartedJob(run_id="77"), provision_id="p-2")

DOCUMENTS: list[tuple[Holder, dict[str, Any]]] = [
    (RUN, {"run": "123", "attempt": 2, "provision": "p-1"}),
    (LISTENING, {"set": "large", "job": None, "provision": "p-2"}),
    (UNNAMED, {"set": "large", "job": {"run": ""}, "provision": "p-2"}),
    (WITH_JOB, {"set": "large", "job": {"run": "77"}, "provision": "p-2"}),
]


@pytest.mark.parametrize(
    ("holder", "run_id", "key", "subject", "described"),
    [
        (RUN, "123", "123", "123", "run 123"),
        (LISTENING, "", "set#large", "set.large", "set large"),
        # Nobody has named the run of its job, so people find it by its set.
        (UNNAMED, "", "set#large", "set.large", "set large"),
        (WITH_JOB, "77", "set#large", "77", "run 77"),
    ],
    ids=["run", "listening", "unnamed job", "job"],
)
def test_what_is_derived_from_a_holder(holder: Holder, run_id: str, key: str, subject: str, described: str) -> None:
    assert (holder.run_id, holder.key, holder.subject, describe_holder(holder)) == (run_id, key, subject, described)


def test_a_set_is_found_by_its_subject() -> None:
    assert set_of_subject(set_subject("large")) == "large"
    assert set_of_subject("set.") == ""
    assert set_of_subject("123") is None


@pytest.mark.parametrize(("holder", "document"), DOCUMENTS)
def test_document_of_a_holder(holder: Holder, document: dict[str, Any]) -> None:
    record = in_state(State.RUNNING, holder=holder)
    stored = json.loads(json.dumps(to_document(record)))
    assert stored["holder"] == document
    assert stored["lastHolder"] is None
    assert from_document(Instance, stored) == record


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("set.large", "Instance.holder must be an object, not str"),
        ({}, "Instance.holder must have exactly one of the keys run, set"),
        ({**DOCUMENTS[0][1], **DOCUMENTS[1][1]}, "Instance.holder must have exactly one of the keys run, set"),
        ({"run": "123", "attempt": 1}, "RunHolder lacks provision"),
        ({"run": 123, "attempt": 1, "provision": "p-1"}, "RunHolder.run must be str, not int"),
        ({"set": "large", "job": "77", "provision": "p-2"}, "StartedJob must be an object, not str"),
    ],
)
def test_malformed_holder_is_rejected(document: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        from_document(Instance, {**to_document(in_state(State.RUNNING)), "holder": document})


@pytest.mark.parametrize(
    ("record", "bound", "runner_set", "provision_id", "subjects"),
    [
        (in_state(State.CLAIMED), True, "", "p-1", ("1234", "")),
        (in_state(State.IDLE), True, "", "p-1", ("", "1234")),
        (in_set(State.RUNNING), False, "large", "p-1", ("set.large", "")),
        (in_set(State.RUNNING, holder=set_holder(run_id="")), True, "large", "p-1", ("set.large", "")),
        (in_set(State.RUNNING, holder=set_holder(run_id="77")), True, "large", "p-1", ("77", "")),
        # It belongs to its holder until its release, and is known as the holder's last one afterwards.
        (in_set(State.RELEASING), True, "large", "p-1", ("", "set.large")),
        (in_state(State.TERMINATING, last_holder=None), True, "", "", ("", "")),
        (in_state(State.CLAIMED, holder=run_holder("5", "p-5")), True, "", "p-5", ("5", "")),
    ],
)
def test_instance_knows_its_holder(
    record: Instance,
    bound: bool,  # noqa: FBT001
    runner_set: str,
    provision_id: str,
    subjects: tuple[str, str],
) -> None:
    assert (record.is_bound, record.runner_set, record.provision_id) == (bound, runner_set, provision_id)
    assert (record.subject, record.last_subject) == subjects
