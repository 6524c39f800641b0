"""Workflows of `run-workflow`: parsing, and the cancellation of an interrupted run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import Output
from remuda.cli.run_workflow import LastRun, WorkflowRun, blocked_by_provision, kept_jobs
from remuda.cli.workflow_file import WorkflowError, WorkflowJob, load_workflow, parse_workflow
from remuda.domain.errors import UserError
from remuda.fake_github.client import JobStep, JobView, RunnerView
from remuda.fake_github.fake_runner.expressions import parse_condition

GITHUB = {"run_id": "77", "run_attempt": "2", "repository": "owner/repo", "workflow_ref": "owner/repo/w.yml@main"}
STEPS = [{"run": "true"}]
CHECKOUT = {"uses": "actions/checkout@v4"}


def parse(jobs: Any, **workflow: Any) -> list[WorkflowJob]:
    return parse_workflow({"name": "w", **workflow, "jobs": jobs}, GITHUB)


def one(**job: Any) -> WorkflowJob:
    (parsed,) = parse({"a": {"runs-on": "x", "steps": STEPS, **job}})
    return parsed


def test_matrix_expands_to_one_job_per_combination() -> None:
    jobs = parse(
        {
            "test": {
                "runs-on": "${{ github.run_id }}/${{ matrix.size }}",
                "strategy": {"matrix": {"size": ["large", "xlarge"], "shard": [1, 2]}},
                "steps": STEPS,
            }
        }
    )
    assert [job.name for job in jobs] == ["test (large, 1)", "test (large, 2)", "test (xlarge, 1)", "test (xlarge, 2)"]
    assert jobs[0].resolve(GITHUB, {}).labels == ("77/large",)
    assert jobs[3].matrix == {"size": "xlarge", "shard": 2}
    assert jobs[3].strategy["job-index"] == 3


def test_matrix_with_include_and_exclude() -> None:
    """The example of GitHub's documentation."""
    include = [
        {"color": "green"},
        {"color": "pink", "animal": "cat"},
        {"fruit": "apple", "shape": "circle"},
        {"fruit": "banana"},
    ]
    matrix = {"fruit": ["apple", "pear"], "animal": ["cat", "dog"], "include": include}
    jobs = parse({"a": {"runs-on": "x", "steps": STEPS, "strategy": {"matrix": matrix}}})
    assert [job.matrix for job in jobs] == [
        {"fruit": "apple", "animal": "cat", "color": "pink", "shape": "circle"},
        {"fruit": "apple", "animal": "dog", "color": "green", "shape": "circle"},
        {"fruit": "pear", "animal": "cat", "color": "pink"},
        {"fruit": "pear", "animal": "dog", "color": "green"},
        {"fruit": "banana"},
    ]
    matrix["exclude"] = [{"fruit": "apple", "animal": "dog"}]
    jobs = parse({"a": {"runs-on": "x", "steps": STEPS, "strategy": {"matrix": matrix}}})
    assert [job.matrix["fruit"] for job in jobs] == ["apple", "pear", "pear", "banana"]


def test_runs_on_uses_outputs_of_needed_jobs() -> None:
    needs = {"b": {"result": "success", "outputs": {"label": "77", "all": '["77", "large"]'}}}
    jobs = {"b": {"runs-on": "x", "steps": STEPS}, "a": {"needs": "b", "steps": STEPS}}
    for runs_on, labels in (
        ("${{ needs.b.outputs.label }}", ("77",)),
        (["${{ needs.b.outputs.label }}", "x"], ("77", "x")),
        ("${{ fromJSON(needs.b.outputs.all) }}", ("77", "large")),
    ):
        jobs["a"]["runs-on"] = runs_on
        assert parse(jobs)[1].resolve(GITHUB, needs).labels == labels


def test_texts_follow_yaml_1_2_as_on_github() -> None:
    env = b"{A: yes, B: true, C: 3.10, D: 12:30, E: , F: 010}"
    document = load_workflow(b"on: push\njobs: {a: {runs-on: x, env: %s}}" % env)
    assert list(document) == ["on", "jobs"]
    document["jobs"]["a"]["steps"] = STEPS
    (job,) = parse_workflow(document, GITHUB)
    assert job.resolve(GITHUB, {}).env == {"A": "yes", "B": "true", "C": "3.1", "D": "12:30", "E": "", "F": "10"}


