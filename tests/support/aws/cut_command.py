"""`python -m tests.support.aws.cut_command ARGUMENTS…`: the `remuda` command, cut after an operation of AWS."""

import sys

from tests.support.aws.deployment import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
