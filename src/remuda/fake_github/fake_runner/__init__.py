"""The stand-in for actions/runner: what `config.sh` and `bin/Runner.Listener` run.

`package.install` copies this package into the runner's folder, where it is started without site-packages: it uses
the standard library only, imports itself relatively, and knows nothing of the rest of Remuda.
"""

VERSION = "2.336.0"