def test_env_of_a_job_overrides_that_of_the_workflow() -> None:
    (job,) = parse(
        {"a": {"runs-on": "x", "env": {"B": "${{ github.run_id }}-job"}, "steps": STEPS}}, env={"A": "a", "B": "b"}
    )
    assert job.resolve(GITHUB, {}).env == {"A": "a", "B": "77-job"}


def test_defaults_of_run_steps() -> None:
    (job,) = parse(
        {
            "a": {
                "runs-on": "x",
                "defaults": {"run": {"working-directory": "sub"}},
                "steps": [{"run": "true"}, {"run": "true", "shell": "sh"}],
            }
        },
        defaults={"run": {"shell": "bash"}},
    )
    assert [(step.shell, step.working_directory) for step in job.steps] == [("bash", "sub"), ("sh", "sub")]


def test_ubuntu_jobs_run_locally_and_others_are_queued() -> None:
    assert one(**{"runs-on": "ubuntu-latest"}).resolve(GITHUB, {}).hosted
    assert not one(**{"runs-on": "${{ github.run_id }}"}).resolve(GITHUB, {}).hosted


@pytest.mark.parametrize(
    ("workflow", "job", "allowed"),
    [
        ({}, {}, False),
        ({"permissions": {"id-token": "write"}}, {}, True),
        ({"permissions": {"id-token": "write"}}, {"permissions": {"contents": "read"}}, False),
        ({"permissions": {"id-token": "write"}}, {"permissions": {}}, False),
        ({"permissions": "read-all"}, {"permissions": {"id-token": "write"}}, True),
        ({"permissions": "write-all"}, {}, True),
        ({"permissions": {"id-token": "none"}}, {}, False),
    ],
)
def test_permissions_of_a_job_replace_those_of_the_workflow(
    workflow: dict[str, Any],
    job: dict[str, Any],
    allowed: bool,  # noqa: FBT001
) -> None:
    (parsed,) = parse({"a": {"runs-on": "x", "steps": STEPS, **job}}, **workflow)
    assert parsed.may_request_tokens is allowed


def test_environment_of_a_job() -> None:
    assert one().resolve(GITHUB, {}).environment == ""
    assert one(environment="prod-${{ github.run_id }}").resolve(GITHUB, {}).environment == "prod-77"
    assert one(environment={"name": "prod", "url": "https://example.com"}).resolve(GITHUB, {}).environment == "prod"


