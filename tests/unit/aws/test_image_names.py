"""Kernels of public images, by their names."""

from __future__ import annotations

import pytest

from remuda.adapters.aws.doctor import has_old_kernel


@pytest.mark.parametrize(
    ("name", "is_old"),
    [
        ("al2023-ami-2023.6.20241010.0-kernel-6.1-x86_64", False),
        ("al2022-ami-2022.0.20220728.1-kernel-5.15-x86_64", True),
        ("amzn2-ami-kernel-5.10-hvm-2.0.20240916.0-x86_64-gp2", True),
        ("amzn2-ami-hvm-2.0.20240916.0-x86_64-gp2", True),
        ("ubuntu/images/hvm-ssd/ubuntu-focal-20.04-amd64-server-20240821", True),
        # The kernel of these changed over time.
        ("ubuntu/images/hvm-ssd/ubuntu-jammy-22.04-amd64-server-20240927", False),
        ("ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20240927", False),
        ("debian-11-amd64-20240717-1811", True),
        ("debian-12-amd64-20240717-1811", False),
        ("our-runners-42", False),
        ("", False),
    ],
)
def test_old_kernels_are_recognized_by_the_name(name: str, *, is_old: bool) -> None:
    assert has_old_kernel(name) is is_old
