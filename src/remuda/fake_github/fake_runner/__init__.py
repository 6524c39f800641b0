"""The fake actions runner: the programs behind `config.sh` and `bin/Runner.Listener`.

`fake_github.install_runner` copies this package into the runner's folder and runs it without site-packages. It
therefore uses relative imports and the standard library only.

Texts, checks and exit codes are those of actions/runner at the version below. Comments name the source files.
"""

VERSION = "2.336.0"
#: Digits of the length that precedes the job on the worker's stdin.
LENGTH_DIGITS = 10