@pytest.mark.parametrize(
    ("jobs", "where"),
    [
        ({}, "jobs"),
        ([], "jobs"),
        ({"a": []}, "jobs.a"),
        ({"a": {"steps": STEPS}}, "jobs.a.runs-on"),
        ({"a": {"runs-on": "x"}}, "jobs.a.steps"),
        ({"a": {"runs-on": "x", "steps": [{"uses": "actions/cache@v4"}]}}, "jobs.a.steps[0].uses"),
        ({"a": {"runs-on": "x", "steps": [CHECKOUT | {"with": {"ref": "x"}}]}}, "jobs.a.steps[0].with.ref"),
        ({"a": {"runs-on": "x", "steps": [{"run": "true", "shell": "pwsh"}]}}, "jobs.a.steps[0].shell"),
        ({"a": {"runs-on": "x", "steps": [{"run": "${{ secrets.X }}"}]}}, "jobs.a.steps[0].run"),
        ({"a": {"runs-on": "x", "steps": [{"run": "${{ github.token }}"}]}}, "jobs.a.steps[0].run"),
        ({"a": {"runs-on": "x", "steps": [{"run": "${{ needs.b.result }}"}]}}, "jobs.a.steps[0].run"),
        ({"a": {"runs-on": "x", "steps": [{"run": "${{ always() }}"}]}}, "jobs.a.steps[0].run"),
        ({"a": {"runs-on": "x", "steps": [{"run": "true", "if": "env.A =="}]}}, "jobs.a.steps[0].if"),
        ({"a": {"runs-on": "x", "steps": STEPS, "continue-on-error": "x"}}, "jobs.a.continue-on-error"),
        ({"a": {"runs-on": "x", "steps": STEPS, "container": "node"}}, "jobs.a.container"),
        ({"a": {"uses": "./.github/workflows/b.yml"}}, "jobs.a.uses"),
        ({"a": {"runs-on": {"group": "g"}, "steps": STEPS}}, "jobs.a.runs-on.group"),
        ({"a": {"runs-on": "x", "steps": STEPS, "env": {"A": "${{ env.B }}"}}}, "jobs.a.env.A"),
        ({"a": {"runs-on": "x", "steps": STEPS, "strategy": {"max-parallel": 2}}}, "jobs.a.strategy.max-parallel"),
        ({"a": {"runs-on": "x", "steps": [{"name": "nothing"}]}}, "jobs.a.steps[0]"),
        ({"a": {"runs-on": "x", "steps": STEPS, "needs": "b"}}, "jobs.a.needs"),
        ({"a": {"runs-on": "x", "steps": STEPS, "services": {}}}, "jobs.a.services"),
        ({"a": {"runs-on": "x", "steps": STEPS, "if": "matrix.x == 'x'"}}, "jobs.a.if"),
        ({"a": {"runs-on": "${{ secrets.X }}", "steps": STEPS}}, "jobs.a.runs-on"),
        ({"a": {"runs-on": "x", "steps": STEPS, "timeout-minutes": -1}}, "jobs.a.timeout-minutes"),
        ({"a": {"runs-on": "x", "steps": STEPS, "strategy": {"matrix": {"n": 3}}}}, "jobs.a.strategy.matrix.n"),
        (
            {"a": {"runs-on": "x", "steps": STEPS, "strategy": {"matrix": {"n": list(range(300))}}}},
            "jobs.a.strategy.matrix",
        ),
        ({"a": {"runs-on": "x", "steps": STEPS, "permissions": "all"}}, "jobs.a.permissions"),
        ({"a": {"runs-on": "x", "steps": STEPS, "permissions": {"id-token": True}}}, "jobs.a.permissions.id-token"),
        ({f"j{n}": {"runs-on": "x", "steps": STEPS} for n in range(300)}, "jobs"),
    ],
)
def test_unsupported_keys_are_rejected_by_name(jobs: Any, where: str):
    with pytest.raises(UserError) as raised:
        parse(jobs)
    assert raised.value.field == where
    assert raised.value.fix


BAD = b"""\
on: push
jobs:
  test:
    runs-on: x
    services: {db: {image: postgres}}
    steps:
      - uses: actions/setup-node@v4
      - run: echo ${{ secrets.TOKEN }}
        if: hashFiles('x')
  call:
    uses: ./.github/workflows/other.yml
"""


def test_all_problems_of_a_file_are_reported_at_once_with_their_lines() -> None:
    with pytest.raises(WorkflowError) as raised:
        parse_workflow(load_workflow(BAD), GITHUB)
    found = {(problem.place.line, problem.place.path) for problem in raised.value.problems}
    assert found == {
        (5, "jobs.test.services"),
        (7, "jobs.test.steps[0].uses"),
        (8, "jobs.test.steps[1].run"),
        (9, "jobs.test.steps[1].if"),
        (11, "jobs.call.uses"),
    }
    assert raised.value.message == "the workflow has 5 problems"
    assert "line 5: jobs.test.services needs containers" in raised.value.details[0]
    assert all(problem.fix for problem in raised.value.problems)


def test_keys_that_are_defined_twice_are_rejected() -> None:
    with pytest.raises(ValueError, match="'a' is defined twice"):
        load_workflow(b"jobs: {a: 1, a: 2}")


def test_cyclic_needs_are_rejected() -> None:
    job = {"runs-on": "x", "steps": STEPS}
    with pytest.raises(UserError, match="wait for each other: a, b"):
        parse({"a": {**job, "needs": "b"}, "b": {**job, "needs": ["a"]}, "c": job})


