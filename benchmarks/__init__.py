"""Benchmarks of time and API calls, run by `python -m benchmarks` or `make bench`."""
