"""Provision: registered and committed runners for a run, from the pool if possible, newly created otherwise."""

from __future__ import annotations

from remuda.controlplane.provision.plan import ProvisionedInstance, ProvisionRequest, ProvisionResult
from remuda.controlplane.provision.provisioning import provision

__all__ = ["ProvisionRequest", "ProvisionResult", "ProvisionedInstance", "provision"]