@pytest.mark.parametrize(
    ("conclusions", "kept"),
    [
        ({"build": "success", "test": "failure", "report": "skipped"}, {"build"}),
        ({"build": "failure", "test": "success", "report": "success"}, set()),
        ({"build": "success", "test": "success"}, {"build", "test"}),
        ({"build": "cancelled"}, set()),
    ],
)
def test_failed_jobs_and_those_that_need_them_run_again(conclusions: dict[str, str], kept: set[str]) -> None:
    jobs = [job("report", "test"), job("test", "build"), job("build")]
    assert kept_jobs(jobs, LastRun(run_id="1", attempt=1, conclusions=conclusions)) == kept


def test_run_without_failed_jobs_is_not_run_again() -> None:
    with pytest.raises(UserError, match="run 1 has no failed job"):
        kept_jobs([job("build")], LastRun(run_id="1", attempt=1, conclusions={"build": "success"}))


PROVISION = {"runs-on": "ubuntu-latest", "steps": [{"run": "remuda provision --instance-count 2"}]}
OF_RUN = {"runs-on": "${{ github.run_id }}", "needs": "provision", "steps": STEPS}
OF_SET = {"runs-on": ["self-hosted", "large"], "steps": STEPS}
HOSTED = {"runs-on": "ubuntu-latest", "steps": STEPS}
BY_OUTPUT = {**OF_RUN, "runs-on": "${{ needs.provision.outputs.label }}"}
FAILED = {"provision": "success", "test": "failure"}


@pytest.mark.parametrize(
    ("jobs", "conclusions", "runners", "blocked"),
    [
        ({"provision": PROVISION, "test": OF_RUN}, FAILED, [], "test"),
        ({"provision": PROVISION, "test": BY_OUTPUT}, FAILED, [], "test"),
        ({"provision": PROVISION, "test": {**OF_RUN, "runs-on": "${{ github.run_id }}-large"}}, FAILED, [], "test"),
        # A script of the repository provisions.
        ({"provision": HOSTED, "test": OF_RUN}, FAILED, [], "test"),
        ({"provision": PROVISION, "test": OF_RUN}, {"provision": "failure", "test": "skipped"}, [], None),
        ({"provision": PROVISION, "test": OF_RUN}, FAILED, [("77", "77/large")], None),
        ({"provision": PROVISION, "test": OF_RUN}, FAILED, [("76", "large")], "test"),
        ({"test": OF_SET}, {"test": "failure"}, [], None),
        ({"build": OF_SET, "test": {**OF_SET, "needs": "build"}}, {"build": "success", "test": "failure"}, [], None),
        # Another job on this machine runs again, but it does not provision.
        (
            {"provision": PROVISION, "lint": HOSTED, "test": {**OF_RUN, "needs": ["provision", "lint"]}},
            {"provision": "success", "lint": "failure", "test": "skipped"},
            [],
            "test",
        ),
        # Nothing that failed needs the runners.
        (
            {"provision": PROVISION, "lint": HOSTED, "test": {**OF_RUN, "if": "false"}},
            {"provision": "success", "lint": "failure", "test": "skipped"},
            [],
            None,
        ),
        ({"test": {**OF_RUN, "needs": []}}, {"test": "failure"}, [], "test"),
    ],
)
def test_rerun_is_blocked_if_the_provision_of_a_failed_job_is_not_repeated(
    jobs: dict[str, dict[str, Any]], conclusions: dict[str, str], runners: list[tuple[str, ...]], blocked: str | None
) -> None:
    parsed = parse(jobs)
    last = LastRun(run_id="77", attempt=1, conclusions=conclusions, outputs={"provision": {"label": "77"}})
    found = blocked_by_provision(parsed, last, GITHUB, runners)
    assert (found and found.name) == blocked


# Conditions of jobs ---------------------------------------------------------------------------------------------------


class ScriptedHostedRunner:
    """Ends the jobs on this machine with the conclusions of their names."""

    def __init__(self, steps: Sequence[dict[str, Any]] = ()) -> None:
        self.ran: list[str] = []
        self._steps = steps

    async def run(self, message: dict[str, Any], _on_output: Any) -> dict[str, Any]:
        self.ran.append(message["name"])
        result = "failure" if message["name"].startswith("bad") else "success"
        return {"result": result, "outputs": {"x": "1"}, "steps": self._steps}


NOT_CANCELLED = "!cancelled() && needs.bad.result == 'failure'"


