"""What commands import and read first. Imported by the server that forks them (`prepared.py`), and by nobody else."""

from importlib import import_module

from remuda.adapters.aws.clients import open_session

IMPORTED = {
    "remuda.adapters.aws": ("dynamodb.store", "secrets", "sqs"),
    "remuda.adapters.aws.ec2": ("compute", "options", "prices", "tagged_fleet"),
    "remuda.adapters.github": ("auth", "client"),
    "remuda.cli": (
        *("operator", "main", "commands", "doctor", "local_backend", "report", "scale_down", "terminal", "watch"),
        "run_workflow",
    ),
    "tests.support": ("forkserver_cli",),
}

for package, modules in IMPORTED.items():
    for module in modules:
        import_module(f"{package}.{module}")

_models = open_session().get_component("data_loader")
for service in ("dynamodb", "ec2", "iam", "sqs", "sts"):
    for kind in ("service-2", "endpoint-rule-set-1", "paginators-1"):
        _models.load_service_model(service, kind)
for name in ("endpoints", "partitions", "sdk-default-configuration"):
    _models.load_data(name)
