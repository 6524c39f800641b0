"""The agent of an EC2 instance on a model of its host, in which every effect of the agent can be cut or fail.

`seam` has the table of all functions through which host code acts, `host` is what it acts on (processes, cgroups,
mounts, timers, files), `programs` are the commands that it runs, `life` runs the real agent through whole assignments,
and `judge` says what must hold meanwhile. Everything runs in one process, in virtual time and without root.
"""
