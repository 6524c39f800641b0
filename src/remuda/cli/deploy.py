"""`remuda deploy` and `remuda destroy`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.cli.output import Output
from remuda.cli.read import check_document, check_lines, check_table, problems_first
from remuda.cli.rendering.table import FittedTable
from remuda.cli.run import EXIT_OK, plural, run_async
from remuda.config.declaration import InvalidValue, flag, is_secret_arn
from remuda.config.settings import SETTINGS, Settings
from remuda.config.sources import read_private_key
from remuda.controlplane.doctor import exit_code, run_checks
from remuda.domain.errors import Partial, RemudaError, UserError
from remuda.domain.resources import MAX_SHOWN, Reuse, check_scope
from remuda.domain.runner_set import RunnerSet, in_scope
from remuda.domain.text import quote
from remuda.ports.calls import CallCounter
from remuda.ports.doctor import CheckResult, CheckStatus
from remuda.source_repository import find_source_repository, repository_name
from remuda.wiring.aws import aws_libraries, check_region
from remuda.wiring.github import GithubCredential, github_client

if TYPE_CHECKING:
    from remuda.adapters.github.client import GitHubClient
    from remuda.deployment.bundles import BundleSource
    from remuda.deployment.deploy import Deployment, DeployRequest, DeployResult, StackPlan
    from remuda.deployment.destroy import RemovalPlan
    from remuda.deployment.preflight import DeployFacts, DeployTarget, ListenerTarget
    from remuda.deployment.stack import StackChange

T = TypeVar("T")

#: Settings that are parameters of the stack, and not settings of its functions under the same name.
STACK_PARAMETERS = ("repositories", "environments", "permissions_boundary", "role_path")
#: Parameters of the stack that are settings, with their flags.
_FLAGS = {
    SETTINGS[name].parameter: flag(name) for name in SETTINGS if SETTINGS[name].is_parameter or name in STACK_PARAMETERS
}
#: Parameter with the place of the listener.
LISTENER = "Listener"
_FLAGS[LISTENER] = "--listener"
_SETS = SETTINGS["runner_sets"].parameter
#: Parameters of the stack that follow from the deployment.
_OWN_PARAMETERS = frozenset({"Pool", "CodeBucket", "CodeKey", "GithubSecretArn", "OidcProviderArn"})
_INTERRUPTED = "interrupted; what was created stays, and the same command continues from there"
_REMOVAL_INTERRUPTED = "interrupted; remuda destroy continues from there"
_CREDENTIAL = (
    "no GitHub credential is given: set REMUDA_GITHUB_TOKEN or give --github-token @FILE; for a GitHub App give "
    "--github-app-id and --github-app-key @FILE"
)
_SCOPE = "--github-scope is missing: give the organization or owner/repo that the runners register in"


@dataclass(frozen=True, kw_only=True)
class _Credential:
    credential: GithubCredential | None = None
    secret_arn: str = ""
    app_id: str = ""

    @property
    def is_given(self) -> bool:
        return self.credential is not None or bool(self.secret_arn)


class ConsoleProgress:
    """One line per step on stderr."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def step(self, text: str) -> None:
        self._output.say(text)

    def detail(self, text: str) -> None:
        self._output.say(f"  {text}", style="dim")


