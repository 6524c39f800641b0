"""Who holds an instance: a workflow run or a runner set. Nobody (`None`) holds one that is in the pool.

The holder is one value of a record. What others need of it is derived here: the run, the provision, the key of its
provisions, and the name that people use. Example: run 123 claims an instance, whose record then has
`RunHolder(run_id="123", attempt=1, provision_id="p-0f3a…")`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Before the name of a runner set where people may also name a run: `remuda explain set.large`. In no record.
_SET_SUBJECT = "set."
#: Before the name of a runner set in keys. No run id contains the separator.
_SET_KEY = "set#"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHolder:
    """A workflow run, which holds the instances of its provisions from claim or launch to release."""

    run_id: str = field(metadata={"key": "run"})
    attempt: int
    provision_id: str = field(metadata={"key": "provision"})

    @property
    def key(self) -> str:
        """Key of its provisions."""
        return self.run_id

    @property
    def subject(self) -> str:
        """What people call it, for example in `remuda explain`."""
        return self.run_id


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedJob:
    """A job that has started on an instance of a runner set."""

    #: Empty if nobody has named it: the agent reports that a job runs or ran, and GitHub's message is missing.
    run_id: str = field(default="", metadata={"key": "run"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SetHolder:
    """A runner set, which holds an instance for one job."""

    name: str = field(metadata={"key": "set"})
    #: None while its runner registers, or listens for a job.
    job: StartedJob | None = None
    #: The provision that recorded the intent to claim or launch the instance.
    provision_id: str = field(metadata={"key": "provision"})

    @property
    def run_id(self) -> str:
        """The run of its job; empty as long as that is not known."""
        return self.job.run_id if self.job is not None else ""

    @property
    def key(self) -> str:
        """Key of its provisions."""
        return f"{_SET_KEY}{self.name}"

    @property
    def subject(self) -> str:
        """What people call it: the run of its job, or the set. For example in `remuda explain`."""
        return self.run_id or set_subject(self.name)


Holder = RunHolder | SetHolder


def set_subject(name: str) -> str:
    """What people call a runner set where they may also name a run. Example: `set.large`."""
    return f"{_SET_SUBJECT}{name}"


def set_of_subject(text: str) -> str | None:
    """What follows in a text that means a runner set: its name, which is not checked. None for any other text."""
    return text.removeprefix(_SET_SUBJECT) if text.startswith(_SET_SUBJECT) else None


def subject_of(holder: Holder | None) -> str:
    """What people call a holder; empty for nobody."""
    return holder.subject if holder is not None else ""


def describe_holder(holder: Holder) -> str:
    """Name a holder in a sentence: `run 123`, or `set large` if no run of its job is known."""
    if isinstance(holder, SetHolder) and not holder.run_id:
        return f"set {holder.name}"
    return f"run {holder.run_id}"
