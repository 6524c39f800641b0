"""Data that comes with the package."""