def run_deploy(
    settings: Settings,
    output: Output,
    *,
    region: str,
    vpc: str,
    github_token: str,
    github_app_key: str,
    dist: str,
    parameter: Sequence[str],
    listener: str | None,
    allow_replacement: bool,
    confirmed: bool,
    dry_run: bool,
) -> int:
    with aws_libraries():
        from remuda.deployment.bundles import BundleSource, check_location  # noqa: PLC0415 - AWS libraries are slow
        from remuda.deployment.policies import check_policies  # noqa: PLC0415

    asks = sys.stdin.isatty() and not confirmed
    if not (asks or confirmed or dry_run):
        raise _no_confirmation()
    extra = parse_parameters(parameter)
    if listener:
        extra[LISTENER] = listener
    credential = read_credential(settings, github_token, github_app_key)
    repository = settings.source_repository or find_source_repository()
    source = check_location(dist) if dist else BundleSource.default(repository)
    _choose_region(region, asks=asks)
    settings = _with_pool(replace(settings, backend="aws"), asks=asks)
    check_launch_options(settings)
    parameters = {**given_parameters(settings), **extra}
    check_policies(settings.resource_class_config, pool=settings.pool, role_path=parameters.get("RolePath", "/"))

    stored = run_async(lambda: _stored_parameters(settings.pool), on_interrupt_message=_INTERRUPTED)
    _check_role_path(settings.pool, parameters, stored)
    scope = parameters.get("GithubScope") or stored.get("GithubScope", "")
    if not scope and settings.given("github_scope"):
        scope = settings.github_scope
    scope, credential = _complete(scope, credential, stored, asks=asks)
    parameters |= _first_set(output, settings.pool, parameters, stored, asks=asks)
    request = _request(settings, parameters, scope=scope, vpc=vpc, credential=credential, stored=stored, bundles=source)
    request = replace(request, allow_replacement=allow_replacement, repository=repository_name(repository))
    facts, results, repositories = run_async(lambda: _check(settings, request), on_interrupt_message=_INTERRUPTED)
    request = replace(request, repositories=repositories)
    _show_checks(output, results)
    problems = [name for name, result in results.items() if result.status is CheckStatus.PROBLEM]
    if problems:
        output.result({"checks": [check_document(name, result) for name, result in results.items()]})
        output.say(f"nothing was changed: {', '.join(problems)} must be fixed first", style="bold red")
        return exit_code(results.values())
    return _deploy(output, request, facts, results, asks=asks, confirmed=confirmed, dry_run=dry_run)


def _deploy(
    output: Output,
    request: DeployRequest,
    facts: DeployFacts,
    results: Mapping[str, CheckResult],
    *,
    asks: bool,
    confirmed: bool,
    dry_run: bool,
) -> int:
    from remuda.deployment.deploy import Deployment, DeployResult, expected_cost  # noqa: PLC0415 - AWS libraries are slow

    is_new = facts.stack is None or not facts.stack.exists
    progress = ConsoleProgress(output)
    result = DeployResult()
    document = _base_document(request, facts, results, dry_run=dry_run)
    cost = expected_cost(request, facts)
    document["idle_cost"] = cost.document()
    output.say(*cost.lines())

    def run(work: Callable[[Deployment], Awaitable[T]]) -> T:
        async def opened() -> T:
            async with AsyncExitStack() as stack:
                ports = await _ports(stack)
                return await work(Deployment(**ports, request=request, facts=facts, progress=progress, result=result))

        return run_async(opened, on_interrupt_message=_INTERRUPTED)

    if dry_run or is_new:
        changes = run(Deployment.preview)
        outside = [name for name, creates in facts.creates.items() if creates]
        if outside:
            output.say(f"outside the stack, to create: {', '.join(outside)}")
        _show_changes(output, changes)
        if dry_run:
            output.say("nothing was changed (--dry-run)")
            output.result({**document, "outside": outside, "changes": change_documents(changes)})
            return 0
        _confirm(f"create stack remuda-{request.wanted.pool} and its resources?", asks=asks, confirmed=confirmed)

    plan = run(Deployment.stage)
    if not is_new and result.changes:
        _show_changes(output, result.changes)
        try:
            _confirm(f"change stack remuda-{request.wanted.pool}?", asks=asks, confirmed=confirmed)
        except (UserError, click.Abort):
            run(Deployment.discard)
            raise
    run(lambda deployment: deployment.apply(plan))
    document["workflow"] = _workflow(request, facts, result.outputs, plan)
    document["container"] = _container(request.wanted, facts, plan)
    return _report(output, result, document)


