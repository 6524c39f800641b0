"""Checks before a deployment. They change nothing, and find out what the plan needs to know."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from remuda.adapters.aws.account import QUOTAS, AccountDoctor
from remuda.adapters.aws.clients import read_parameter
from remuda.adapters.aws.ec2.create_fleet import MAX_ZONES, without_local_zones
from remuda.adapters.aws.ec2.options import MAX_SUBNETS, SSM_PREFIX
from remuda.adapters.aws.ec2.routes import outbound_route
from remuda.adapters.aws.functions import UNRESERVED_MINIMUM, judge_concurrency
from remuda.adapters.github.client import GitHubClient
from remuda.adapters.github.doctor import GitHubDoctor
from remuda.deployment.api import AwsAccount, AwsApi
from remuda.deployment.bundles import Bundle, BundleSource, BundleUse
from remuda.deployment.deployer import ACTIONS, OWN_ACTIONS
from remuda.deployment.images import UBUNTU, ChosenImage, choose_image, source_output
from remuda.deployment.listener import DEFAULT_LISTENER_IMAGE
from remuda.deployment.policies import FUNCTIONS, SCHEDULED, log_group
from remuda.deployment.resources import (
    Bucket,
    CredentialSecret,
    LogGroups,
    OidcProvider,
    PoolTable,
    SecurityGroup,
    SpotRole,
    stack_name,
)
from remuda.deployment.stack import REVIEW, Stack, StackState, stored_parameters
from remuda.deployment.template import FUNCTION_SUBNETS, IMAGE_KEY_PARAMETER, VOLUME_KEY_PARAMETER, logs_id
from remuda.deployment.volume_key import check_volume_key
from remuda.domain.errors import UserError
from remuda.domain.resources import DEFAULT_CLASSES, ResourceClass, Reuse, check_image_architecture, parse_classes
from remuda.domain.runner_set import RunnerSet, check_fits_pool
from remuda.ports.clock import Clock
from remuda.ports.doctor import Check, CheckResult, ok, problem, warning

CREDENTIALS = "aws credentials"
STACK = "stack"
#: Ubuntu's current image.
DEFAULT_IMAGE = f"{SSM_PREFIX}{UBUNTU}amd64/hvm/ebs-gp3/ami-id"
#: Parameters of the stack with images.
IMAGE, LISTENER_IMAGE = "Ami", "ListenerAmi"
_NO_ROLE = frozenset({"NoSuchEntity", "AccessDenied", "AccessDeniedException"})
_DENIED = frozenset({"AccessDenied", "AccessDeniedException"})
#: Actions per call of the simulation, IAM's limit of the request size allows about a hundred.
_SIMULATED = 50
#: Fewer free addresses in all subnets together are worth a warning.
FEW_ADDRESSES = 50


@dataclass(kw_only=True)
class DeployFacts:
    """Findings of the checks."""

    account: AwsAccount | None = None
    stack: StackState | None = None
    bundles: tuple[Bundle, ...] = ()
    subnets: tuple[str, ...] = ()
    vpc: str = ""
    #: Routes of the subnets to the internet, as `outbound_route` names them.
    outbound: frozenset[str] = frozenset()
    #: Security groups of the user or of the existing stack; empty if the pool gets its own.
    groups: str = ""
    #: Images by parameter of the stack.
    images: dict[str, ChosenImage] = field(default_factory=dict)
    #: A KMS key of the account that the deployment makes the key of the volumes; empty if there is none to adopt.
    volume_key: str = ""
    #: The KMS key of encrypted images, if it is another one than that of the volumes.
    image_key: str = ""
    classes: tuple[ResourceClass, ...] = DEFAULT_CLASSES
    #: Existing resources that a new stack takes over: their names by logical id, as properties of the template.
    adopted: dict[str, dict[str, str]] = field(default_factory=dict)
    #: Whether the account has enough concurrent executions for those that the scheduled functions reserve.
    may_reserve: bool = False
    #: Whether the deployment will create them.
    creates: dict[str, bool] = field(default_factory=dict)

    @property
    def known_account(self) -> AwsAccount:
        if self.account is None:
            raise UserError("the AWS credentials were not checked", field="aws-credentials")
        return self.account

    def stored(self, parameter: str) -> str:
        """The parameter of the existing stack, or an empty text."""
        return stored_parameters(self.stack).get(parameter, "")


@dataclass(frozen=True, kw_only=True)
class ListenerTarget:
    """The runner sets, also if there are none any more, and the place of their listener."""

    runner_sets: tuple[RunnerSet, ...]
    reuse: Reuse
    #: Whether it runs on an instance of the stack.
    is_on_instance: bool
    #: Empty if it is not given.
    image: str
    instance_type: str


@dataclass(frozen=True, kw_only=True)
class DeployTarget:
    """Desired deployment, from the flags. Empty values are those of the existing stack, or the defaults."""

    pool: str
    scope: str
    vpc: str
    subnets: tuple[str, ...]
    security_groups: str
    image: str
    #: ARN of the KMS key of the volumes.
    volume_key: str = ""
    classes: tuple[ResourceClass, ...] | None
    max_instances: int
    issuer: str
    #: Whether the credential is a new one, or the ARN of a secret.
    has_credential: bool
    has_own_secret: bool
    resource_types: frozenset[str]
    #: Parameters of the stack that were given.
    parameters: Mapping[str, str] = field(default_factory=dict)
    #: None if the pool has never had runner sets.
    listener: ListenerTarget | None = None


class Preflight:
    def __init__(
        self,
        *,
        api: AwsApi,
        wanted: DeployTarget,
        bundles: BundleSource,
        github: Callable[[], Awaitable[GitHubClient]] | None,
        clock: Clock,
    ) -> None:
        """`github` opens a client with the new credential; None if the stored one stays."""
        self._api = api
        self._wanted = wanted
        self._bundles = bundles
        self._github = github
        self._clock = clock
        self.facts = DeployFacts()
        #: Images as DescribeImages returns them, by id or parameter.
        self._images: dict[str, Mapping[str, Any]] = {}

    def checks(self) -> Sequence[Check]:
        after = (CREDENTIALS, STACK)
        checks = [
            Check(name=CREDENTIALS, run=self._credentials),
            Check(name=STACK, run=self._stack, needs=(CREDENTIALS,)),
            Check(name="bundles", run=self._list_bundles),
            Check(name="bucket", run=self._bucket, needs=after),
            Check(name="secret", run=self._secret, needs=after),
            Check(name="oidc provider", run=self._provider, needs=after),
            Check(name="spot role", run=self._spot_role, needs=after),
            Check(name="data", run=self._data, needs=after),
            Check(name="subnets", run=self._subnets, needs=after),
            Check(name="security group", run=self._group, needs=("subnets",)),
            Check(name="function subnets", run=self._function_subnets, needs=("subnets",)),
            Check(name="image", run=self._image, needs=(*after, "bundles")),
            Check(name="volume key", run=self._volume_key, needs=("image",)),
            Check(name="listener", run=self._listener, needs=(*after, "bundles")),
            Check(name=QUOTAS, run=self._quotas, needs=after),
            Check(name="concurrency", run=self._concurrency, needs=after),
            Check(name="permissions", run=self._permissions, needs=after),
        ]
        if self._github is not None:
            doctor = GitHubDoctor(github=self._github, scope=self._wanted.scope, clock=self._clock)
            checks += [check for check in doctor.checks() if check.name in {"github credential", "github access"}]
        return checks

    def _given(self, parameter: str) -> str:
        """The parameter of the stack that was given, or that of the existing stack."""
        return self._wanted.parameters.get(parameter, self.facts.stored(parameter))

    # AWS ------------------------------------------------------------------------------------------------------

    async def _credentials(self) -> CheckResult:
        self.facts.account = account = await self._api.account()
        return ok(f"{account.caller} in {account.region}")

    async def _stack(self) -> CheckResult:
        name = stack_name(self._wanted.pool)
        self.facts.stack = state = await Stack(self._api, name, self._clock).describe()
        self.facts.classes = self._wanted.classes or _parse_stored(self.facts.stored("ResourceClassConfig"))
        if state is None or state.status == REVIEW:
            return ok(f"{name} will be created")
        if state.pool != self._wanted.pool:
            return problem(f"stack {name} exists, but is not a stack of this pool", "choose another pool name")
        if not state.exists:
            return ok(f"{name} will be created again, after a creation that failed")
        if state.status == "DELETE_FAILED":
            return problem(f"stack {name} is {state.status}: {state.reason}", "run remuda destroy first")
        if state.status == "UPDATE_ROLLBACK_FAILED":
            fix = f"run aws cloudformation continue-update-rollback --stack-name {name}"
            return problem(f"stack {name} is {state.status}: {state.reason}", fix)
        return ok(f"{name} exists and will be updated if it differs")

    async def _list_bundles(self) -> CheckResult:
        self.facts.bundles = found = await self._bundles.list()
        return ok(f"{', '.join(bundle.name for bundle in found)} in {self._bundles.location}")

    async def _bucket(self) -> CheckResult:
        found = await (bucket := Bucket(self._api, self._wanted.pool, self.facts.known_account)).find()
        self.facts.creates["bucket"] = found is None or not found.is_ours
        if found is not None and found.problem:
            return problem(f"bucket {bucket.name} exists, but {found.problem}", "choose another pool name")
        return ok(f"{bucket.name} {'exists' if found else 'will be created'}")

    async def _secret(self) -> CheckResult:
        if self._wanted.has_own_secret:
            return ok("the GitHub credential is in a secret of yours")
        found = await (secret := CredentialSecret(self._api, self._wanted.pool)).find()
        self.facts.creates["secret"] = found is None
        if found is None and not self._wanted.has_credential:
            if self.facts.stored("GithubSecretArn"):
                return ok(f"{self.facts.stored('GithubSecretArn')} stays")
            return problem("there is no GitHub credential", "set REMUDA_GITHUB_TOKEN, or give --github-token @FILE")
        return ok(f"{secret.name} {'exists' if found else 'will be created'}")

    async def _provider(self) -> CheckResult:
        found = await (provider := OidcProvider(self._api, self.facts.known_account, self._wanted.issuer)).find()
        self.facts.creates["oidc provider"] = found is None
        return ok(f"{provider.arn} {'exists' if found else 'will be created'}")

    async def _spot_role(self) -> CheckResult:
        exists = await SpotRole(self._api).exists()
        self.facts.creates["spot role"] = not exists
        return ok(f"{SpotRole.name} {'exists' if exists else 'will be created'}")

    async def _data(self) -> CheckResult:
        """Data without its stack, which `destroy --keep-data` has left: it becomes part of the new stack."""
        if self.facts.stack is not None and self.facts.stack.exists:
            return ok("part of the stack")
        is_ours = await (table := PoolTable(self._api, self._wanted.pool)).is_ours()
        if is_ours is False:
            return problem(f"table {table.name} exists, but is not a table of this pool", "choose another pool name")
        if is_ours:
            self.facts.adopted["Table"] = {"TableName": table.name}
        known = {log_group(who).replace("<pool>", self._wanted.pool): logs_id(who) for who in FUNCTIONS}
        for name in await LogGroups(self._api, self._wanted.pool).names():
            if name in known:
                self.facts.adopted[known[name]] = {"LogGroupName": name}
        if self.facts.adopted:
            return ok(f"{', '.join(next(iter(item.values())) for item in self.facts.adopted.values())} will be reused")
        return ok(f"table {table.name} will be created")

    # Network --------------------------------------------------------------------------------------------------

    async def _subnets(self) -> CheckResult:
        chosen = self._wanted.subnets or tuple(_words("" if self._wanted.vpc else self.facts.stored("SubnetIds")))
        if chosen:
            filters = [{"Name": "subnet-id", "Values": list(chosen)}]
        else:
            filters = [{"Name": "vpc-id", "Values": [await self._choose_vpc()]}]
        found = [item async for item in self._api.items("ec2", "DescribeSubnets", "Subnets", Filters=filters)]
        missing = sorted(set(chosen) - {str(item["SubnetId"]) for item in found})
        if missing:
            return problem(f"{', '.join(missing)} not found in this region and account", "correct --subnet-ids")
        if not found:
            return problem("the VPC has no subnets", "give --subnet-ids, or --vpc with another VPC")
        vpcs = {str(item["VpcId"]) for item in found}
        if len(vpcs) > 1:
            return problem(f"the subnets are in several VPCs: {', '.join(sorted(vpcs))}", "give subnets of one VPC")
        (self.facts.vpc,) = vpcs
        routes = await self._routes(self.facts.vpc)
        outbound = {str(item["SubnetId"]): outbound_route(item, routes) for item in found}
        if not chosen:
            kinds = {outbound[str(item["SubnetId"])] for item in without_local_zones(found)}
            best = "nat" if "nat" in kinds else "public"
            found = without_local_zones([item for item in found if outbound[str(item["SubnetId"])] == best])
            if not found:
                return problem(
                    f"no subnet of {self.facts.vpc} has a route to the internet that its machines can use",
                    "give --subnet-ids with public subnets that assign public addresses, or with subnets behind a NAT",
                )
        found.sort(key=lambda item: -int(item.get("AvailableIpAddressCount", 0)))
        self.facts.subnets = tuple(str(item["SubnetId"]) for item in found[:MAX_SUBNETS])
        self.facts.outbound = frozenset(outbound[name] for name in self.facts.subnets)
        return _judge_subnets(found[:MAX_SUBNETS], outbound)

    async def _choose_vpc(self) -> str:
        if self._wanted.vpc:
            return self._wanted.vpc
        vpcs = [item async for item in self._api.items("ec2", "DescribeVpcs", "Vpcs")]
        default = [item for item in vpcs if item.get("IsDefault")] or vpcs
        if len(default) != 1:
            names = ", ".join(str(item["VpcId"]) for item in vpcs) or "none"
            raise UserError(
                f"there is no default VPC; the VPCs of this region: {names}",
                field="--vpc",
                fix="give --vpc or --subnet-ids",
            )
        return str(default[0]["VpcId"])

    async def _routes(self, vpc: str) -> list[dict[str, Any]]:
        filters = [{"Name": "vpc-id", "Values": [vpc]}]
        return [item async for item in self._api.items("ec2", "DescribeRouteTables", "RouteTables", Filters=filters)]

    async def _group(self) -> CheckResult:
        if self._wanted.security_groups:
            self.facts.groups = self._wanted.security_groups
            if not await self._are_in_vpc(_words(self.facts.groups)):
                return problem(
                    f"{self.facts.groups}: not all are in {self.facts.vpc}, the VPC of the subnets",
                    "give --security-group-ids and --subnet-ids of one VPC",
                )
            return ok(self.facts.groups)
        stored = _words(self.facts.stored("SecurityGroupIds"))
        if stored and await self._are_in_vpc(stored):
            self.facts.groups = ",".join(stored)
            return ok(self.facts.groups)
        found = await (group := SecurityGroup(self._api, self._wanted.pool)).find(self.facts.vpc)
        self.facts.creates["security group"] = found is None
        if found is not None and found.problem:
            return problem(
                f"security group {group.name} ({found.identifier}) exists, but {found.problem}",
                "give --security-group-ids, or choose another pool name",
            )
        return ok(found.identifier if found else f"{group.name} will be created, without inbound rules")

    async def _function_subnets(self) -> CheckResult:
        chosen = _words(self._given(FUNCTION_SUBNETS))
        if not chosen:
            return ok("functions are outside of any VPC")
        filters = [{"Name": "subnet-id", "Values": chosen}]
        found = [item async for item in self._api.items("ec2", "DescribeSubnets", "Subnets", Filters=filters)]
        fix = f"correct --parameter {FUNCTION_SUBNETS}"
        if missing := sorted(set(chosen) - {str(item["SubnetId"]) for item in found}):
            return problem(f"{', '.join(missing)} not found in this region and account", fix)
        if any(item["VpcId"] != self.facts.vpc for item in found):
            return problem(f"not all are in {self.facts.vpc}, the VPC of the instances and their security groups", fix)
        routes = await self._routes(self.facts.vpc)
        # A function never has a public address, whatever its subnet assigns to instances.
        if isolated := [str(item["SubnetId"]) for item in found if outbound_route(item, routes) != "nat"]:
            return problem(
                f"{', '.join(isolated)}: functions have no public addresses, and no route through a NAT to GitHub",
                f"give private subnets behind a NAT gateway, or deploy with --parameter {FUNCTION_SUBNETS}=",
            )
        return ok(", ".join(chosen))

    async def _are_in_vpc(self, groups: Sequence[str]) -> bool:
        """Whether all groups are in the VPC of the subnets, which may be new."""
        filters = [{"Name": "group-id", "Values": list(groups)}]
        answer = await self._api.call("ec2", "DescribeSecurityGroups", Filters=filters)
        found = {item["GroupId"]: item.get("VpcId") for item in answer.get("SecurityGroups") or ()}
        return all(found.get(name) == self.facts.vpc for name in groups)

    async def _image(self) -> CheckResult:
        image = await self._choose_image(IMAGE, self._wanted.image, DEFAULT_IMAGE)
        found: dict[str, str] = {}
        # The pool's own image, and those of classes.
        flags = {image: "--ami", **{item.ami: f"ami of class {item.name!r}" for item in self.facts.classes if item.ami}}
        for name, flag in flags.items():
            architecture = await self._find_image(name, flag)
            if isinstance(architecture, CheckResult):
                return architecture
            found[name] = architecture
        try:
            for wanted in self.facts.classes:
                own = wanted.ami or image
                check_image_architecture(wanted, own, found[own], field="--resource-class-config")
        except UserError as error:
            return problem(error.message, error.fix)
        return ok(", ".join(f"{name} ({architecture})" for name, architecture in found.items()))

    async def _choose_image(self, parameter: str, given: str, default: str) -> str:
        stack = self.facts.stack
        chosen = self.facts.images[parameter] = await choose_image(
            given=given,
            stored=self.facts.stored(parameter),
            stored_source=stack.outputs.get(source_output(parameter), "") if stack else "",
            default=default,
            read=partial(read_parameter, self._api.clients),
        )
        return chosen.image

    async def _find_image(self, image: str, flag: str) -> str | CheckResult:
        """The architecture of an image that there is an agent for, or a problem."""
        name = image
        if image.startswith(SSM_PREFIX):
            name = await read_parameter(self._api.clients, image.removeprefix(SSM_PREFIX))
        answer = await self._api.call("ec2", "DescribeImages", Filters=[{"Name": "image-id", "Values": [name]}])
        images = answer.get("Images") or ()
        if not images:
            return problem(f"{image} does not exist in this region, or is not shared", f"give another {flag}")
        self._images[image] = images[0]
        architecture = str(images[0].get("Architecture", ""))
        built = [bundle.architecture for bundle in self.facts.bundles if bundle.use is BundleUse.AGENT]
        if architecture not in built:
            return problem(
                f"{image} is for {architecture}, and there is an agent only for {', '.join(built)}",
                f"give another {flag}, or bundles for its architecture",
            )
        return architecture

    async def _volume_key(self) -> CheckResult:
        names = dict.fromkeys((self.facts.images[IMAGE].image, *(item.ami for item in self.facts.classes if item.ami)))
        listener = self._wanted.listener
        key = await check_volume_key(
            self._api,
            self.facts.known_account,
            given=self._wanted.volume_key or self.facts.stored(VOLUME_KEY_PARAMETER),
            given_of_image=self._given(IMAGE_KEY_PARAMETER),
            images=[self._images[name] for name in names],
            has_listener=listener is not None and listener.is_on_instance,
        )
        self.facts.volume_key, self.facts.image_key = key.adopted, key.of_image
        return key.result

    async def _listener(self) -> CheckResult:
        wanted = self._wanted.listener
        if wanted is None:
            return ok("not needed: no runner sets are configured")
        try:
            check_fits_pool(wanted.runner_sets, classes=[item.name for item in self.facts.classes], reuse=wanted.reuse)
        except UserError as error:
            return problem(error.message, error.fix)
        names = f"runner sets: {', '.join(item.name for item in wanted.runner_sets) or 'none'}"
        if not wanted.is_on_instance:
            return ok(f"{names}; the listener runs elsewhere")
        image = await self._choose_image(LISTENER_IMAGE, wanted.image, DEFAULT_LISTENER_IMAGE)
        architecture = await self._find_image(image, "--parameter ListenerAmi")
        if isinstance(architecture, CheckResult):
            return architecture
        answer = await self._api.find(
            "ec2", "DescribeInstanceTypes", {"InvalidInstanceType"}, InstanceTypes=[wanted.instance_type]
        )
        found = (answer or {}).get("InstanceTypes") or ()
        fix = "give another --parameter ListenerInstanceType or ListenerAmi"
        if not found:
            return problem(f"instance type {wanted.instance_type} does not exist in this region", fix)
        if architecture not in found[0]["ProcessorInfo"]["SupportedArchitectures"]:
            return problem(f"{wanted.instance_type} cannot run {image}, which is for {architecture}", fix)
        return ok(f"{names}; the listener runs on {wanted.instance_type} ({architecture})")

    # Quotas and permissions -----------------------------------------------------------------------------------

    async def _quotas(self) -> CheckResult:
        return await AccountDoctor(
            clients=self._api.clients,
            launch={},
            classes=self.facts.classes,
            max_instances=self._wanted.max_instances,
        ).quotas()

    async def _concurrency(self) -> CheckResult:
        """Reserve executions for the scheduled functions only where Lambda has enough left for the others."""
        try:
            found = await self._api.call("lambda", "GetAccountSettings")
        except UserError as error:
            return warning(f"the limit of Lambda cannot be read: {error.message}", "grant lambda:GetAccountSettings")
        free = int(found["AccountLimit"]["UnreservedConcurrentExecutions"])
        self.facts.may_reserve = free - len(SCHEDULED) >= UNRESERVED_MINIMUM
        stored = stored_parameters(self.facts.stack)
        wanted = {**stored, **self._wanted.parameters}
        return judge_concurrency(found, reserving=_reserved(wanted) - _reserved(stored))

    async def _permissions(self) -> CheckResult:
        account = self.facts.known_account
        if account.caller.endswith(":root"):
            return warning("these are the credentials of the account's root user", "use a role of an administrator")
        principal = await self._principal(account)
        if not principal:
            return warning(f"the permissions of {account.caller} cannot be read", "grant iam:GetRole to check them")
        wanted = sorted({*OWN_ACTIONS, *(action for kind in self._wanted.resource_types for action in ACTIONS[kind])})
        denied: list[str] = []
        for start in range(0, len(wanted), _SIMULATED):
            answer = await self._api.find(
                "iam",
                "SimulatePrincipalPolicy",
                {*_DENIED, "NoSuchEntity", "InvalidInput"},
                PolicySourceArn=principal,
                ActionNames=wanted[start : start + _SIMULATED],
            )
            if answer is None:
                fix = "grant iam:SimulatePrincipalPolicy to check them before the deployment"
                return warning("the permissions of these credentials were not checked", fix)
            denied += [
                str(item["EvalActionName"])
                for item in answer.get("EvaluationResults") or ()
                if item["EvalDecision"] != "allowed"
            ]
        if denied:
            # Only a warning: IAM simulates without the conditions and resources of the real calls.
            return warning(f"{account.caller} seems to lack {', '.join(denied)}", "grant them if the deployment fails")
        return ok(f"{len(wanted)} actions are permitted, by simulation")

    async def _principal(self, account: AwsAccount) -> str:
        """The ARN whose policies apply: of an assumed role, the role's. Its session's ARN does not have the path."""
        kind, _, rest = account.caller.rpartition(":")[2].partition("/")
        if kind != "assumed-role":
            return account.caller
        answer = await self._api.find("iam", "GetRole", _NO_ROLE, RoleName=rest.partition("/")[0])
        return str(answer["Role"]["Arn"]) if answer else ""


def _reserved(parameters: Mapping[str, str]) -> int:
    """The executions that a stack with these parameters reserves."""
    scheduled = len(SCHEDULED) if parameters.get("ReserveConcurrency") == "true" else 0
    broker = parameters.get("BrokerConcurrency", "")
    return scheduled + (int(broker) if broker.isdecimal() else 0)


def _parse_stored(text: str) -> tuple[ResourceClass, ...]:
    return parse_classes(json.loads(text)) if text else DEFAULT_CLASSES


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _judge_subnets(subnets: Sequence[Mapping[str, Any]], outbound: Mapping[str, str]) -> CheckResult:
    zones = sorted({str(item.get("AvailabilityZone", "")) for item in subnets})
    free = sum(int(item.get("AvailableIpAddressCount", 0)) for item in subnets)
    kinds = {outbound[str(item["SubnetId"])] for item in subnets}
    shown = f"{', '.join(str(item['SubnetId']) for item in subnets)} in {', '.join(zones)}, {free} free addresses"
    if "none" in kinds:
        isolated = [str(item["SubnetId"]) for item in subnets if outbound[str(item["SubnetId"])] == "none"]
        return warning(
            f"{', '.join(isolated)} have no route to the internet that machines without a public address can use",
            "add a NAT gateway, or use public subnets that assign public addresses",
        )
    if free < FEW_ADDRESSES:
        return warning(f"{shown}: few machines fit", "give more subnets with --subnet-ids")
    if "public" in kinds:
        return warning(
            f"{shown}; machines get public addresses, and nothing can connect to them",
            "nothing to do, or give --subnet-ids with private subnets behind a NAT",
        )
    unused = f"; a launch uses {MAX_ZONES} zones" if len(zones) > MAX_ZONES else ""
    return ok(shown + unused)
