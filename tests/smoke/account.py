"""The AWS account of a smoke run: machines by tags, spot notices by FIS, and what earlier runs left."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import code_of
from remuda.adapters.aws.clients import AwsClients, config
from remuda.ports.compute import POOL_TAG

#: Pools of smoke runs.
PREFIX = "smoke-"
RUNNING = ("pending", "running", "stopping", "stopped", "shutting-down")
#: FIS: the shortest time between notice and interruption ("aws:ec2:send-spot-instance-interruptions" in its reference).
NOTICE = "PT2M"
_MISSING = frozenset({"ResourceNotFoundException", "NoSuchEntity", "NoSuchEntityException"})


def fis_role(pool: str) -> str:
    return f"remuda-{pool}-fis"


def experiment(pool: str, *, role_arn: str, instance_arn: str) -> dict[str, Any]:
    """The template of an experiment that sends a spot notice to one machine."""
    return {
        "clientToken": f"remuda-{pool}",
        "description": "Spot notice of a smoke run of Remuda",
        "roleArn": role_arn,
        "stopConditions": [{"source": "none"}],
        "targets": {
            "machine": {
                "resourceType": "aws:ec2:spot-instance",
                "resourceArns": [instance_arn],
                "selectionMode": "ALL",
            }
        },
        "actions": {
            "notice": {
                "actionId": "aws:ec2:send-spot-instance-interruptions",
                "parameters": {"durationBeforeInterruption": NOTICE},
                "targets": {"SpotInstances": "machine"},
            }
        },
        "tags": {POOL_TAG: pool},
    }


class SmokeAccount:
    def __init__(self, clients: AwsClients) -> None:
        self._clients = clients

    async def _client(self, service: str) -> Any:
        return await self._clients.client(service, service, config())

    async def machines(self, pool: str) -> list[str]:
        """Machines with the tag of the pool, or of all pools that match a pattern, that may still cost money."""
        ec2 = await self._client("ec2")
        filters = [
            {"Name": f"tag:{POOL_TAG}", "Values": [pool]},
            {"Name": "instance-state-name", "Values": list(RUNNING)},
        ]
        pages = ec2.get_paginator("describe_instances").paginate(Filters=filters)
        return [
            str(instance["InstanceId"])
            async for page in pages
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        ]

    async def terminate(self, machines: list[str]) -> None:
        if machines:
            await (await self._client("ec2")).terminate_instances(InstanceIds=machines)

    # Spot notice ----------------------------------------------------------------------------------------------------

    async def create_fis_role(self, pool: str) -> str:
        iam = await self._client("iam")
        trust = {"Effect": "Allow", "Principal": {"Service": "fis.amazonaws.com"}, "Action": "sts:AssumeRole"}
        role = await iam.create_role(
            RoleName=fis_role(pool),
            AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [trust]}),
            Tags=[{"Key": POOL_TAG, "Value": pool}],
        )
        allowed = [
            {"Effect": "Allow", "Action": "ec2:DescribeInstances", "Resource": "*"},
            {
                "Effect": "Allow",
                "Action": "ec2:SendSpotInstanceInterruptions",
                "Resource": "arn:*:ec2:*:*:instance/*",
                "Condition": {"StringEquals": {f"aws:ResourceTag/{POOL_TAG}": pool}},
            },
        ]
        await iam.put_role_policy(
            RoleName=fis_role(pool),
            PolicyName="interrupt",
            PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": allowed}),
        )
        return str(role["Role"]["Arn"])

    async def send_spot_notice(self, pool: str, instance_id: str, *, role_arn: str) -> str:
        """Start the experiment and return its id."""
        identity = await (await self._client("sts")).get_caller_identity()
        partition = identity["Arn"].split(":")[1]
        region = self._clients.region()
        arn = f"arn:{partition}:ec2:{region}:{identity['Account']}:instance/{instance_id}"
        fis = await self._client("fis")
        made = await fis.create_experiment_template(**experiment(pool, role_arn=role_arn, instance_arn=arn))
        started = await fis.start_experiment(
            clientToken=f"remuda-{pool}", experimentTemplateId=made["experimentTemplate"]["id"], tags={POOL_TAG: pool}
        )
        return str(started["experiment"]["id"])

    async def experiment_state(self, experiment_id: str) -> tuple[str, str]:
        """Status and reason."""
        found = await (await self._client("fis")).get_experiment(id=experiment_id)
        state: Mapping[str, Any] = found["experiment"]["state"]
        return str(state["status"]), str(state.get("reason", ""))

    async def remove_experiments(self, pool: str) -> None:
        fis = await self._client("fis")
        async for template in self._templates():
            if template.get("tags", {}).get(POOL_TAG) == pool:
                await fis.delete_experiment_template(id=template["id"])
        iam = await self._client("iam")
        for remove, more in ((iam.delete_role_policy, {"PolicyName": "interrupt"}), (iam.delete_role, {})):
            try:
                await remove(RoleName=fis_role(pool), **more)
            except ClientError as error:
                if code_of(error) not in _MISSING:
                    raise

    async def _templates(self) -> AsyncIterator[Mapping[str, Any]]:
        fis = await self._client("fis")
        more: dict[str, str] = {}
        while True:
            page = await fis.list_experiment_templates(**more)
            for template in page["experimentTemplates"]:
                yield template
            if not page.get("nextToken"):
                return
            more = {"nextToken": page["nextToken"]}

    # Left-overs -----------------------------------------------------------------------------------------------------

    async def tagged(self) -> dict[str, set[str]]:
        """ARNs of resources with the tag of a smoke pool, by pool.

        The index of the tagging API lags by minutes and still lists deleted resources for a while. So it finds pools to
        clean up; what is really left says `remuda destroy`.
        """
        tagging = await self._client("resourcegroupstaggingapi")
        found: dict[str, set[str]] = {}
        async for page in tagging.get_paginator("get_resources").paginate(TagFilters=[{"Key": POOL_TAG}]):
            for resource in page["ResourceTagMappingList"]:
                for tag in resource["Tags"]:
                    if tag["Key"] == POOL_TAG and tag["Value"].startswith(PREFIX):
                        found.setdefault(tag["Value"], set()).add(resource["ResourceARN"])
        return found

    async def pools(self) -> set[str]:
        """Smoke pools of which something is left: a machine, a role, an experiment, or anything else with the tag."""
        found = set(await self.tagged())
        ec2 = await self._client("ec2")
        filters = [
            {"Name": f"tag:{POOL_TAG}", "Values": [f"{PREFIX}*"]},
            {"Name": "instance-state-name", "Values": list(RUNNING)},
        ]
        async for page in ec2.get_paginator("describe_instances").paginate(Filters=filters):
            for reservation in page["Reservations"]:
                for instance in reservation["Instances"]:
                    found |= {tag["Value"] for tag in instance["Tags"] if tag["Key"] == POOL_TAG}
        async for template in self._templates():
            found |= {value for key, value in template.get("tags", {}).items() if key == POOL_TAG}
        # Roles are not in the index of the tagging API.
        iam = await self._client("iam")
        async for page in iam.get_paginator("list_roles").paginate():
            names = [str(role["RoleName"]) for role in page["Roles"]]
            found |= {
                name.removeprefix("remuda-").removesuffix("-fis")
                for name in names
                if name.startswith(f"remuda-{PREFIX}") and name.endswith("-fis")
            }
        return {pool for pool in found if pool.startswith(PREFIX)}