def _workflow(request: DeployRequest, facts: DeployFacts, outputs: Mapping[str, str], plan: StackPlan) -> str:
    """The workflow to paste: without provision if there are runner sets; empty if no workflow may provision."""
    from remuda.deployment.workflow import set_workflow_text, workflow_text  # noqa: PLC0415 - only at the end

    wanted = request.wanted
    if wanted.listener and wanted.listener.runner_sets:
        return set_workflow_text(wanted.listener.runner_sets[0])
    role = outputs.get("WorkflowRoleArn", "")
    if not role:
        return ""
    environment = plan.value("Environments", facts).split(",")[0]
    return workflow_text(
        pool=wanted.pool,
        region=facts.known_account.region,
        role=role,
        environment=environment,
        repository=request.repository,
    )


def _container(wanted: DeployTarget, facts: DeployFacts, plan: StackPlan) -> str:
    """The command of a listener in a container; empty if the stack runs it, or there are no runner sets."""
    from remuda.deployment.workflow import container_text  # noqa: PLC0415 - only at the end

    if wanted.listener is None or wanted.listener.is_on_instance:
        return ""
    is_app = bool(plan.value("GithubAppId", facts))
    return container_text(
        pool=wanted.pool,
        region=facts.known_account.region,
        secret=plan.value("GithubSecretArn", facts),
        is_app=is_app,
    )


def _report(output: Output, result: DeployResult, document: dict[str, Any]) -> int:
    _show_checks(output, result.doctor)
    if text := document["container"]:
        output.say("the listener of the runner sets does not run in the stack; start it elsewhere:", "")
        output.say(*text.splitlines())
    if text := document["workflow"]:
        output.say(f"pool {document['pool']} is ready; a workflow that uses it, for .github/workflows/ci.yml:", "")
        if not output.as_json:
            sys.stdout.write(text)
    output.result(
        {
            **document,
            "done": result.done,
            "changes": change_documents(result.changes),
            "refresh": result.refresh,
            "drained": result.drained,
            "listener": result.listener,
            "doctor": [check_document(name, item) for name, item in result.doctor.items()],
            "outputs": dict(result.outputs),
        }
    )
    return exit_code(result.doctor.values())


# Removal ------------------------------------------------------------------------------------------------------------


def run_destroy(
    settings: Settings,
    output: Output,
    *,
    region: str,
    force: bool,
    keep_data: bool,
    confirmed: bool,
    dry_run: bool,
) -> int:
    with aws_libraries():
        from remuda.deployment.destroy import Destruction  # noqa: PLC0415 - AWS libraries are slow

    _choose_region(region, asks=False)
    progress = ConsoleProgress(output)

    async def opened(stack: AsyncExitStack) -> Destruction:
        ports = await _ports(stack)
        account = await ports["api"].account()
        return Destruction(**ports, pool=settings.pool, account=account, progress=progress, keeps_data=keep_data)

    async def plan() -> RemovalPlan:
        async with AsyncExitStack() as stack:
            return await (await opened(stack)).plan()

    async def remove() -> RemovalPlan:
        async with AsyncExitStack() as stack:
            destruction = await opened(stack)
            await destruction.remove_machines(force=force)
            await destruction.remove_rest()
            return await destruction.plan()

    async def check_existed() -> None:
        async with AsyncExitStack() as stack:
            await (await opened(stack)).check_existed()

    found = run_async(plan)
    document = {
        "pool": settings.pool,
        "dry_run": dry_run,
        "machines": found.machines,
        "deleted": [item.what for item in found.deleted],
    }
    if not found.removals and not found.machines:
        run_async(check_existed)
        output.say(f"nothing is left of pool {settings.pool}, which was deleted before")
        output.result({**document, "kept": {}})
        return EXIT_OK
    _show_removals(output, found)
    if not dry_run:
        data = [item.what for item in found.deleted if item.is_data]
        jobs = f" and end {plural(found.busy, 'run')}" if found.busy and force else ""
        lost = f" (with its data: {', '.join(data)})" if data else ""
        _confirm(
            f"delete pool {settings.pool}{lost}{jobs}?", asks=sys.stdin.isatty(), confirmed=confirmed, default=False
        )
        left = run_async(remove, on_interrupt_message=_REMOVAL_INTERRUPTED)
        if left.deleted:
            raise Partial(
                f"not deleted yet: {', '.join(item.what for item in left.deleted)}", fix="run remuda destroy again"
            )
        output.say(f"pool {settings.pool} is deleted")
    output.result({**document, "kept": {item.what: item.kept_because for item in found.kept}})
    return EXIT_OK


