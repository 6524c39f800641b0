"""The command line: the commands, their own options, and the entry point.

A command's module is imported when it runs, so that `--help` and completion stay fast.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.exceptions import Abort, ClickException, Exit, NoSuchOption
from click.shell_completion import get_completion_class

from remuda import __version__
from remuda.cli.options import (
    HELP_WIDTH,
    Argument,
    GroupedCommand,
    fix_of_unknown_option,
    option,
    options_of,
    settings_of,
)
from remuda.cli.output import Output, early_log_format, set_log_format
from remuda.cli.run import EXIT_INTERRUPTED, load_settings, mistyped_variables, run_command
from remuda.config.declaration import DURATION_EXAMPLES, POOL_COMMANDS, Group, choice, duration, integer, text
from remuda.config.settings import SETTINGS
from remuda.disk import full_disk_explained
from remuda.domain.errors import UserError

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH}
_DAY_S = 86_400.0
_DRY_RUN = ("--dry-run", "Show what would be done and why; change nothing.")
_REASON = ("--reason", "Reason, for the history.")
_ALL = ("--all", "All instances of the pool.")
_WIDE = ("--wide", "Show whole ids, all columns and all rows, in lines as long as needed.")
PROGRAM = "remuda"
#: If it is set, click answers the shell's request for completions and exits.
VARIABLE = "_REMUDA_COMPLETE"
SHELLS = choice(("bash", "zsh", "fish"))
CURRENT = "current"


#: Sections of the commands in `--help`.
COMMAND_SECTIONS = {
    "Try it on this machine": ("demo", "up", "run-workflow", "down"),
    "Runners for workflows": ("provision", "release", "listen"),
    "Pool": ("deploy", "refresh", "scale-down", "budget", "config", "doctor", "destroy"),
    "Observe": ("status", "explain", "report", "dashboard"),
    "Intervene": ("drain", "quarantine", "terminate"),
}


class _App(click.Group):
    """`remuda` itself: commands by section, with whole sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        width = max(map(len, self.commands))
        for title, names in COMMAND_SECTIONS.items():
            with formatter.section(title):
                # Padded, so that the texts of all sections are aligned.
                formatter.write_dl([(f"{name:<{width}}", self.commands[name].short_help or "") for name in names])


@click.group(
    PROGRAM,
    cls=_App,
    context_settings=_CONTEXT,
    invoke_without_command=True,
    help="Warm, reusable EC2 runners for GitHub Actions: provision, run, release, reuse.",
)
@click.option("--version", is_flag=True, help="Show the version and exit.")
@click.option(
    "--install-completion",
    is_flag=False,
    flag_value=CURRENT,
    metavar=SHELLS.metavar,
    help="Install shell completion. (default: the login shell)",
)
@click.option(
    "--show-completion",
    is_flag=False,
    flag_value=CURRENT,
    metavar=SHELLS.metavar,
    help="Print the completion script. (default: for the login shell)",
)
@click.pass_context
def app(ctx: click.Context, *, version: bool, install_completion: str | None, show_completion: str | None) -> None:
    if version:
        click.echo(f"remuda {__version__}")
    elif show_completion is not None:
        click.echo(completion_script(app, shell_of(show_completion, "--show-completion")))
    elif install_completion is not None:
        _install(install_completion)
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    else:
        return
    ctx.exit()


def _install(value: str) -> None:
    shell = shell_of(value, "--install-completion")
    try:
        file = install_completion(app, shell, Path.home())
    except OSError as error:
        raise UserError(
            f"the completion cannot be installed: {error}",
            field="--install-completion",
            fix="use --show-completion and save the script yourself",
        ) from None
    click.echo(f"{shell} completion installed in {file}; start a new shell to use it")


def completion_script(app: click.Command, shell: str) -> str:
    completion = get_completion_class(shell)
    if completion is None:
        raise UserError(f"there is no completion for {shell!r}", field="--show-completion", fix="use bash, zsh or fish")
    return completion(app, {}, PROGRAM, VARIABLE).source()


