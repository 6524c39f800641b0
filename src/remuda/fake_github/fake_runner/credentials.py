"""The runner's files `.runner`, `.credentials` and `.credentials_rsaparams`: reading them as the real runner does.

`config.sh` and GitHub's just-in-time configurations write the same keys in different cases, and the latter give texts
for numbers and truth values. The real runner accepts both.
"""

import base64
import json
from typing import Any, NamedTuple

from .home import CREDENTIALS_FILE, KEY_FILE, RUNNER_FILE, TRUE, RunnerHome

#: Runner.Listener/Configuration/IRSAKeyManager.cs, RSAParametersSerializable. Here case matters.
KEY_PARAMETERS = ("d", "dp", "dq", "exponent", "inverseQ", "modulus", "p", "q")


class InvalidConfiguration(Exception):
    """The files cannot be used. The text is that of the real runner's exception."""


class RunnerSettings(NamedTuple):
    """What is needed of `.runner` (Runner.Common/ConfigurationStore.cs, RunnerSettings)."""

    agent_id: int
    agent_name: str
    server_url: str
    #: For sessions and jobs.
    server_url_v2: str
    #: Empty for a just-in-time registration.
    github_url: str
    work_folder: str
    ephemeral: bool
    use_runner_admin_flow: bool


def load_settings(home: RunnerHome) -> RunnerSettings | None:
    """Read `.runner`. None if it is missing or no JSON object. Raises `InvalidConfiguration`."""
    document = home.load(RUNNER_FILE)
    if document is None:
        return None
    values = _by_lower_name(document)
    try:
        agent_id = int(values.get("agentid", 0))
    except (TypeError, ValueError):
        text = json.dumps(values["agentid"])
        raise InvalidConfiguration(f"Error converting value {text} to type 'System.UInt64'. Path 'AgentId'.") from None
    return RunnerSettings(
        agent_id=agent_id,
        agent_name=_text(values, "agentname"),
        server_url=_text(values, "serverurl"),
        server_url_v2=_text(values, "serverurlv2"),
        github_url=_text(values, "githuburl"),
        work_folder=_text(values, "workfolder"),
        ephemeral=_is_true(values.get("ephemeral")),
        use_runner_admin_flow=_is_true(values.get("userunneradminflow")),
    )


def load_secret(home: RunnerHome) -> str | None:
    """Read the credentials with which the runner signs in. None if there are none. Raises `InvalidConfiguration`."""
    document = home.load(CREDENTIALS_FILE)
    if document is None:
        return None
    credentials = _by_lower_name(document)
    if _text(credentials, "scheme").lower() != "oauth":
        # Runner.Listener/Configuration/CredentialManager.cs, GetCredentialProvider.
        raise InvalidConfiguration("Invalid Credential Type")
    data = credentials.get("data")
    values = _by_lower_name(data if isinstance(data, dict) else {})
    for name in ("clientId", "authorizationUrl"):
        if not _text(values, name.lower()):
            # Runner.Listener/Configuration/OAuthCredential.cs, GetVssCredentials.
            raise InvalidConfiguration(f"Value cannot be null. (Parameter '{name}')")
    if not (home.root / KEY_FILE).exists():
        # Runner.Listener/Configuration/RSAFileKeyManager.cs, GetKey.
        raise InvalidConfiguration(f"RSA key file {home.root / KEY_FILE} was not found")
    return secret_of(home.load(KEY_FILE) or {})


def key_parameters(secret: str) -> dict[str, str]:
    """The content of `.credentials_rsaparams`, with the names of the real file.

    The fake runner proves nothing with a signature: its secret stands in the place of the private numbers.
    """
    public = {"exponent": "AQAB", "modulus": base64.b64encode(bytes(256)).decode()}
    return {name: public.get(name) or base64.b64encode(secret.encode()).decode() for name in KEY_PARAMETERS}


def secret_of(parameters: dict[str, Any]) -> str:
    """The secret in `.credentials_rsaparams`. Raises `InvalidConfiguration`."""
    numbers: dict[str, bytes] = {}
    for name in KEY_PARAMETERS:
        if name not in parameters:
            raise InvalidConfiguration(f"Member '{name}' was not found.")
        try:
            numbers[name] = base64.b64decode(parameters[name], validate=True)
        except (TypeError, ValueError):
            raise InvalidConfiguration("The input is not a valid Base-64 string.") from None
    return numbers["d"].decode(errors="replace")


def unpack(packed: str) -> dict[str, bytes]:
    """The files of a just-in-time configuration by name (Runner.Listener/Runner.cs, ExecuteCommand)."""
    try:
        files = json.loads(base64.b64decode(packed, validate=True))
        return {name: base64.b64decode(content, validate=True) for name, content in files.items()}
    except (AttributeError, TypeError, ValueError) as problem:
        raise InvalidConfiguration(str(problem)) from None


def _by_lower_name(document: dict[str, Any]) -> dict[str, Any]:
    return {name.lower(): value for name, value in document.items()}


def _text(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""


def _is_true(value: Any) -> bool:
    return str(value).lower() in TRUE
