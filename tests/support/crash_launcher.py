"""`remuda` that kills itself at a chosen call: `python crash_launcher.py --crash store.apply:3:after -- provision …`.

The process wraps its ports and sends itself SIGKILL before or after the n-th call of an operation.
`--crash 'store.beat?busy=True:1:after'` counts only calls with this argument. With `--agent-crash`, the agents of
launched machines kill themselves once per machine; `--once FOLDER` holds a file for each machine whose agent did. The
supervisor restarts an agent with the same command.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

#: Modules of the commands that may crash: provision and release, refresh.
COMMAND_MODULES = ("remuda.cli.lifecycle",)
PORTS = ("store", "pool", "compute", "github", "machine", "runner")


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashTrigger:
    operation: str
    #: Name of an argument and its value as text; empty for any call.
    argument: str
    value: str
    number: int
    after: bool

    @classmethod
    def parse(cls, text: str) -> CrashTrigger:
        what, number, when = text.rsplit(":", 2)
        operation, _, condition = what.partition("?")
        argument, _, value = condition.partition("=")
        if when not in {"before", "after"} or operation.split(".")[0] not in PORTS:
            raise ValueError(f"{text!r} is not a crash point")
        return cls(operation=operation, argument=argument, value=value, number=int(number), after=when == "after")


class CrashAtCall:
    def __init__(self, point: CrashTrigger, mark: Path | None = None) -> None:
        self._point = point
        self._mark = mark
        self._count = 0

    def wrap(self, port: Any, name: str) -> Any:
        return port if port is None else _Port(port, name, self)

    def is_here(self, operation: str, arguments: dict[str, Any]) -> bool:
        point = self._point
        if operation != point.operation or (self._mark is not None and self._mark.exists()):
            return False
        if point.argument and str(arguments.get(point.argument)) != point.value:
            return False
        self._count += 1
        return self._count == point.number

    @property
    def after(self) -> bool:
        return self._point.after

    def die(self) -> NoReturn:
        if self._mark is not None:
            self._mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")


class _Port:
    def __init__(self, port: Any, name: str, crash: CrashAtCall) -> None:
        self._port, self._name, self._crash = port, name, crash

    def __getattr__(self, operation: str) -> Any:
        inner = getattr(self._port, operation)
        if not asyncio.iscoroutinefunction(inner):
            return inner

        async def call(*args: Any, **kwargs: Any) -> Any:
            here = self._crash.is_here(f"{self._name}.{operation}", kwargs)
            if here and not self._crash.after:
                self._crash.die()
            answer = await inner(*args, **kwargs)
            if here:
                self._crash.die()
            return answer

        return call


def run_cli(crash: CrashAtCall | None, agent_crash: str, once: str, arguments: Sequence[str]) -> int:
    commands = [_module(name) for name in COMMAND_MODULES]
    original = commands[0].open_context

    @asynccontextmanager
    async def open_context(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with original(*args, **kwargs) as context:
            if crash is None:
                yield context
                return
            ports = {name: crash.wrap(getattr(context, name), name) for name in ("store", "pool", "compute", "github")}
            yield replace(context, **ports)

    for module in commands:
        assert module.open_context is original
        module.open_context = open_context
    if agent_crash:
        _change_agents(agent_crash, once)
    return int(_module("remuda.cli.main").main(list(arguments)))


def _module(name: str) -> Any:
    """Import a module late, so that an agent does not import the command line."""
    return importlib.import_module(name)


def _change_agents(agent_crash: str, once: str) -> None:
    """Let machines run this program instead of `remuda agent`."""
    wiring = _module("remuda.wiring.local")
    original = wiring.LocalCompute

    def local_compute(**ports: Any) -> Any:
        _python, _m, _remuda, *agent = ports["agent_command"]
        this = [sys.executable, __file__, "--crash", agent_crash, "--once", once, "--"]
        return original(**{**ports, "agent_command": [*this, *agent]})

    wiring.LocalCompute = local_compute


def run_agent(crash: CrashAtCall, arguments: Sequence[str]) -> int:
    agent = _module("remuda.cli.agent")
    original = agent.Agent

    def wrapped(**ports: Any) -> Any:
        return original(**{name: crash.wrap(port, name) if name in PORTS else port for name, port in ports.items()})

    agent.Agent = wrapped
    return int(agent.main(list(arguments)))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crash", default="")
    parser.add_argument("--agent-crash", default="")
    parser.add_argument("--once", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(arguments)
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if command[:1] == ["agent"]:
        mark = Path(parsed.once) / os.environ["REMUDA_MACHINE"]
        return run_agent(CrashAtCall(CrashTrigger.parse(parsed.crash), mark), command[1:])
    crash = CrashAtCall(CrashTrigger.parse(parsed.crash)) if parsed.crash else None
    return run_cli(crash, parsed.agent_crash, parsed.once, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
