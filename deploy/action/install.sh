#!/usr/bin/env bash
# First step of the action: find a Python for Remuda and install it.
set -euo pipefail

usable() {
  "$1" -I -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

fail() {
  echo "::error title=remuda::$1"
  exit 2
}

[ "${RUNNER_OS:-}" != Windows ] || fail 'remuda requires a Linux or macOS runner; change runs-on of this job'

if [ -n "${INPUT_PYTHON:-}" ]; then
  # The message does not quote the input, which is untrusted text.
  usable "$INPUT_PYTHON" || fail 'the input python must be a Python 3.11 or newer with venv; give another path, or omit it'
  exec "$INPUT_PYTHON" -I "$GITHUB_ACTION_PATH/deploy/action/install.py"
fi

for python in python3 python3.14 python3.13 python3.12 python3.11 python \
  "${RUNNER_TOOL_CACHE:-/nonexistent}"/Python/3.*/*/bin/python3; do
  if usable "$python"; then
    exec "$python" -I "$GITHUB_ACTION_PATH/deploy/action/install.py"
  fi
done
fail 'remuda requires Python 3.11 or newer with venv; use actions/setup-python before this step, or set the input python'
