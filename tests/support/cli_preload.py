"""Imports and data that most commands need, loaded once by the fork server of `cli.py`."""

# ruff: noqa: F401

import remuda.adapters.aws.clients
import remuda.adapters.aws.dynamodb.keys
import remuda.adapters.aws.dynamodb.store
import remuda.adapters.aws.ec2.compute
import remuda.adapters.aws.ec2.options
import remuda.adapters.aws.ec2.tagged_fleet
import remuda.adapters.aws.sqs
import remuda.adapters.github.auth
import remuda.adapters.github.client
import remuda.cli.lifecycle
import remuda.cli.local_backend
import remuda.cli.main
import remuda.cli.operator
import remuda.cli.read
import remuda.cli.run_workflow
import remuda.cli.terminal
import tests.support.cli
from remuda.adapters.aws.clients import open_session

_models = open_session().get_component("data_loader")
for service in ("dynamodb", "ec2", "iam", "sqs", "sts"):
    for kind in ("service-2", "endpoint-rule-set-1", "paginators-1"):
        _models.load_service_model(service, kind)
for name in ("endpoints", "partitions", "sdk-default-configuration"):
    _models.load_data(name)
