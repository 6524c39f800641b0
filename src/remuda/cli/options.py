"""The flags, each declared once. All are text here: settings check them, so that every source gets the same words."""

from __future__ import annotations

from typing import Annotated

import typer

_RUN = "The run"
_POOL = "The pool"
_COMMON = "Everywhere"
_AWS = "Machines on AWS"
_FLEET = "The fleet"

Backend = Annotated[
    str | None, typer.Option("--backend", help="local or aws. (default: local)", rich_help_panel=_COMMON)
]
Dir = Annotated[
    str | None,
    typer.Option("--dir", help="State folder of the local backend. (default: .remuda)", rich_help_panel=_COMMON),
]
Config = Annotated[
    str | None,
    typer.Option("--config", help="Settings file. (default: remuda.toml if there is one)", rich_help_panel=_COMMON),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel=_COMMON)]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.", rich_help_panel=_COMMON)]
Pool = Annotated[
    str | None, typer.Option("--pool", help="Name of the pool. (default: default)", rich_help_panel=_COMMON)
]
Scope = Annotated[
    str | None,
    typer.Option("--github-scope", help="owner or owner/repo. (default: GITHUB_REPOSITORY)", rich_help_panel=_COMMON),
]

LogFormat = Annotated[
    str | None,
    typer.Option("--log-format", help="text, or json: a line an event on stderr.", rich_help_panel=_COMMON),
]
Instances = Annotated[list[str] | None, typer.Argument(metavar="[INSTANCE]...", help="Which instances.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")]
Reason = Annotated[str, typer.Option("--reason", help="Why: it stands in the history.")]
Prices = Annotated[
    str | None,
    typer.Option("--prices", help="JSON file of prices an hour. (default: the list shipped)", rich_help_panel=_COMMON),
]

RunId = Annotated[
    str | None, typer.Option("--run-id", help="The workflow's run id. (default: GITHUB_RUN_ID)", rich_help_panel=_RUN)
]
RunAttempt = Annotated[
    str | None,
    typer.Option(
        "--run-attempt", help="The workflow's attempt. (default: GITHUB_RUN_ATTEMPT, or 1)", rich_help_panel=_RUN
    ),
]
InstanceCount = Annotated[
    str | None, typer.Option("--instance-count", help="How many runners. (default: 1)", rich_help_panel=_RUN)
]
ResourceClassName = Annotated[
    str | None, typer.Option("--resource-class", help="Class of the runners. (default: large)", rich_help_panel=_RUN)
]
UsageClassName = Annotated[
    str | None, typer.Option("--usage-class", help="spot or on-demand. (default: on-demand)", rich_help_panel=_RUN)
]
AllowedTypes = Annotated[
    str | None,
    typer.Option("--allowed-instance-types", help="Such as 'c* m6i.large'. (default: *)", rich_help_panel=_RUN),
]
MaxRuntime = Annotated[
    str | None,
    typer.Option("--max-runtime-min", help="How long a run may keep its runners. (default: 30)", rich_help_panel=_RUN),
]
TierName = Annotated[
    str | None,
    typer.Option(
        "--tier",
        help="trusted or untrusted; never more than the event allows. (default: by the event)",
        rich_help_panel=_RUN,
    ),
]
Repository = Annotated[
    str | None,
    typer.Option(
        "--repository", help="The run's, owner/name. (default: GITHUB_REPOSITORY, or the scope)", rich_help_panel=_RUN
    ),
]
Ephemeral = Annotated[
    bool,
    typer.Option(
        "--ephemeral", help="New instances for one job each; needs a GitHub credential.", rich_help_panel=_RUN
    ),
]
ProvisionTimeout = Annotated[
    str | None,
    typer.Option(
        "--provision-timeout-sec", help="By when a provision must be complete. (default: 300)", rich_help_panel=_RUN
    ),
]

