"""Generator of the parts of the docs that come from the code. With --check it fails if one is not current."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from remuda.action.step import BROKER_MODES, SECRETS, SETTINGS_BY_MODE, SWITCHES
from remuda.cli.main import COMMAND_SECTIONS, app
from remuda.cli.options import OWN_OPTIONS, GroupedOption
from remuda.config.declaration import Group
from remuda.config.settings import SETTINGS
from remuda.domain.reporting.warnings import WarningKind
from remuda.domain.transitions import TRANSITIONS, RetireReason
from remuda.web.metrics import METRICS
from simulation.exhaustive import read_figures
from simulation.faults import Fault
from simulation.invariants import INVARIANTS
from simulation.mutants import MUTANTS
from tests.support import kernel_resources

DOCS = Path(__file__).parent
BEGIN = "<!-- generated: {} -->"
END = "<!-- end of {} -->"


def state_diagram() -> str:
    lines = ["```mermaid", "stateDiagram-v2"]
    for row in TRANSITIONS:
        for source in sorted(row.sources, key=str):
            if row.target is None:
                continue
            start = source.value if source else "[*]"
            lines.append(f"    {start} --> {row.target.value} : {row.name.split('-')[0]}")
    lines += ["    terminated --> [*]", "```"]
    return "\n".join(lines)


def transition_table() -> str:
    lines = ["| row | from | to | by | when | effect |", "|---|---|---|---|---|---|"]
    for row in TRANSITIONS:
        sources = ", ".join(sorted(source.value if source else "(none)" for source in row.sources))
        target = row.target.value if row.target else "(stays)"
        actors = ", ".join(actor.value for actor in row.by)
        lines.append(f"| `{row.name}` | {sources} | {target} | {actors} | {row.when} | {row.effect} |")
    return "\n".join(lines)


def settings_table() -> str:
    lines = []
    for group in Group:
        lines += ["", f"### {group}", "", "| setting | type | default | meaning | flag of |", "|---|---|---|---|---|"]
        for item in SETTINGS.values():
            if item.group is not group:
                continue
            kind = "`true` or `false`" if item.kind.is_boolean else f"`{item.kind.metavar}`".replace("|", "\\|")
            commands = "every command" if len(item.commands) > 10 else ", ".join(item.commands)
            columns = (f"`{item.key}`", kind, item.shown_default or "(none)", item.description, commands or "(none)")
            lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines[1:])


def invariants_table() -> str:
    lines = ["| | what must hold |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {what} |" for name, what in INVARIANTS.items())])


def faults_table() -> str:
    lines = ["| fault | what happens |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{fault}` | {fault.meaning} |" for fault in Fault)])


def mutant_table() -> str:
    lines = ["| class | mutant | description |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {mutant.kind} | `{mutant.name}` | {mutant.bug} |" for mutant in MUTANTS)])


def searches_table() -> str:
    figures = read_figures()
    if not figures:
        sys.exit("the figures of the searches are of other models; run python -m simulation.exhaustive --all")
    lines = ["| world | states | actions | depth | seconds |", "|---|---|---|---|---|"]
    for world, item in figures.items():
        numbers = f"{item['states']:,} | {item['actions']:,} | {item['depth']} | {item['seconds']}"
        lines.append(f"| {world} | {numbers} |")
    return "\n".join(lines)


def action() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DOCS.parent / "action.yml").read_text(encoding="utf-8"))
    return document


def commands_table() -> str:
    """Every command with its arguments and own options; settings are on a page of their own."""
    lines = ["| command | description |", "|---|---|"]
    for names in COMMAND_SECTIONS.values():
        for name in names:
            command = app.commands[name]
            lines.append(f"| `{_usage(command)}` | {(command.help or '').replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def _usage(command: click.Command) -> str:
    words = ["remuda", command.name or ""]
    for item in command.params:
        if isinstance(item, click.Argument):
            words.append(item.make_metavar(click.Context(command)))
        elif isinstance(item, GroupedOption) and item.section == OWN_OPTIONS:
            value = f" {item.metavar}" if item.metavar else ""
            words.append(f"[{item.opts[0]}{value}]")
    return " ".join(words).replace("|", "\\|")


def warnings_table() -> str:
    lines = ["| kind | meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{kind}` | {kind.meaning} |" for kind in WarningKind)])


def inputs_table() -> str:
    lines = ["| input | modes | meaning |", "|---|---|---|"]
    for name, entry in action()["inputs"].items():
        modes = [mode for mode, used in SETTINGS_BY_MODE.items() if name in used or SWITCHES.get(name) == mode]
        modes += BROKER_MODES if name in {"broker-url", "direct"} else ()
        used_by = "all" if len(modes) in {0, len(SETTINGS_BY_MODE)} else ", ".join(modes)
        secret = " A secret." if name in SECRETS else ""
        lines.append(f"| `{name}` | {used_by} | {entry['description']}{secret} |")
    return "\n".join(lines)


def outputs_table() -> str:
    lines = ["| output | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {entry['description']} |" for name, entry in action()["outputs"].items()]
    return "\n".join(lines)


def metrics_table() -> str:
    lines = ["| metric | type | labels | what |", "|---|---|---|---|"]
    for item in METRICS:
        labels = ", ".join(f"`{label}`" for label in item.labels) or "(none)"
        lines.append(f"| `{item.name}` | {item.kind} | {labels} | {item.help} |")
    return "\n".join(lines)


def endings_line() -> str:
    return ", ".join(f"`{name}`" for name in RetireReason)


def decisions_list() -> str:
    lines = []
    for file in sorted((DOCS / "adr").glob("[0-9]*.md")):
        number, _, title = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(". ")
        if int(file.name.partition("-")[0]) != int(number) or not title:
            sys.exit(f"{file.name} does not begin with its number and title")
        lines.append(f"{number}. [{title}]({file.name})")
    return "\n".join(lines)


def waiting_times() -> str:
    """Waiting times of jobs, from the figures of the benchmarks."""
    document = json.loads((DOCS / "benchmarks" / "figures.json").read_text(encoding="utf-8"))
    measured = {item["name"]: f"{item['measured']:.2f} s" for item in document["figures"]}
    cold = measured["cold provision, N = 1, agent ready after 7.3 s"]
    warm = measured["warm provision, N = 1, registration 0"]
    ten = measured["warm provision, N = 10, registration 2.5 s"]
    broker = measured["broker: warm provision, N = 1, whole step"]
    direct = measured["direct: step starts → first AWS call"]
    hot = measured.get("set, hot machine: job queued → job started", "`make demo` measures it on the local GitHub")
    rows = (
        (
            "cold",
            "a machine boots and its runner registers",
            f"{cold} if its agent is ready after 7.3 s; EC2 and your image decide",
        ),
        (
            "warm",
            "an idle machine is taken and its runner registers",
            f"{warm} plus the registration; {ten} for ten runners if that takes 2.5 s",
        ),
        (
            "hot",
            "a runner of a set listens before there is a job",
            f"{hot}; no call of Remuda is on the way",
        ),
        (
            "provision job",
            "the step that gets the runners, warm",
            f"{broker} through the broker; without it {direct} to the first call, with the download of the bundle",
        ),
    )
    lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join(("| start | what happens | measured |", "|---|---|---|", *lines))


#: File, name of the part, and what makes it.
PARTS = (
    ("reference/lifecycle.md", "state diagram", state_diagram),
    ("reference/lifecycle.md", "transitions", transition_table),
    ("reference/commands.md", "commands", commands_table),
    ("reference/commands.md", "warnings", warnings_table),
    ("reference/settings.md", "settings", settings_table),
    ("reference/metrics.md", "metrics", metrics_table),
    ("reference/metrics.md", "endings", endings_line),
    ("reference/simulation.md", "invariants", invariants_table),
    ("reference/simulation.md", "faults", faults_table),
    ("reference/simulation.md", "mutants", mutant_table),
    ("reference/simulation.md", "searches", searches_table),
    ("howto/github-action.md", "inputs", inputs_table),
    ("howto/github-action.md", "outputs", outputs_table),
    ("reference/kernel-state.md", "resources", kernel_resources.table),
    ("adr/README.md", "decisions", decisions_list),
    ("../README.md", "waiting times", waiting_times),
)


def main(arguments: list[str]) -> int:
    stale = []
    for name, part, make in PARTS:
        file = DOCS / name
        text = file.read_text(encoding="utf-8")
        begin, end = BEGIN.format(part), END.format(part)
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            sys.exit(f"{name} lacks the marks of {part!r}")
        fresh = f"{head}{begin}\n{make()}\n{end}{tail}"
        if fresh != text:
            stale.append(name)
            if "--check" not in arguments:
                file.write_text(fresh, encoding="utf-8")
    if stale and "--check" in arguments:
        sys.stderr.write(f"not current: {', '.join(sorted(set(stale)))}; run make docs\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