@pytest.mark.parametrize(
    ("jobs", "ran"),
    [
        ({"bad": {}, "after": {"needs": "bad"}}, {"bad"}),
        ({"bad": {}, "after": {"needs": "bad", "if": "failure()"}}, {"bad", "after"}),
        ({"bad": {}, "after": {"needs": "bad", "if": "always()"}}, {"bad", "after"}),
        ({"bad": {}, "after": {"needs": "bad", "if": "needs.bad.result == 'failure'"}}, {"bad"}),
        ({"bad": {}, "after": {"needs": "bad", "if": NOT_CANCELLED}}, {"bad", "after"}),
        # A failure or a skip applies to all jobs that follow in the chain.
        ({"bad": {}, "b": {"needs": "bad"}, "c": {"needs": "b", "if": "failure()"}}, {"bad", "c"}),
        ({"bad": {}, "b": {"needs": "bad", "if": "always()"}, "c": {"needs": "b"}}, {"bad", "b"}),
        ({"skip": {"if": "false"}, "after": {"needs": "skip"}}, set()),
        ({"skip": {"if": "false"}, "after": {"needs": "skip", "if": "failure()"}}, set()),
        # A failure that is allowed counts as success for the jobs that need it.
        ({"bad": {"continue-on-error": True}, "after": {"needs": "bad"}}, {"bad", "after"}),
        ({"a": {"outputs": {"x": "1"}}, "b": {"needs": "a", "if": "needs.a.outputs.x == 1"}}, {"a", "b"}),
        ({"a": {}, "b": {"needs": "a", "if": "needs.a.outputs.nothing"}}, {"a"}),
    ],
)
async def test_conditions_of_jobs(jobs: dict[str, dict[str, Any]], ran: set[str]) -> None:
    hosted = ScriptedHostedRunner()
    run = WorkflowRun(SilentOutput(), None, SystemClock(), GITHUB, hosted=hosted)  # type: ignore[arg-type]
    bodies = {key: {"runs-on": "ubuntu-latest", "steps": STEPS, **body} for key, body in jobs.items()}
    results = await run.run(parse(bodies))
    assert set(hosted.ran) == ran
    assert {result.name for result in results if result.conclusion == "skipped"} == set(jobs) - ran


@pytest.mark.parametrize(("count", "said"), [(20, ":"), (21, "; its last 20 lines (--verbose shows all):")])
async def test_last_lines_of_a_failed_step_are_shown(count: int, said: str) -> None:
    output, lines = SilentOutput(), [f"line {number}" for number in range(count)]
    failed = {"name": "build", "outcome": "failure", "conclusion": "failure", "seconds": 0.1, "tail": "\n".join(lines)}
    hosted = ScriptedHostedRunner([failed])
    run = WorkflowRun(output, None, SystemClock(), GITHUB, hosted=hosted)  # type: ignore[arg-type]
    await run.run(parse({"bad": {"runs-on": "ubuntu-latest", "steps": STEPS}}))
    assert output.said[2].endswith(f"step 1 (build): failure after 0.10 s{said}")
    assert [line.partition("| ")[2] for line in output.said[3:]] == lines[-20:]


LONG_WORDS = "https://example.com/" + "a/" * 60
LONG_LINES = (
    "compiled 1,024 files in 3.2 s with 14 warnings, the first of them in src/module/with/a/long/path.c",
    f"downloaded {LONG_WORDS}",
    "版本 " * 40,
)