def install_completion(app: click.Command, shell: str, home: Path) -> Path:
    """Write the completion script and make the shell load it. Idempotent."""
    script = completion_script(app, shell)
    if shell == "fish":
        file = home / ".config" / "fish" / "completions" / f"{PROGRAM}.fish"
    else:
        file = home / f".{PROGRAM}-complete.{shell}"
        _append_once(home / f".{shell}rc", f". ~/{file.name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script + "\n", encoding="utf-8")
    return file


def _append_once(file: Path, line: str) -> None:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if line not in text.splitlines():
        file.write_text(f"{text.rstrip()}\n{line}\n".lstrip(), encoding="utf-8")


def shell_of(value: str, field: str) -> str:
    """The named shell, or the login shell for `current`."""
    name = Path(os.environ.get("SHELL", "")).name if value == CURRENT else value
    if name not in SHELLS.choices:
        raise UserError(f"{field} must be {SHELLS.expected}, got {name[:20]!r}", field=field)
    return name


def _command(name: str, implementation: str, summary: str, *own: click.Parameter, more: str = "") -> None:
    """Add a command. `implementation` is "module:function" below `remuda`.

    The function gets the settings, the output, and the command's own options by name. It returns the exit code.
    """
    flags = {declared.name for declared in settings_of(name)}

    def call(**values: Any) -> int:
        output = Output(as_json=values.pop("as_json"), quiet=values.pop("quiet"), wide=bool(values.pop("wide", False)))
        config = values.pop("config")
        given = {each: values.pop(each) for each in flags}
        settings = load_settings(given, config)
        Output.settings = settings
        for warning in mistyped_variables():
            output.say(f"warning: {warning}", style="yellow")
        if settings.backend == "aws" and name in POOL_COMMANDS:
            import_module("remuda.wiring.aws").check_region()
        module, _, function = implementation.partition(":")
        run: Callable[..., int] = getattr(import_module(f"remuda.{module}"), function)
        # The objects of the imported modules live as long as the process.
        gc.freeze()
        gc.enable()
        with full_disk_explained(settings.dir.absolute(), has_services=settings.backend == "local"):
            return run(settings, output, **values)

    common = (
        option(
            "--config",
            "Settings file. (default: remuda.toml, if it exists)",
            text(metavar="FILE"),
            section=Group.COMMON,
        ),
        option("--json", "Print one JSON document on stdout.", to="as_json", section=Group.OUTPUT),
        option("--quiet", "Print no progress on stderr.", section=Group.OUTPUT),
    )
    params = [*own, *options_of(name), *common]
    app.add_command(
        GroupedCommand(
            name,
            callback=call,
            params=list(params),
            help=f"{summary} {more}".strip(),
            short_help=summary,
            context_settings=_CONTEXT,
        )
    )


def _instances() -> Argument:
    return Argument(
        ["instances"], nargs=-1, metavar="[INSTANCE]...", help="Ids of the instances; 'remuda status' lists them."
    )


def _region() -> click.Option:
    return option(
        "--region", "Region of AWS. (default: AWS_REGION, or that of the profile)", text(metavar="REGION"), default=""
    )


def _every() -> click.Option:
    return option("--every", "Repeat after this time, until interrupted.", duration(0.2, _DAY_S))


_command(
    "up",
    "cli.local_backend:run_up",
    "Start the local backend: a local GitHub and a sweeper.",
    more="If runner sets are configured, it also starts their listener.",
)
_command(
    "down",
    "cli.local_backend:run_down",
    "Stop the local backend and terminate its instances.",
    option("--purge", "Remove the state directory, too."),
)
_command(
    "refresh",
    "cli.lifecycle:run_refresh",
    "Apply the configuration, renew tokens and sweep the pool.",
    option("--sweep-only", "Do not change the stored configuration."),
    option("--reset", "Set what is not given to its default, instead of keeping the stored value."),
    _every(),
    more="The sweep retires expired, lost and interrupted instances and removes orphans.",
)
_command(
    "listen",
    "cli.listen:run_listen",
    "Serve the runner sets: runners for jobs without a provision in the workflow.",
    option("--once", "Reconcile once and exit."),
    option(
        "--alive-file",
        "File to touch every 30 seconds, for the health check of a container.",
        text(metavar="FILE"),
        default="",
    ),
    more="Runs until interrupted. A second listener of the pool waits as a standby. SIGHUP: read the configuration.",
)
_command(
    "provision",
    "cli.lifecycle:run_provision",
    "Get runners for a run: reused if possible, else new.",
    more="The run gets all of its runners or none.",
)
_command(
    "release",
    "cli.lifecycle:run_release",
    "Give a run's runners back to the pool.",
    more="Each instance deregisters, is cleaned and returns to the pool, or is terminated.",
)
_command(
    "scale-down",
    "cli.lifecycle:run_scale_down",
    "Terminate idle runners beyond the quota, and orphans.",
    option(*_DRY_RUN),
    option(*_WIDE, section=Group.OUTPUT),
    _every(),
    more="It also works on instances of terraform-aws-github-runner.",
)
_command(
    "status",
    "cli.read:run_status",
    "Show runner sets, instances, launches, pools, runs and warnings.",
    option("--all", "Show terminated instances, too.", to="everything"),
    option(*_WIDE, section=Group.OUTPUT),
    option("--watch", "Keep showing the status until interrupted."),
    option(
        "--every",
        "With --watch: time between updates. (default: 1s on the local backend, 5s on AWS)",
        duration(0.2, 3_600),
    ),
)
_command(
    "explain",
    "cli.read:run_explain",
    "Show the history of a run, a job, a runner set or an instance, with reasons.",
    Argument(
        ["subject"],
        metavar="RUN|JOB|SET|INSTANCE",
        help="A run id, a job id, set.NAME for a runner set, an instance id, or the name of a runner on GitHub.",
    ),
    option(*_WIDE, section=Group.OUTPUT),
    more="It ends with what happens next.",
)
_command(
    "report",
    "cli.read:run_report",
    "Show reuse, waiting times, jobs of runner sets, instance hours, cost and savings.",
    option(
        "--since",
        f"Begin of the period: {DURATION_EXAMPLES}, or a date such as 2026-11-01. (default: 7d)",
        text(metavar="DURATION|DATE"),
        default="7d",
    ),
    option("--html", "Write the report to this file as a single HTML page.", text(metavar="FILE")),
    option(*_WIDE, section=Group.OUTPUT),
)
_command(
    "dashboard",
    "web.dashboard.server:run_dashboard",
    "Serve a read-only web page with the live state of the pool.",
    option(
        "--host",
        "Address to listen on; any other than the default requires a token. (default: 127.0.0.1)",
        text(metavar="ADDRESS"),
        default="127.0.0.1",
    ),
    option("--port", "Port to listen on; 0 selects a free one. (default: 8421)", integer(0, 65_535), default=8421),
    option("--token-file", "Require the token in this file. (default: REMUDA_DASHBOARD_TOKEN)", text(metavar="FILE")),
    option(
        "--since", "Period to show, at most 30d. (default: 24h)", duration(1, 30 * _DAY_S), to="since_s", default="24h"
    ),
    option(
        "--every",
        "Time between updates. (default: 0.25s on the local backend, 5s on AWS)",
        duration(0.02, 3_600),
    ),
)
_command(
    "drain",
    "cli.operator:run_drain",
    "Stop reusing instances; they terminate when they are free.",
    _instances(),
    option(*_ALL, to="everything"),
    option("--resource-class", "All instances of this resource class.", text(metavar="CLASS"), default=""),
    option("--ami", "All instances launched from this image.", text(metavar="AMI"), default=""),
    option(*_REASON, text(), default=""),
    option(*_DRY_RUN),
    more="A busy instance finishes its run first; an idle one is terminated by the next refresh.",
)
_command(
    "quarantine",
    "cli.operator:run_quarantine",
    "Keep instances out of the pool for inspection.",
    _instances(),
    option(
        "--for", "How long to keep them, at most 7d. (default: 4h)", duration(1, 7 * _DAY_S), to="for_s", default="4h"
    ),
    option(*_REASON, text(), default=""),
    option(*_DRY_RUN),
)
_command(
    "terminate",
    "cli.operator:run_terminate",
    "Terminate instances now, even if a job runs on them.",
    _instances(),
    option(*_ALL, to="everything"),
    option("--yes", "Do not ask for confirmation.", to="confirmed"),
    option(*_REASON, text(), default=""),
    option(*_DRY_RUN),
    more="Asks for confirmation. Only instances with the tag of the pool are terminated.",
)
_command(
    "budget",
    "cli.budget:run_budget",
    "Show or set what the pool's machines may cost per month.",
    Argument(
        ["amount"],
        required=False,
        metavar="[DOLLARS]",
        help="The new limit; 0 removes it. Without, the budget is shown.",
    ),
    more="When it is spent, no machine is launched until the next month. Running jobs continue, and idle machines are "
    "used. Every refresh counts the cost.",
)
_command(
    "deploy",
    "cli.deploy:run_deploy",
    "Create or upgrade a pool on AWS: everything that it needs.",
    _region(),
    option("--vpc", "VPC of the machines. (default: the default VPC, or the only one)", text(metavar="ID"), default=""),
    option(
        "--github-token",
        "File with the GitHub token. (default: REMUDA_GITHUB_TOKEN)",
        text(metavar="@FILE"),
        default="",
    ),
    option(
        "--github-app-key",
        "File with the private key of the GitHub App. (default: REMUDA_GITHUB_APP_KEY)",
        text(metavar="@FILE"),
        default="",
    ),
    option(
        "--dist",
        "Folder that `make dist` has written, or address of a release. (default: dist, or the release of this version)",
        text(metavar="FOLDER|URL"),
        default="",
    ),
    option(
        "--parameter",
        "Another parameter of the stack, such as AlarmTopicArn=arn:aws:sns:REGION:ACCOUNT:TOPIC; may be repeated.",
        text(metavar="NAME=VALUE"),
        repeated=True,
    ),
    option(
        "--listener",
        "Where the listener of --runner-sets runs: on an instance of the stack, or none in the stack. "
        "(default: instance, which exists if there are runner sets)",
        choice(("instance", "none")),
    ),
    option(
        "--allow-replacement",
        "Try a change that replaces the table, with its records, or a resource with a fixed name.",
    ),
    option("--yes", "Do not ask.", to="confirmed"),
    option(*_DRY_RUN),
    more="Shows the changes first. An interrupted deployment continues when it is run again. Settings that are not "
    "given keep their values.",
)
_command(
    "destroy",
    "cli.deploy:run_destroy",
    "Delete a pool on AWS: its machines, the stack and everything else.",
    _region(),
    option("--force", "Terminate the machines now, with their jobs, instead of waiting for the jobs."),
    option("--keep-data", "Keep the table, the logs and the secret with the GitHub credential."),
    option("--yes", "Do not ask.", to="confirmed"),
    option(*_DRY_RUN),
    more="Asks before it deletes data. An interrupted removal continues when it is run again.",
)
_command(
    "doctor",
    "cli.read:run_doctor",
    "Check everything that the pool needs, and say what to fix.",
    option(*_WIDE, section=Group.OUTPUT),
)
#: Kind of the name of a pool.
POOL = SETTINGS["pool"].kind
_command(
    "config",
    "cli.read:run_config",
    "Show every setting, its value and its source.",
    option(
        "--pool",
        "Show the configuration that the pool has stored, and how the settings here differ from it.",
        replace(POOL, metavar="[NAME]", parse=lambda value: value and POOL.parse(value)),
        without_value="",
    ),
    option(*_WIDE, section=Group.OUTPUT),
)
_command(
    "run-workflow",
    "cli.run_workflow:run_workflow_file",
    "Run a small workflow against the local GitHub.",
    Argument(["file"], metavar="FILE", help="A workflow with run steps and actions/checkout."),
    option("--rerun-failed", "Run the failed jobs of the last run again, and those that need them."),
    option("--verbose", "Show the whole output of each job, not only the last lines of failed steps."),
)
_command(
    "demo",
    "cli.demo:run_demo",
    "Show the whole lifecycle on this machine, in two minutes.",
    option("--dashboard", "Serve the dashboard; on a terminal it stays open until Ctrl-C."),
    option("--keep", "With --dashboard: keep the page open without a terminal, too."),
    option("--verbose", "Show every command, its progress, and every check."),
    more="The demo verifies its own claims.",
)


def main(arguments: list[str]) -> int:
    """Run the `remuda` command and return its exit code."""
    return run_app(app, arguments)


def run_app(app: click.Command, arguments: list[str]) -> int:
    """Run a click application and return its exit code. With --json, usage errors are JSON documents, too."""
    set_log_format(early_log_format(arguments, os.environ))
    Output.settings = None
    output = Output(as_json="--json" in arguments)

    def call() -> int:
        try:
            code = app.main(arguments, prog_name=app.name, standalone_mode=False, complete_var=VARIABLE)
        except Exit as done:
            return done.exit_code
        except Abort:
            return EXIT_INTERRUPTED
        except ClickException as error:
            path = _command_path(error, app, arguments)
            message, _, guess = error.format_message().partition("Did you mean")
            # click has it in parentheses if there are several.
            guess = f"did you mean{guess.rstrip(')')} " if guess else ""
            fix = f"{guess}see {path} --help"
            if isinstance(error, NoSuchOption):
                fix = fix_of_unknown_option(error.option_name, error.ctx) or fix
            raise UserError(message.rstrip("( ").rstrip("."), field=_field(error), fix=fix) from None
        return code if isinstance(code, int) else 0

    return run_command(output, call)


def _command_path(error: ClickException, app: click.Command, arguments: list[str]) -> str:
    context = getattr(error, "ctx", None)
    if context is not None:
        return str(context.command_path)
    # An option without its value.
    commands = app.commands if isinstance(app, click.Group) else {}
    return " ".join([str(app.name), *(name for name in arguments[:1] if name in commands)])


def _field(error: ClickException) -> str:
    parameter = getattr(error, "param", None)
    if isinstance(parameter, click.Option):
        return parameter.opts[0]
    return str(getattr(error, "option_name", "") or "")