def _show_removals(output: Output, plan: RemovalPlan) -> None:
    if plan.machines:
        output.say(f"{plural(plan.machines, 'machine')}, {plan.busy} of them in use")
    for item in plan.deleted:
        output.say(f"delete  {item.what}{' (data)' if item.is_data else ''}")
    for item in plan.kept:
        output.say(f"keep    {item.what}: {item.kept_because}", style="yellow")


# Input --------------------------------------------------------------------------------------------------------------


def parse_parameters(values: Sequence[str]) -> dict[str, str]:
    found = {}
    for value in values:
        name, given, text = value.partition("=")
        if not given or not name.isalnum():
            raise UserError(
                f"--parameter must be NAME=VALUE, got {value[:MAX_SHOWN]!r}",
                field="--parameter",
                fix="give a parameter of the stack, such as AlarmTopicArn=arn:…",
            )
        if name in _FLAGS or name in _OWN_PARAMETERS:
            fix = f"give {_FLAGS[name]}" if name in _FLAGS else "omit it: deploy sets it"
            raise UserError(f"--parameter {name} cannot be given", field="--parameter", fix=fix)
        found[name] = text
    return found


def read_credential(settings: Settings, token: str, app_key: str) -> _Credential:
    """The credential of the flags, the environment or the file; empty if none exists."""
    is_app = bool(settings.github_app_id) and not token
    # As for the other commands, a token has priority over an App.
    if is_app and (app_key or (settings.github_app_key and settings.github_token is None)):
        text = _read_file("--github-app-key", app_key) if app_key else ""
        if not text and settings.github_app_key is not None:
            text = settings.github_app_key.text
        if is_secret_arn(text):
            return _Credential(secret_arn=text, app_id=settings.github_app_id)
        return _Credential(
            credential=GithubCredential(text=read_private_key(text), app_id=settings.github_app_id),
            app_id=settings.github_app_id,
        )
    if app_key:
        raise UserError("--github-app-key needs --github-app-id", field="--github-app-id", fix="give the App's id")
    text = _read_file("--github-token", token) if token else ""
    if not text and settings.github_token is not None:
        text = settings.github_token.text
    return _token(text)


def _token(text: str) -> _Credential:
    if not text:
        return _Credential()
    if is_secret_arn(text):
        return _Credential(secret_arn=text)
    if not text.isascii() or not text.isprintable() or " " in text:
        raise UserError("the GitHub token has spaces or other characters", field="--github-token")
    return _Credential(credential=GithubCredential(text=text))


def _read_file(flag: str, value: str) -> str:
    if not value.startswith("@"):
        raise UserError(
            f"{flag} must be @FILE: other users of this machine can read the arguments of a command",
            field=flag,
            fix=f"store the credential in a file and give {flag} @FILE",
        )
    try:
        text = Path(value[1:]).expanduser().read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        message, fix = f"{flag}: {value[1:][:MAX_SHOWN]} cannot be read: {reason}", "name a readable file after the @"
        raise UserError(message, field=flag, fix=fix) from None
    if not text:
        fix = "store the credential in the file"
        raise UserError(f"{flag}: {value[1:][:MAX_SHOWN]} is empty", field=flag, fix=fix)
    return text


