"""The program `bin/Runner.Listener` with its commands configure, remove and run."""

import base64
import json
import os
import pathlib
import sys

from . import VERSION
from .home import RunnerHome, RunnerInputs, is_forbidden_root, say

OK, TERMINATED = 0, 1


def main() -> int:
    root = pathlib.Path(sys.argv[0]).resolve().parent.parent
    home, inputs = RunnerHome(root), RunnerInputs(sys.argv[1:])
    if inputs.switch("version"):
        say(VERSION)
        return OK
    if is_forbidden_root():
        say("Must not run with sudo")
        return TERMINATED
    os.chdir(root)
    # Each command imports only what it needs, because the start-up time counts in tests and the demo.
    match inputs.commands[0] if inputs.commands else "run":
        case "configure":
            from .configure import configure  # noqa: PLC0415

            return configure(home, inputs)
        case "remove":
            from .configure import remove  # noqa: PLC0415

            return remove(home, inputs)
        case "run":
            from .listener import listen  # noqa: PLC0415

            packed = inputs.text("jitconfig")
            if packed is not None and not _unpack(home, packed):
                say("An error occurred: Invalid jit config.")
                return TERMINATED
            home.load_environment()
            return listen(home)
        case unknown:
            say(f"Unrecognized command-line input arguments: '{unknown}'. For usage refer to: .\\config.cmd --help")
            return TERMINATED


def _unpack(home: RunnerHome, packed: str) -> bool:
    try:
        for name, content in json.loads(base64.b64decode(packed)).items():
            home.save(pathlib.PurePath(name).name, json.loads(base64.b64decode(content)))
    except (ValueError, AttributeError):
        return False
    return True
