"""Region, credentials, endpoints and CA certificates of AWS clients.

The usual case, everything in environment variables, as in a workflow and in Lambda, is read here. For anything else
(profiles, SSO, web identity, roles of machines and containers, FIPS and dual-stack endpoints, other partitions),
botocore decides; it is imported only then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore.exceptions import NoCredentialsError, NoRegionError

from remuda.adapters.aws.signature import AwsCredentials

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

#: botocore's definition of a setting: key in the AWS config file, environment variables, default, conversion.
REGION = ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)
#: Regions of the partition `aws`: its regular expression in botocore's partitions.json.
_USUAL_REGION = re.compile(r"(us|eu|ap|sa|ca|me|af|il|mx)-\w+-\d+")
#: IAM has one endpoint, in this region.
_GLOBAL_REGION = "us-east-1"
#: Names of services in host names and signatures that differ from those of their clients.
HOST_NAMES = {"cloudwatch": "monitoring"}
#: Services whose name in variables has another spelling.
_SERVICE_IDS = {"autoscaling": "AUTO_SCALING", "secretsmanager": "SECRETS_MANAGER"}
#: Settings of endpoints that botocore implements.
_ENDPOINT_OPTIONS = ("AWS_USE_DUALSTACK_ENDPOINT", "AWS_USE_FIPS_ENDPOINT")


class AwsEndpoint(NamedTuple):
    url: str
    #: The region that signatures name.
    region: str


class AwsEnvironment:
    def __init__(self, *, session: AioSession | None = None) -> None:
        """`session`: a session to share, which is slow to create. It is used only if it is needed."""
        self._session = session
        self._provider: Any = None

    @property
    def session(self) -> AioSession:
        if self._session is None:
            from remuda.adapters.aws.clients import open_session  # noqa: PLC0415 - it imports this module

            self._session = open_session()
        return self._session

    def region(self) -> str:
        """The region, or empty."""
        found = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if not found and not self._has_profile():
            return ""
        return found or str(self.session.get_config_variable("region") or "")

    def ca_bundle(self) -> str:
        """The file with CA certificates, or empty for the default."""
        found = os.environ.get("AWS_CA_BUNDLE", "")
        if not found and self._has_profile():
            found = str(self.session.get_config_variable("ca_bundle") or "")
        return found or os.environ.get("REQUESTS_CA_BUNDLE", "")

    async def endpoint(self, service: str, region: str = "") -> AwsEndpoint:
        region = region or self.region()
        if not region:
            raise NoRegionError
        if os.environ.get("AWS_PROFILE"):
            # Raises if the profile does not exist.
            self.session.get_scoped_config()
        ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
        service_id = _SERVICE_IDS.get(service, service.upper())
        variables = () if ignored else (f"AWS_ENDPOINT_URL_{service_id}", "AWS_ENDPOINT_URL")
        given = next((os.environ[name] for name in variables if os.environ.get(name)), "")
        has_options = any(os.environ.get(name, "").lower() == "true" for name in _ENDPOINT_OPTIONS)
        is_unusual = self._has_profile() or has_options or not _USUAL_REGION.fullmatch(region)
        if is_unusual and not given:
            return await self._endpoint_of_botocore(service, region)
        if service == "iam":
            return AwsEndpoint(given or "https://iam.amazonaws.com", _GLOBAL_REGION)
        return AwsEndpoint(given or f"https://{HOST_NAMES.get(service, service)}.{region}.amazonaws.com", region)

    async def _endpoint_of_botocore(self, service: str, region: str) -> AwsEndpoint:
        create: Any = self.session.create_client
        keys = {"aws_access_key_id": "-", "aws_secret_access_key": "-"}
        async with create(service, region_name=region, **keys) as client:
            return AwsEndpoint(str(client.meta.endpoint_url), str(client._request_signer.region_name))  # noqa: SLF001

    async def credentials(self) -> AwsCredentials:
        """Raises the exceptions of botocore if there are none."""
        get = os.environ.get
        if (access_key := get("AWS_ACCESS_KEY_ID")) and (secret_key := get("AWS_SECRET_ACCESS_KEY")):
            return AwsCredentials(
                access_key=access_key,
                secret_key=secret_key,
                token=get("AWS_SESSION_TOKEN") or get("AWS_SECURITY_TOKEN") or "",
            )
        if self._provider is None:
            self._provider = await self.session.get_credentials()
        if self._provider is None:
            raise NoCredentialsError
        frozen = await self._provider.get_frozen_credentials()
        return AwsCredentials(access_key=frozen.access_key, secret_key=frozen.secret_key, token=frozen.token or "")

    @staticmethod
    def _has_profile() -> bool:
        """Whether AWS's config file may contain settings."""
        file = Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config")
        try:
            return (
                bool(os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE"))
                or file.expanduser().stat().st_size > 0
            )
        except (OSError, RuntimeError):
            return False


CredentialSource = Callable[[], Awaitable[AwsCredentials]]
