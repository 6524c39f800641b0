"""What Remuda costs, against the floor of the same servers: `python -m benchmarks`, or `make bench`."""
