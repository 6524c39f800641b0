"""Load and faults: jobs of runs and of a runner set on many machines, while processes, disks and clocks fail."""
