"""Remuda: warm, reusable EC2 runners for GitHub Actions."""

__version__ = "0.1.0"
