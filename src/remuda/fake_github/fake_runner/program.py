"""The program `bin/Runner.Listener` with its commands `configure` and `remove` (`config.sh`) and `run`."""

import base64
import json
import os
import pathlib
import sys
from typing import Any

from . import VERSION
from .home import CREDENTIALS_FILE, RUNNER_FILE, RunnerHome, RunnerInputs, is_forbidden_root, say
from .protocol import Call, HttpResponse

OK, TERMINATED = 0, 1

ALREADY_CONFIGURED = (
    "Cannot configure the runner because it is already configured. To reconfigure the runner, "
    "run 'config.cmd remove' or './config.sh remove' first."
)


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
    match inputs.commands[0] if inputs.commands else "run":
        case "configure":
            return configure(home, inputs)
        case "remove":
            return remove(home, inputs)
        case "run":
            from .listener import listen  # noqa: PLC0415 - start-up time counts in tests and the demo

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


def configure(home: RunnerHome, inputs: RunnerInputs) -> int:
    if home.configured():
        say(ALREADY_CONFIGURED)
        return TERMINATED
    url, token = inputs.text("url"), inputs.text("token")
    if url is None or token is None:
        return _missing("url" if url is None else "token")
    say("\n# Authentication\n\n")
    try:
        response = Call(_server(url), "POST", "/_runner/register", body=_request(inputs, url, token)).response()
    except OSError as problem:
        say(f"Failed to connect. {problem}")
        return TERMINATED
    if response.status != 201:
        return _rejected(response, url)
    if inputs.switch("disableupdate") and not response.body["disable_update"]:
        say("The GitHub server does not support configuring a self-hosted runner with 'DisableUpdate' flag.")
        return TERMINATED
    say("√ Connected to GitHub\n\n# Runner Registration\n\n")
    say("√ Runner successfully added\n√ Runner connection is good\n\n# Runner settings\n\n")
    files = response.body["files"]
    files[RUNNER_FILE]["disableUpdate"] = inputs.switch("disableupdate")
    home.save(CREDENTIALS_FILE, files[CREDENTIALS_FILE])
    home.save(RUNNER_FILE, files[RUNNER_FILE])
    say("√ Settings Saved.\n")
    return OK


def remove(home: RunnerHome, inputs: RunnerInputs) -> int:
    say("\n# Runner removal\n\n")
    settings = home.load(RUNNER_FILE)
    if settings is None:
        say("Cannot connect to server, because config files are missing. Skipping removing runner from the server.")
    elif not inputs.switch("local"):
        token = inputs.text("token")
        if token is None:
            return _missing("token")
        if _remove_from_server(settings, token) != OK:
            return TERMINATED
    home.forget()
    return OK


def _remove_from_server(settings: dict[str, Any], token: str) -> int:
    url = settings["gitHubUrl"]
    body = {"url": url, "token": token, "runner_id": settings["agentId"]}
    try:
        response = Call(settings["serverUrl"], "POST", "/_runner/remove", body=body).response()
    except OSError as problem:
        say(f"Failed: Removing runner from the server\n{problem}")
        return TERMINATED
    if response.status == 204:
        say("√ Runner removed successfully")
        return OK
    if response.status == 404:
        say("Does not exist. Skipping Removing runner from the server")
        return OK
    say("Failed: Removing runner from the server")
    return _rejected(response, url)


def _request(inputs: RunnerInputs, url: str, token: str) -> dict[str, Any]:
    labels = inputs.text("labels")
    return {
        "url": url,
        "token": token,
        "name": inputs.text("name") or os.uname().nodename,
        # Like the real runner: labels are split at commas, but not trimmed.
        "labels": [] if labels is None else [label for label in labels.split(",") if label],
        "default_labels": not inputs.switch("no-default-labels"),
        "ephemeral": inputs.switch("ephemeral"),
        "replace": inputs.switch("replace"),
        "disable_update": inputs.switch("disableupdate"),
        "group": inputs.text("runnergroup"),
        "work": inputs.text("work"),
    }


def _missing(name: str) -> int:
    say(f"Invalid configuration provided for {name}. Terminating unattended configuration.")
    return TERMINATED


def _rejected(response: HttpResponse, url: str) -> int:
    if response.status in {401, 404}:
        say(f"Http response code: NotFound from 'POST {_server(url)}/actions/runner-registration'")
    say(response.message)
    return TERMINATED


def _server(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.partition("/")[0]