IdleTime = Annotated[
    str | None,
    typer.Option("--idle-time-sec", help="How long an idle instance stays. (default: 420)", rich_help_panel=_POOL),
]
ReleaseTime = Annotated[
    str | None,
    typer.Option("--release-time-sec", help="How long a release may take. (default: 300)", rich_help_panel=_POOL),
]
MaxAge = Annotated[
    str | None, typer.Option("--max-age-sec", help="Oldest age for reuse. (default: 86400)", rich_help_panel=_POOL)
]
MaxUses = Annotated[str | None, typer.Option("--max-uses", help="Most uses. (default: 50)", rich_help_panel=_POOL)]
ReuseName = Annotated[
    str | None,
    typer.Option(
        "--reuse", help="always, same-repo, same-trust or never. (default: same-trust)", rich_help_panel=_POOL
    ),
]
MaxInstances = Annotated[
    str | None,
    typer.Option("--max-instances", help="Most instances in the pool. (default: 100)", rich_help_panel=_POOL),
]
ClassConfig = Annotated[
    str | None,
    typer.Option(
        "--resource-class-config",
        help='Own classes as JSON: {"large": {"cpu": 2, "mmem": 4096}}.',
        rich_help_panel=_POOL,
    ),
]
PreRunnerScript = Annotated[
    str | None,
    typer.Option(
        "--pre-runner-script", help="Shell script each new machine runs first: text or @FILE.", rich_help_panel=_POOL
    ),
]
Margin = Annotated[
    str | None,
    typer.Option("--margin-sec", help="What clocks may differ by. (default: local 1, aws 60)", rich_help_panel=_POOL),
]
UnrecordedGrace = Annotated[
    str | None,
    typer.Option(
        "--unrecorded-grace-sec", help="A machine may lack a record so long. (default: 300)", rich_help_panel=_POOL
    ),
]
GhostGrace = Annotated[
    str | None,
    typer.Option(
        "--ghost-grace-sec",
        help="A registration may lack a record and a machine so long. (default: 900)",
        rich_help_panel=_POOL,
    ),
]
GoneAfter = Annotated[
    str | None,
    typer.Option("--gone-after-sec", help="Missing twice, so far apart: gone. (default: 60)", rich_help_panel=_POOL),
]
Reannounce = Annotated[
    str | None,
    typer.Option("--reannounce-sec", help="Idle ones are announced again. (default: 600)", rich_help_panel=_POOL),
]
KeepRecords = Annotated[
    str | None,
    typer.Option("--keep-records-sec", help="Records of ended instances. (default: 30 days)", rich_help_panel=_POOL),
]
BootDelay = Annotated[
    str | None,
    typer.Option("--boot-delay-sec", help="Local: how long a machine boots. (default: 0)", rich_help_panel=_POOL),
]
Fault = Annotated[
    str | None, typer.Option("--fault", help="Local: a failure to play, such as never-boots.", rich_help_panel=_POOL)
]
Ami = Annotated[
    str | None, typer.Option("--ami", help="Image of the machines: an id, or resolve:ssm:NAME.", rich_help_panel=_AWS)
]
SubnetIds = Annotated[str | None, typer.Option("--subnet-ids", help="Subnets to launch in.", rich_help_panel=_AWS)]
SecurityGroupIds = Annotated[
    str | None, typer.Option("--security-group-ids", help="Security groups of the machines.", rich_help_panel=_AWS)
]
InstanceProfile = Annotated[
    str | None, typer.Option("--iam-instance-profile", help="Instance profile of the machines.", rich_help_panel=_AWS)
]
KeyName = Annotated[str | None, typer.Option("--key-name", help="Key pair of the machines.", rich_help_panel=_AWS)]
SpotFallback = Annotated[
    str | None, typer.Option("--spot-fallback", help="on-demand buys what spot cannot give.", rich_help_panel=_AWS)
]
RunnerVersion = Annotated[
    str | None,
    typer.Option("--actions-runner-version", help="Version of the actions runner to install.", rich_help_panel=_AWS),
]
RunnerSha256 = Annotated[str | None, typer.Option("--actions-runner-sha256", help="Its digest.", rich_help_panel=_AWS)]
RunnerUrl = Annotated[
    str | None, typer.Option("--actions-runner-url", help="A mirror to take it from.", rich_help_panel=_AWS)
]
AgentUrl = Annotated[
    str | None,
    typer.Option("--agent-url", help="Where machines get the agent, unless the image has it.", rich_help_panel=_AWS),
]
AgentSha256 = Annotated[str | None, typer.Option("--agent-sha256", help="Its digest.", rich_help_panel=_AWS)]
PythonUrl = Annotated[
    str | None, typer.Option("--python-url", help="An interpreter for the agent.", rich_help_panel=_AWS)
]
PythonSha256 = Annotated[str | None, typer.Option("--python-sha256", help="Its digest.", rich_help_panel=_AWS)]
GithubEnvironment = Annotated[
    str | None, typer.Option("--github-environment", help="Value of the tag ghr:environment.", rich_help_panel=_AWS)
]

Environment = Annotated[
    str | None,
    typer.Option(
        "--environment",
        help="Value of the tag ghr:environment. (default: ENVIRONMENT, or the pool)",
        rich_help_panel=_FLEET,
    ),
]
IdleConfig = Annotated[
    str | None,
    typer.Option(
        "--idle-config",
        help="Idle runners to keep and when, as JSON. (default: SCALE_DOWN_CONFIG)",
        rich_help_panel=_FLEET,
    ),
]
MinimumRunningTime = Annotated[
    str | None,
    typer.Option(
        "--minimum-running-time-in-minutes",
        help="A younger runner is kept. (default: Linux 5, Windows 15)",
        rich_help_panel=_FLEET,
    ),
]
RunnerBootTime = Annotated[
    str | None,
    typer.Option(
        "--runner-boot-time-in-minutes", help="Not on GitHub by then: an orphan. (default: 5)", rich_help_panel=_FLEET
    ),
]
IdleScopeName = Annotated[
    str | None,
    typer.Option(
        "--idle-scope",
        help="environment or owner: what the quota counts for. (default: environment)",
        rich_help_panel=_FLEET,
    ),
]
MaxRemovals = Annotated[
    str | None,
    typer.Option(
        "--max-removals-per-cycle", help="Runners to remove from GitHub at most. (default: all)", rich_help_panel=_FLEET
    ),
]
