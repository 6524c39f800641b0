"""The command line. Thin: flags in, a use case, a result out. What is heavy is imported where it is used."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, Exit, TyperException

from remuda import __version__
from remuda.cli import options as opt
from remuda.cli.output import Output, early_log_format, set_log_format
from remuda.cli.run import EXIT_INTERRUPTED, command
from remuda.domain.errors import UserError

app = typer.Typer(
    name="remuda",
    help="A herd of warm machines for GitHub Actions: provision, run, release, reuse.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: drawing boxes around it would cost as much as all the rest of a start.
    rich_markup_mode=None,
    # A --help that is not given is false: to make that of nothing, typer would import pydantic.
    context_settings={"help_option_names": ["-h", "--help"], "default_map": {"help": False}},
)


def _flags(values: dict[str, Any]) -> dict[str, Any]:
    """The settings among a command's parameters."""
    return {name: value for name, value in values.items() if name not in {"as_json", "quiet", "config"}}


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"remuda {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command()
def up(
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Start the local backend in the background: a local GitHub and the sweeps."""
    flags = _flags(locals())
    from remuda.cli.commands import run_up

    return run_up(flags, config, Output(as_json=as_json, quiet=quiet))


@app.command()
def down(
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove the state folder too.")] = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Stop the local backend and every local machine; leaves no process."""
    flags = _flags({key: value for key, value in locals().items() if key != "purge"})
    from remuda.cli.commands import run_down

    return run_down(flags, config, Output(as_json=as_json, quiet=quiet), purge=purge)


@app.command()
def refresh(
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    github_scope: opt.Scope = None,
    idle_time_sec: opt.IdleTime = None,
    max_runtime_min: opt.MaxRuntime = None,
    release_time_sec: opt.ReleaseTime = None,
    provision_timeout_sec: opt.ProvisionTimeout = None,
    max_age_sec: opt.MaxAge = None,
    max_uses: opt.MaxUses = None,
    reuse: opt.ReuseName = None,
    max_instances: opt.MaxInstances = None,
    resource_class_config: opt.ClassConfig = None,
    pre_runner_script: opt.PreRunnerScript = None,
    margin_sec: opt.Margin = None,
    unrecorded_grace_sec: opt.UnrecordedGrace = None,
    ghost_grace_sec: opt.GhostGrace = None,
    gone_after_sec: opt.GoneAfter = None,
    reannounce_sec: opt.Reannounce = None,
    keep_records_sec: opt.KeepRecords = None,
    boot_delay_sec: opt.BootDelay = None,
    fault: opt.Fault = None,
    ami: opt.Ami = None,
    subnet_ids: opt.SubnetIds = None,
    security_group_ids: opt.SecurityGroupIds = None,
    iam_instance_profile: opt.InstanceProfile = None,
    key_name: opt.KeyName = None,
    spot_fallback: opt.SpotFallback = None,
    actions_runner_version: opt.RunnerVersion = None,
    actions_runner_sha256: opt.RunnerSha256 = None,
    actions_runner_url: opt.RunnerUrl = None,
    agent_url: opt.AgentUrl = None,
    agent_sha256: opt.AgentSha256 = None,
    python_url: opt.PythonUrl = None,
    python_sha256: opt.PythonSha256 = None,
    github_environment: opt.GithubEnvironment = None,
    sweep_only: Annotated[bool, typer.Option("--sweep-only", help="Leave the configuration as it is.")] = False,
    every: Annotated[
        float | None, typer.Option("--every", min=0.2, max=86_400, help="Repeat after so many seconds, until stopped.")
    ] = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Apply the configuration, keep tokens fresh, and sweep: expired, lost, interrupted, orphaned."""
    flags = _flags({key: value for key, value in locals().items() if key not in {"sweep_only", "every"}})
    from remuda.cli.commands import run_refresh

    return run_refresh(flags, config, Output(as_json=as_json, quiet=quiet), sweep_only=sweep_only, every=every)


@app.command()
def provision(
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    github_scope: opt.Scope = None,
    run_id: opt.RunId = None,
    run_attempt: opt.RunAttempt = None,
    instance_count: opt.InstanceCount = None,
    resource_class: opt.ResourceClassName = None,
    usage_class: opt.UsageClassName = None,
    allowed_instance_types: opt.AllowedTypes = None,
    max_runtime_min: opt.MaxRuntime = None,
    provision_timeout_sec: opt.ProvisionTimeout = None,
    tier: opt.TierName = None,
    repository: opt.Repository = None,
    ephemeral: opt.Ephemeral = False,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Get runners for a run: reused from the pool if it can, created if it must; all or nothing."""
    # Not given is not false: the file may say otherwise.
    flags = _flags({**locals(), "ephemeral": ephemeral or None})
    from remuda.cli.commands import run_provision

    return run_provision(flags, config, Output(as_json=as_json, quiet=quiet))


@app.command()
def release(
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    run_id: opt.RunId = None,
    run_attempt: opt.RunAttempt = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Give a run's runners back: deregistered, reset, into the pool."""
    flags = _flags(locals())
    from remuda.cli.commands import run_release

    return run_release(flags, config, Output(as_json=as_json, quiet=quiet))


@app.command(name="scale-down")
def scale_down(
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    environment: opt.Environment = None,
    idle_config: opt.IdleConfig = None,
    minimum_running_time_in_minutes: opt.MinimumRunningTime = None,
    runner_boot_time_in_minutes: opt.RunnerBootTime = None,
    idle_scope: opt.IdleScopeName = None,
    max_removals_per_cycle: opt.MaxRemovals = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and why; touch nothing.")
    ] = False,
    every: Annotated[
        float | None, typer.Option("--every", min=0.2, max=86_400, help="Repeat after so many seconds, until stopped.")
    ] = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Retire idle runners beyond the quota, find orphans; works on fleets of terraform-aws-github-runner too."""
    flags = _flags({key: value for key, value in locals().items() if key not in {"dry_run", "every"}})
    from remuda.cli.commands import run_scale_down_command

    return run_scale_down_command(flags, config, Output(as_json=as_json, quiet=quiet), dry_run=dry_run, every=every)


@app.command()
def status(
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    all_: Annotated[bool, typer.Option("--all", help="Terminated instances too.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, in place, until stopped.")] = False,
    every: Annotated[
        float | None,
        typer.Option("--every", min=0.2, max=3_600, help="With --watch: seconds between looks (local 1, aws 5)."),
    ] = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Show instances, launches, pools and runs, and what to look at."""
    flags = _flags({key: value for key, value in locals().items() if key not in {"all_", "watch", "every"}})
    from remuda.cli.commands import run_status

    output = Output(as_json=as_json, quiet=quiet)
    return run_status(flags, config, output, everything=all_, watch=watch, every=every)


@app.command()
def explain(
    subject: Annotated[
        str, typer.Argument(metavar="RUN|INSTANCE", help="A run id, an instance id, or a runner's name on GitHub.")
    ],
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Tell the story of a run or an instance: what happened, why, and what happens next."""
    flags = _flags({key: value for key, value in locals().items() if key != "subject"})
    from remuda.cli.commands import run_explain

    return run_explain(flags, config, Output(as_json=as_json, quiet=quiet), subject=subject)


@app.command()
def report(
    since: Annotated[str, typer.Option("--since", help="90m, 12h, 7d, 2w, or a day: 2026-11-01.")] = "7d",
    html: Annotated[str | None, typer.Option("--html", help="Write it as one page to this file.")] = None,
    prices: opt.Prices = None,
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Reuse, waiting times, machine hours, cost, and what reuse saved."""
    flags = _flags({key: value for key, value in locals().items() if key not in {"since", "html"}})
    from remuda.cli.commands import run_report

    return run_report(flags, config, Output(as_json=as_json, quiet=quiet), since=since, html=html)


@app.command()
def dashboard(
    host: Annotated[str, typer.Option("--host", help="Where to listen; elsewhere only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="0 takes a free one.")] = 8421,
    token_file: Annotated[
        str | None,
        typer.Option("--token-file", help="Ask for the token in this file. (default: REMUDA_DASHBOARD_TOKEN)"),
    ] = None,
    since: Annotated[str, typer.Option("--since", help="How far back it goes: 90m, 12h, 7d.")] = "24h",
    every: Annotated[
        float | None,
        typer.Option("--every", min=0.02, max=3_600, help="Seconds between looks (local 0.25, aws 5)."),
    ] = None,
    prices: opt.Prices = None,
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Show the fleet on a web page, as it changes. Read-only."""
    flags = {"prices": prices, "backend": backend, "dir": dir, "pool": pool, "log_format": log_format}
    from remuda.cli.commands import run_dashboard

    output = Output(as_json=as_json, quiet=quiet)
    chosen = {"host": host, "port": port, "token_file": token_file, "since": since, "every": every}
    return run_dashboard(flags, config, output, **chosen)


@app.command()
def drain(
    instances: opt.Instances = None,
    all_: Annotated[bool, typer.Option("--all", help="Every instance of the pool.")] = False,
    of_class: Annotated[str, typer.Option("--resource-class", help="All of a class.")] = "",
    of_ami: Annotated[str, typer.Option("--ami", help="All made from an image.")] = "",
    reason: opt.Reason = "",
    dry_run: opt.DryRun = False,
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Stop claiming: those at work finish their run and end, idle ones end at the next refresh."""
    flags = {"backend": backend, "dir": dir, "pool": pool, "log_format": log_format}
    from remuda.cli.commands import run_drain
    from remuda.controlplane.operator import InstanceSelector

    choice = InstanceSelector(instance_ids=tuple(instances or ()), everything=all_, resource_class=of_class, ami=of_ami)
    output = Output(as_json=as_json, quiet=quiet)
    return run_drain(flags, config, output, choice=choice, reason=reason, dry_run=dry_run)


@app.command()
def quarantine(
    instances: opt.Instances = None,
    last: Annotated[str, typer.Option("--for", help="How long it is kept: 30m, 4h, at most 7d.")] = "4h",
    reason: opt.Reason = "",
    dry_run: opt.DryRun = False,
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Take instances out of the pool and keep them for a look, until a limit."""
    flags = {"backend": backend, "dir": dir, "pool": pool, "log_format": log_format}
    from remuda.cli.commands import run_quarantine
    from remuda.controlplane.operator import InstanceSelector

    choice = InstanceSelector(instance_ids=tuple(instances or ()))
    output = Output(as_json=as_json, quiet=quiet)
    return run_quarantine(flags, config, output, choice=choice, last=last, reason=reason, dry_run=dry_run)


@app.command()
def terminate(
    instances: opt.Instances = None,
    all_: Annotated[bool, typer.Option("--all", help="Every instance of the pool.")] = False,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: opt.Reason = "",
    dry_run: opt.DryRun = False,
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """End instances now, jobs or not; asks first. Only what carries the pool's tag is ended."""
    flags = {"backend": backend, "dir": dir, "pool": pool, "log_format": log_format}
    from remuda.cli.commands import run_terminate
    from remuda.controlplane.operator import InstanceSelector

    choice = InstanceSelector(instance_ids=tuple(instances or ()), everything=all_)
    output = Output(as_json=as_json, quiet=quiet)
    return run_terminate(flags, config, output, choice=choice, reason=reason, dry_run=dry_run, sure=sure)


@app.command()
def doctor(
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    pool: opt.Pool = None,
    github_scope: opt.Scope = None,
    ami: opt.Ami = None,
    subnet_ids: opt.SubnetIds = None,
    security_group_ids: opt.SecurityGroupIds = None,
    iam_instance_profile: opt.InstanceProfile = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Check everything that the pool needs, and say what to fix. Changes nothing."""
    flags = _flags(locals())
    from remuda.cli.commands import run_doctor_checks

    return run_doctor_checks(flags, config, Output(as_json=as_json, quiet=quiet))


@app.command(name="config")
def config_(
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
) -> int:
    """Print every setting, its value and where it came from."""
    flags = _flags(locals())
    from remuda.cli.commands import run_config

    return run_config(flags, config, Output(as_json=as_json))


@app.command(name="run-workflow")
def run_workflow(
    file: Annotated[str, typer.Argument(help="A small workflow: jobs with needs, runs-on, matrix, run steps.")],
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    github_scope: opt.Scope = None,
    run_id: opt.RunId = None,
    run_attempt: opt.RunAttempt = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """Run a small workflow against the local GitHub and wait for its jobs."""
    flags = _flags({key: value for key, value in locals().items() if key != "file"})
    from remuda.cli.commands import run_workflow_file

    return run_workflow_file(flags, config, Output(as_json=as_json, quiet=quiet), file=file)


@app.command()
def demo(
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show it live on a page; at a terminal it stays open until Ctrl-C.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="With --dashboard: the page stays open without a terminal, too.")
    ] = False,
    backend: opt.Backend = None,
    dir: opt.Dir = None,
    config: opt.Config = None,
    log_format: opt.LogFormat = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> int:
    """The whole story in under two minutes, on this machine; verifies its own claims."""
    flags = _flags({key: value for key, value in locals().items() if key not in {"dashboard", "keep"}})
    from remuda.cli.commands import run_demo

    return run_demo(flags, config, Output(as_json=as_json, quiet=quiet), dashboard=dashboard, keep=keep)


@app.command(hidden=True)
def agent() -> None:
    """Run the agent of a machine (started by the machine itself)."""


def main(arguments: list[str]) -> int:
    """Run the `remuda` command and return its exit code."""
    return run_app(app, arguments)


def run_app(app: typer.Typer, arguments: list[str]) -> int:
    """Run a Typer application and return its exit code. With --json, usage errors are JSON documents too."""
    set_log_format(early_log_format(arguments, os.environ))
    output = Output(as_json="--json" in arguments)

    def call() -> int:
        try:
            code = app(arguments, standalone_mode=False)
        except Exit as done:
            return done.exit_code
        except Abort:
            return EXIT_INTERRUPTED
        except TyperException as error:
            message = error.format_message()
            raise UserError(message.rstrip("."), field=_option(error), fix=f"see {_path(error)} --help") from None
        return code if isinstance(code, int) else 0

    return command(output, call)


def _path(error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    return str(context.command_path) if context is not None else "remuda"


def _option(error: TyperException) -> str:
    parameter = getattr(error, "param", None)
    if parameter is not None and parameter.opts:
        return str(parameter.opts[0])
    return str(getattr(error, "option_name", "") or "")
