"""Provision: registered and committed runners for a run, from the pool if possible, newly created otherwise."""

from __future__ import annotations

from remuda.controlplane.provision.provisioning import provision
from remuda.controlplane.provision.request import ProvisionedInstance, ProvisionRequest, ProvisionResult

__all__ = ["ProvisionRequest", "ProvisionResult", "ProvisionedInstance", "provision"]
