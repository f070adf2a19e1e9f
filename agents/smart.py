"""The allocator with the shipped policy, whole and in parts, for the registry."""

from __future__ import annotations

from agents.forecast import PRETRAINED
from serving_bridge.adapter import AdapterSettings
from serving_bridge.allocator import SmartAllocator
from serving_bridge.policy import FrozenPolicy
from serving_bridge.recovery import RecoverySettings

SHIPPED = "working_set"
"""The policy with eight features, trained on the smooth reward."""


def build(
    adapter: AdapterSettings | None = None,
    recovery: RecoverySettings | None = None,
    name: str = "SmartAllocator",
) -> SmartAllocator:
    """An allocator around the shipped policy; None leaves a layer out."""
    return SmartAllocator(FrozenPolicy.load(PRETRAINED / SHIPPED), adapter, recovery, name=name)


def policy_alone() -> SmartAllocator:
    """The frozen policy, nothing around it."""
    return build(name="PPO")


def with_adapter() -> SmartAllocator:
    """The policy and the online adapter."""
    return build(AdapterSettings(), name="PPO + adapter")


def with_p99_recovery() -> SmartAllocator:
    """Policy, adapter, and recovery that sees bursts by P99 (Eq. 8)."""
    return build(AdapterSettings(), RecoverySettings(detector="p99"), "PPO + adapter + RC by P99")


def allocator() -> SmartAllocator:
    """Policy, adapter, and recovery that sees bursts by the workload: the default."""
    return build(AdapterSettings(), RecoverySettings(detector="workload"))
