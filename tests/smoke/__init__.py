"""The smoke run in a real AWS account: `make smoke-aws`."""