def _choose_region(region: str, *, asks: bool) -> None:
    from remuda.adapters.aws.clients import AwsClients  # noqa: PLC0415 - AWS libraries are slow to import

    if region:
        check_region(region)
        os.environ["AWS_REGION"] = region
        return
    try:
        AwsClients().region()
    except UserError:
        if not asks:
            raise UserError("no AWS region is given", field="--region", fix="give --region or set AWS_REGION") from None
        os.environ["AWS_REGION"] = click.prompt("AWS region", err=True)
    check_region()


def _with_pool(settings: Settings, *, asks: bool) -> Settings:
    if settings.given("pool") or not asks:
        return settings
    text = click.prompt("name of the pool", default=settings.pool, err=True)
    return replace(settings, pool=SETTINGS["pool"].kind.parse(text))


def given_parameters(settings: Settings) -> dict[str, str]:
    """The parameters of the stack for settings that were given, as they were written."""
    found = {}
    for name, declared in SETTINGS.items():
        # In a workflow, GITHUB_REPOSITORY is the repository of the workflow; it must not change an existing pool.
        is_own = settings.given(name) and settings.origins[name] != "GITHUB_REPOSITORY"
        if not is_own or not (declared.is_parameter or name in STACK_PARAMETERS):
            continue
        value = settings.written.get(name)
        found[declared.parameter] = value if isinstance(value, str) else _text(value)
    return found


def _text(value: Any) -> str:
    """A value of the settings file as the text of a parameter."""
    if isinstance(value, bool):
        return str(value).lower()
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return ",".join(value) if is_list else json.dumps(value)


def check_launch_options(settings: Settings) -> None:
    """Check the options of machines before any call, with placeholders for those that are not known yet."""
    from remuda.adapters.aws.ec2.options import AMI, PROFILE, SUBNETS, Ec2LaunchOptions  # noqa: PLC0415 - as above

    unknown = {AMI: "ami-00000000", SUBNETS: "subnet-00000000", PROFILE: "remuda"}
    Ec2LaunchOptions.parse({**unknown, **settings.launch_options()})


def _complete(scope: str, credential: _Credential, stored: Mapping[str, str], *, asks: bool) -> tuple[str, _Credential]:
    """Ask for what is missing, or name all of it in one error."""
    needs_credential = not credential.is_given and not stored.get("GithubSecretArn", "")
    if not asks:
        missing = [text for text, is_missing in ((_SCOPE, not scope), (_CREDENTIAL, needs_credential)) if is_missing]
        if missing:
            raise UserError(". ".join(missing), field="--github-scope" if not scope else "REMUDA_GITHUB_TOKEN")
        return scope, credential
    if not scope:
        scope = check_scope(click.prompt("organization or owner/repo that the runners register in", err=True))
    if needs_credential:
        text = click.prompt("GitHub token (hidden; empty for a GitHub App)", hide_input=True, default="", err=True)
        credential = _token(text.strip()) if text.strip() else _ask_for_app()
    return scope, credential


