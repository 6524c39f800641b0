"""The program `bin/Runner.Listener` with its commands `configure` and `remove` (`config.sh`), `run` and `warmup`."""

import json
import os
import pathlib
import sys
from typing import Any

from .credentials import InvalidConfiguration, RunnerSettings, load_settings, unpack
from .home import CREDENTIALS_FILE, KEY_FILE, RUNNER_FILE, RunnerHome, RunnerInputs, check_readable, say, say_error
from .protocol import Call, HttpResponse

OK, TERMINATED = 0, 1
#: Runner.Listener/Configuration/Validators.cs, LabelsValidator.
MAX_LABEL_CHARS = 256

ALREADY_CONFIGURED = (
    "Cannot configure the runner because it is already configured. To reconfigure the runner, "
    "run 'config.cmd remove' or './config.sh remove' first."
)

#: The first lines of the text in Runner.Listener/Runner.cs, PrintUsage.
USAGE = """
Commands:
 ./config.sh         Configures the runner
 ./config.sh remove  Unconfigures the runner
 ./run.sh            Runs the runner interactively. Does not require any options.
"""


def main() -> int:
    # Without links, like the real program: after an update, its folder is not `bin`.
    programs = pathlib.Path(sys.argv[0]).resolve().parent
    root = programs.parent
    home = RunnerHome(root, programs)
    home.load_environment()
    try:
        # Runner.Listener/Program.cs, MainAsync, for every command. Only config.sh and run-helper.sh refuse root.
        check_readable(root)
    except PermissionError as problem:
        say_error(f"An error occurred: {problem}")
        return TERMINATED
    inputs = RunnerInputs(sys.argv[1:])
    # Runner.Listener/Runner.cs, ExecuteCommand: before all commands.
    if inputs.switch("help") or inputs.switch("version"):
        say(USAGE if inputs.switch("help") else home.version)
        return OK
    os.chdir(root)
    try:
        return _execute(home, inputs)
    except InvalidConfiguration as problem:
        # Runner.Listener/Program.cs, MainAsync.
        say_error(f"An error occurred: {problem}")
        return TERMINATED


def _execute(home: RunnerHome, inputs: RunnerInputs) -> int:
    match inputs.commands[0] if inputs.commands else "run":
        case "configure":
            return configure(home, inputs)
        case "remove":
            return remove(home, inputs)
        case "run":
            from .listener import listen  # noqa: PLC0415 - start-up time counts in tests and the demo

            packed = inputs.text("jitconfig")
            try:
                for name, content in unpack(packed or "e30=").items():
                    home.write(pathlib.PurePath(name).name, content)
            except InvalidConfiguration as problem:
                say_error(str(problem))
                return TERMINATED
            return listen(home)
        case "warmup":
            from . import listener, worker  # noqa: F401, PLC0415 - the real one loads all assemblies and says nothing

            return OK
        case unknown:
            say_error(
                f"Unrecognized command-line input arguments: '{unknown}'. For usage refer to: .\\config.cmd --help"
            )
            return TERMINATED


def configure(home: RunnerHome, inputs: RunnerInputs) -> int:
    if home.configured():
        say_error(ALREADY_CONFIGURED)
        return TERMINATED
    url, token = inputs.text("url"), inputs.text("token")
    if url is None or token is None:
        return _invalid("url" if url is None else "token")
    if any(len(label) > MAX_LABEL_CHARS for label in _labels(inputs)):
        return _invalid("labels")
    say("\n# Authentication\n\n")
    try:
        body = _request(inputs, url, token)
        response = Call(_server(url), "POST", "/_runner/register", body=body, version=home.version).response()
    except OSError as problem:
        say_error(f"Failed to connect. {problem}")
        return TERMINATED
    if response.status != 201:
        say_error(_say_rejection(response, url))
        return TERMINATED
    if inputs.switch("disableupdate") and not response.body["disable_update"]:
        say_error("The GitHub server does not support configuring a self-hosted runner with 'DisableUpdate' flag.")
        return TERMINATED
    say("√ Connected to GitHub\n\n# Runner Registration\n\n")
    say("√ Runner successfully added\n√ Runner connection is good\n\n# Runner settings\n\n")
    files = response.body["files"]
    files[RUNNER_FILE]["disableUpdate"] = inputs.switch("disableupdate")
    home.save(KEY_FILE, files[KEY_FILE])
    home.save(CREDENTIALS_FILE, files[CREDENTIALS_FILE])
    home.save(RUNNER_FILE, files[RUNNER_FILE])
    say("√ Settings Saved.\n")
    return OK


