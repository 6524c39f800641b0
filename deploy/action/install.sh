#!/usr/bin/env bash
# The action's first step: finds a Python for Remuda, which then installs it, or says what to do.
set -euo pipefail

usable() {
  "$1" -I -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

fail() {
  echo "::error title=remuda::$1"
  exit 2
}

[ "${RUNNER_OS:-}" != Windows ] || fail 'remuda runs on Linux and macOS runners; let this job run on one of them'

if [ -n "${INPUT_PYTHON:-}" ]; then
  # Not repeated in the message: it is text from outside.
  usable "$INPUT_PYTHON" || fail 'the input python names no Python 3.11 or newer with venv; name another, or leave it out'
  exec "$INPUT_PYTHON" -I "$GITHUB_ACTION_PATH/deploy/action/install.py"
fi

for python in python3 python3.14 python3.13 python3.12 python3.11 python \
  "${RUNNER_TOOL_CACHE:-/nonexistent}"/Python/3.*/*/bin/python3; do
  if usable "$python"; then
    exec "$python" -I "$GITHUB_ACTION_PATH/deploy/action/install.py"
  fi
done
fail 'remuda needs Python 3.11 or newer with venv; use actions/setup-python before this step, or name one with the input python'