def _check_role_path(pool: str, parameters: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """IAM cannot move a role, and CloudFormation replaces no role whose name is fixed."""
    before, wanted = stored.get("RolePath", "/"), parameters.get("RolePath")
    if stored and wanted not in {None, before}:
        raise UserError(
            f"--role-path is {quote(str(wanted), MAX_SHOWN)}, but the roles of pool {pool} have the path {before}",
            field="--role-path",
            fix="omit it, or choose another pool name",
        )


def _first_set(
    output: Output, pool: str, parameters: Mapping[str, str], stored: Mapping[str, str], *, asks: bool
) -> dict[str, str]:
    """The runner set of a new pool for which none is given: recommended, and created after a question only.

    Its name contains the pool's: a set belongs to the scope on GitHub, which several pools may share.
    """
    if stored or _SETS in parameters:
        return {}
    labels = ["self-hosted", "remuda", "large"]
    first = json.dumps([{"name": f"{pool}-large", "labels": labels, "resource-class": "large", "max": 20}])
    if not asks:
        output.say(
            "no runner set is given, so workflows need a provision and a release job. "
            "Unless a matrix needs all its runners at once, give a set:",
            f"  --runner-sets '{first}'",
        )
        return {}
    question = f"create a runner set, so that jobs with runs-on [{', '.join(labels)}] get runners?"
    return {_SETS: first} if click.confirm(question, default=True, err=True) else {}


def _ask_for_app() -> _Credential:
    app_id = click.prompt("id of the GitHub App", err=True).strip()
    path = click.prompt("file with its private key (PEM)", err=True).strip()
    return _Credential(credential=GithubCredential(text=read_private_key(path), app_id=app_id), app_id=app_id)


def _request(
    settings: Settings,
    parameters: Mapping[str, str],
    *,
    scope: str,
    vpc: str,
    credential: _Credential,
    stored: Mapping[str, str],
    bundles: BundleSource,
) -> DeployRequest:
    from remuda.deployment.deploy import DeployRequest  # noqa: PLC0415
    from remuda.deployment.preflight import DeployTarget  # noqa: PLC0415
    from remuda.deployment.template import VOLUME_KEY_PARAMETER, template  # noqa: PLC0415

    made = template()
    defaults = {name: str(item["Default"]) for name, item in made["Parameters"].items()}
    given = {name: value for name, value in stored.items() if value}
    classes = settings.resource_class_config if settings.given("resource_class_config") else None
    api_url = settings.github_api_url or stored.get("GithubApiUrl", "")
    limit = parameters.get("MaxInstances") or stored.get("MaxInstances", "")
    return DeployRequest(
        wanted=DeployTarget(
            pool=settings.pool,
            scope=scope,
            vpc=vpc,
            subnets=tuple(settings.subnet_ids.replace(",", " ").split()),
            security_groups=settings.security_group_ids,
            image=settings.ami,
            volume_key=parameters.get(VOLUME_KEY_PARAMETER, ""),
            classes=classes,
            max_instances=int(limit) if limit else settings.max_instances,
            issuer=parameters.get("OidcIssuer") or stored.get("OidcIssuer", "") or _checked_issuer(api_url),
            has_credential=credential.credential is not None,
            has_own_secret=bool(credential.secret_arn),
            resource_types=frozenset(item["Type"] for item in made["Resources"].values()),
            parameters=parameters,
            listener=_listener_target(settings, {**defaults, **given, **parameters}, parameters, scope),
        ),
        parameters=parameters,
        repositories=scope if "/" in scope else f"{scope}/*",
        credential=credential.credential,
        own_secret=credential.secret_arn,
        app_id=credential.app_id,
        api_url=api_url,
        bundles=bundles,
    )


def _listener_target(
    settings: Settings, values: Mapping[str, str], given: Mapping[str, str], scope: str
) -> ListenerTarget | None:
    """`values` are the parameters that the stack will have, `given` those of the user."""
    from remuda.deployment.preflight import ListenerTarget  # noqa: PLC0415 - AWS libraries are slow to import

    runner_sets = parse_stack_sets(values["RunnerSets"], scope)
    if runner_sets is None:
        return None
    return ListenerTarget(
        runner_sets=runner_sets,
        reuse=settings.reuse if settings.given("reuse") else Reuse(values["Reuse"] or settings.reuse),
        is_on_instance=values[LISTENER] == "instance",
        image=given.get("ListenerAmi", ""),
        instance_type=values["ListenerInstanceType"],
    )


def parse_stack_sets(text: str, scope: str) -> tuple[RunnerSet, ...] | None:
    """The runner sets of the stack's parameter; None if it is not set."""
    if not text:
        return None
    try:
        return in_scope(SETTINGS["runner_sets"].kind.parse(text), scope)
    except UserError as error:
        raise UserError(error.message, field="--runner-sets", fix=error.fix) from None


def _checked_issuer(api_url: str) -> str:
    """The issuer of an installation of GitHub. The functions accept the same ones."""
    from remuda.deployment.resources import issuer_of  # noqa: PLC0415 - AWS libraries are slow to import

    issuer = issuer_of(api_url)
    try:
        return str(SETTINGS["oidc_issuer"].kind.parse(issuer))
    except InvalidValue:
        raise UserError(
            f"--github-api-url is {api_url[:MAX_SHOWN]!r}, but OIDC tokens need an issuer with https",
            field="--github-api-url",
            fix="give the https URL of the API, or --oidc-issuer",
        ) from None


# Calls --------------------------------------------------------------------------------------------------------------


async def _ports(stack: AsyncExitStack) -> dict[str, Any]:
    from remuda.adapters.aws.clients import AwsClients  # noqa: PLC0415 - AWS libraries are slow to import
    from remuda.deployment.api import AwsApi  # noqa: PLC0415

    return {"api": AwsApi(await stack.enter_async_context(AwsClients())), "clock": SystemClock()}


async def _stored_parameters(pool: str) -> Mapping[str, str]:
    from remuda.deployment.resources import stack_name  # noqa: PLC0415 - AWS libraries are slow to import
    from remuda.deployment.stack import Stack, stored_parameters  # noqa: PLC0415

    async with AsyncExitStack() as stack:
        ports = await _ports(stack)
        return stored_parameters(await Stack(ports["api"], stack_name(pool), ports["clock"]).describe())


async def _check(settings: Settings, request: DeployRequest) -> tuple[DeployFacts, Mapping[str, CheckResult], str]:
    """Also returns the default of the repositories."""
    from remuda.deployment.preflight import Preflight  # noqa: PLC0415 - AWS libraries are slow to import

    repositories = request.repositories
    async with AsyncExitStack() as stack:
        open_github = client = None
        if request.credential is not None:
            system = (SystemClock(), SystemIds(), CallCounter())
            client = github_client(replace(settings, github_api_url=request.api_url), request.credential, *system)
            stack.push_async_callback(client.close)

            async def open_github() -> GitHubClient:
                return client

        preflight = Preflight(**await _ports(stack), wanted=request.wanted, bundles=request.bundles, github=open_github)
        results = await run_checks(preflight.checks())
        if client is not None:
            # Tokens of repositories created since July 2026 name ids, too. Without them, such a workflow has no access.
            with suppress(RemudaError):
                repositories += f",{await client.immutable_name(request.wanted.scope)}"
        return preflight.facts, results, repositories


# Output -------------------------------------------------------------------------------------------------------------


def _show_checks(output: Output, results: Mapping[str, CheckResult]) -> None:
    ordered = problems_first(results)
    if sys.stderr.isatty():
        output.show(check_table(ordered))
    else:
        output.say(*check_lines(ordered))


def _show_changes(output: Output, changes: Sequence[StackChange]) -> None:
    rows = [(item.word, item.logical_id, item.resource_type) for item in changes]
    if rows:
        output.show(FittedTable("Changes of the stack", ("change", "resource", "type"), rows))
    else:
        output.say("the stack is up to date")


def change_documents(changes: Sequence[StackChange]) -> list[dict[str, str]]:
    return [{"change": item.word, "resource": item.logical_id, "type": item.resource_type} for item in changes]


def _base_document(
    request: DeployRequest, facts: DeployFacts, results: Mapping[str, CheckResult], *, dry_run: bool
) -> dict[str, Any]:
    account = facts.known_account
    return {
        "pool": request.wanted.pool,
        "account": account.account_id,
        "region": account.region,
        "stack": f"remuda-{request.wanted.pool}",
        "dry_run": dry_run,
        "checks": [check_document(name, result) for name, result in results.items()],
    }


def _no_confirmation() -> UserError:
    return UserError(
        "confirmation is required, but standard input is not a terminal", field="--yes", fix="pass --yes, or --dry-run"
    )


def _confirm(question: str, *, asks: bool, confirmed: bool, default: bool = True) -> None:
    if confirmed:
        return
    if not asks:
        raise _no_confirmation()
    if not click.confirm(question, default=default, err=True):
        raise UserError("the stack was not changed", field="--yes", fix="answer y, or pass --yes")