def remove(home: RunnerHome, inputs: RunnerInputs) -> int:
    """Runner.Listener/Configuration/ConfigurationManager.cs, UnconfigureAsync."""
    if inputs.switch("local"):
        home.forget()
        return OK
    say("\n# Runner removal\n\n")
    settings = load_settings(home)
    if settings is None or home.load(CREDENTIALS_FILE) is None:
        say("Cannot connect to server, because config files are missing. Skipping removing runner from the server.")
    else:
        token = inputs.text("token")
        if token is None:
            return _invalid("token")
        if not _remove_from_server(settings, token):
            return TERMINATED
        say("\n√ Runner removed successfully")
    home.forget()
    return OK


def _remove_from_server(settings: RunnerSettings, token: str) -> bool:
    """Remove the registration by one of the two flows. GitHub chose it at the registration."""
    url, runner_id = settings.github_url, settings.agent_id
    if not url:
        # A just-in-time registration: the service does not accept a removal token in place of an access token.
        say_error(f"Failed: Removing runner from the server\nYou are not authorized to access {settings.server_url}.")
        return False
    try:
        body = {"url": url, "token": token, "runner_id": runner_id}
        response = Call(settings.server_url, "POST", "/_runner/remove", body=body).response()
    except OSError as problem:
        say_error(f"Failed: Removing runner from the server\n{problem}")
        return False
    if response.status == 204:
        return True
    if settings.use_runner_admin_flow:
        # Runner.Common/RunnerDotcomServer.cs, DeleteRunnerAsync. A registration that is already gone is a failure, and
        # the files stay. The real runner repeats requests that fail with another status twice.
        problem_text = _say_status(response, f"Delete {_entity(url)}/runners/{runner_id}")
    elif response.status == 404:
        say("Does not exist. Skipping Removing runner from the server")
        return True
    else:
        problem_text = _say_rejection(response, url)
    say_error(f"Failed: Removing runner from the server\n{problem_text}")
    return False


def _request(inputs: RunnerInputs, url: str, token: str) -> dict[str, Any]:
    return {
        "url": url,
        "token": token,
        "name": inputs.text("name") or os.uname().nodename,
        "labels": _labels(inputs),
        "default_labels": not inputs.switch("no-default-labels"),
        "ephemeral": inputs.switch("ephemeral"),
        "replace": inputs.switch("replace"),
        "disable_update": inputs.switch("disableupdate"),
        "group": inputs.text("runnergroup"),
        "work": inputs.text("work"),
    }


def _labels(inputs: RunnerInputs) -> list[str]:
    """Like the real runner: labels are split at commas, but not trimmed."""
    return [label for label in (inputs.text("labels") or "").split(",") if label]


def _invalid(name: str) -> int:
    say_error(f"Invalid configuration provided for {name}. Terminating unattended configuration.")
    return TERMINATED


def _say_rejection(response: HttpResponse, url: str) -> str:
    """Describe a response to a token, or to a request that follows. Return the text of the error."""
    if response.status in {409, 422}:
        return response.message
    # GitHub does not tell whether the token or the repository is unknown.
    status = 404 if response.status == 401 else response.status
    request = f"POST {_server(url)}/api/v3/actions/runner-registration"
    return _say_status(HttpResponse(status, response.body), request)


def _say_status(response: HttpResponse, request: str) -> str:
    """Describe a response. Return the text of the error.

    Runner.Common/RunnerDotcomServer.cs, RetryRequest; the same text is in ConfigurationManager.cs.
    """
    from http import HTTPStatus  # noqa: PLC0415 - start-up time counts in tests and the demo

    phrase = HTTPStatus(response.status).phrase
    say_error(f"Http response code: {phrase.replace(' ', '')} from '{request}' (Request Id: )")
    say_error(json.dumps(response.body))
    return f"Response status code does not indicate success: {response.status} ({phrase})."


def _entity(url: str) -> str:
    """RunnerDotcomServer.cs, GetEntityUrl, for servers other than github.com."""
    path = url.removeprefix(_server(url)).strip("/")
    return f"{_server(url)}/api/v3/{'repos' if '/' in path else 'orgs'}/{path}/actions"


def _server(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.partition("/")[0]
