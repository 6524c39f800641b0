"""What listener and worker agree on."""

#: The job's message on the worker's stdin starts with its length in this many digits.
LENGTH_DIGITS = 10
