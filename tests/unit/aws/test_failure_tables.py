"""Every operation of the pool's adapters is in a table of failures."""

from __future__ import annotations

from tests.support.aws.request_rules import RULES, WITHOUT_RULES
from tests.unit.aws.test_dynamodb_failures import STORE_OPERATIONS
from tests.unit.aws.test_ec2_failures import COMPUTE_OPERATIONS, FLEET_OPERATIONS
from tests.unit.aws.test_sqs_failures import POOL_OPERATIONS

TABLES = {
    "dynamodb": STORE_OPERATIONS,
    "ec2": [*COMPUTE_OPERATIONS, *FLEET_OPERATIONS],
    "sqs": POOL_OPERATIONS,
}
#: Made only by commands that a person runs and repeats: `deploy`, `destroy` and `doctor`.
OF_COMMANDS = frozenset(
    [
        *("dynamodb:DeleteTable", "dynamodb:ListTagsOfResource", "ec2:CreateSecurityGroup", "ec2:DeleteSecurityGroup"),
        *("ec2:DeleteLaunchTemplate", "ec2:DescribeInstanceTypes", "ec2:DescribeRouteTables", "ec2:DescribeSnapshots"),
        *("ec2:DescribeVpcEndpoints", "ec2:DescribeVpcs", "ec2:GetEbsDefaultKmsKeyId", "ec2:RunInstances"),
    ]
)


def test_each_operation_fails_in_each_way() -> None:
    called = {name for rule in RULES for name in rule.operations.split()} | WITHOUT_RULES
    called = {name for name in called if name.partition(":")[0] in TABLES}
    tried = {f"{service}:{failing.operation}" for service, table in TABLES.items() for failing in table}
    # It has a table of its own: a report works without prices.
    tried.add("ec2:DescribeSpotPriceHistory")
    assert called - tried == OF_COMMANDS
    assert not tried - called
