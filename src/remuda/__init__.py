"""Remuda: a herd of warm machines for GitHub Actions."""

__version__ = "0.1.0"