@pytest.mark.parametrize("columns", [80, 60, 40, 20])
async def test_lines_fit_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    failed = {"name": "build everything", "outcome": "failure", "conclusion": "failure", "seconds": 0.1}
    hosted = ScriptedHostedRunner([{**failed, "tail": "\n".join(LONG_LINES)}])
    github = SlowGitHub()
    run = WorkflowRun(Output(as_json=False), github, SystemClock(), GITHUB, hosted=hosted)  # type: ignore[arg-type]
    hosted_job = parse({"bad-job-with-a-long-name": {"runs-on": "ubuntu-latest", "steps": STEPS}})
    running = asyncio.create_task(run.run([*hosted_job, replace(job("one"), labels=("self-hosted", "77"))]))
    await github.followed.get()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(cell_len, lines)) <= columns
    # Nothing is lost, and further lines are indented.
    text = "".join("".join(lines).split())
    for said in (*LONG_LINES, KNOWN, "it waits, Ctrl-C cancels the run"):
        assert "".join(said.split()) in text, said
    first = next(index for index, line in enumerate(lines) if "but no" in line or line.endswith("but"))
    assert lines[first + 1].startswith(" " * min(26, columns // 2))
    if columns >= 60:
        # Only a word that is wider than a line is broken.
        words = {word for line in lines for word in line.split()}
        assert words >= set(f"{KNOWN};".split()) | set(LONG_LINES[0].split())


def test_lines_of_a_log_stay_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    Output(as_json=False).say_after("12:00:00 job ", "word " * 100 + "end")
    assert capsys.readouterr().err == f"12:00:00 job {'word ' * 100}end\n"


# Interrupted runs -----------------------------------------------------------------------------------------------------

#: Event loop iterations that the cancellation of each job takes. The first must not interrupt the others.
ITERATIONS = {"one": 20, "two": 60}


class SilentOutput:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say_after(self, lead: str, text: str) -> None:
        self.said.append(f"{lead}{text}")


class SlowGitHub:
    """A GitHub whose jobs only end when they are cancelled."""

    def __init__(self) -> None:
        self.followed: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: set[str] = set()

    async def queue_job(self, *, name: str, **_given: Any) -> JobView:
        return _job(name)

    async def job(self, name: str, **_given: Any) -> JobView:
        self.followed.put_nowait(name)
        await asyncio.Event().wait()
        return _job(name)

    async def runners(self) -> list[RunnerView]:
        return [_runner("77", "77/large"), _runner("self-hosted", "linux")]

    async def cancel_job(self, name: str) -> JobView:
        for _ in range(ITERATIONS[name]):
            await asyncio.sleep(0)
        self.cancelled.add(name)
        return _job(name)


def _job(name: str) -> JobView:
    known = dict.fromkeys(JobView.__dataclass_fields__)
    return JobView(**{**known, "id": name, "name": name, "status": "queued"})  # type: ignore[arg-type]


def _runner(*labels: str) -> RunnerView:
    known = dict.fromkeys(RunnerView.__dataclass_fields__)
    return RunnerView(**{**known, "labels": labels})  # type: ignore[arg-type]


def job(key: str, *needs: str, on: str = "1") -> WorkflowJob:
    return WorkflowJob(
        key=key,
        name=key,
        needs=needs,
        labels=(on,),
        condition=parse_condition(""),
        steps=(JobStep(run="true"),),
    )


@pytest.mark.parametrize("without_dependent", [True, False])
async def test_an_interrupted_run_cancels_all_its_jobs(*, without_dependent: bool) -> None:
    github = SlowGitHub()
    run = WorkflowRun(SilentOutput(), github, SystemClock(), GITHUB, hosted=None)  # type: ignore[arg-type]
    jobs = [job("one"), job("two"), *([] if without_dependent else [job("after", "one", "two", on="ubuntu-latest")])]
    running = asyncio.create_task(run.run(jobs))
    assert {await github.followed.get() for _ in ITERATIONS} == set(ITERATIONS)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert github.cancelled == set(ITERATIONS)


KNOWN = "run 77 has runners with labels 77, 77/large: use runs-on: ${{ github.run_id }}"


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            ("self-hosted", "77"),
            f"but no runner has label self-hosted; {KNOWN}; it waits, Ctrl-C cancels the run",
        ),
        (
            ("77", "large"),
            f"but no runner has label large; {KNOWN}/large; it waits, Ctrl-C cancels the run",
        ),
        (("77",), "queued for 77"),
        (("77/large",), "queued for 77/large"),
        (("Self-Hosted", "linux"), "queued for Self-Hosted, linux"),
    ],
)
async def test_labels_that_no_runner_has_are_explained_at_once(labels: tuple[str, ...], said: str) -> None:
    github, output = SlowGitHub(), SilentOutput()
    run = WorkflowRun(output, github, SystemClock(), GITHUB, hosted=None)  # type: ignore[arg-type]
    running = asyncio.create_task(run.run([replace(job("one"), labels=labels)]))
    await github.followed.get()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert output.said[0].endswith(said)
