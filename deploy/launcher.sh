#!/bin/sh
# Launcher of a bundle: runs Remuda with the interpreter of the bundle, or else with a CPython of this machine that the
# bundle has extension modules for. REMUDA_PYTHON names another one. Neither the environment nor packages of the machine
# change what is imported (-IS).
set -eu
versions='3.14 3.13 3.12 3.11'
program=$(readlink -f "$0")
root=${program%/*/*}
check='import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1:] or sys.implementation.name != "cpython")'

# shellcheck disable=SC2086  # a list of words
try() { # PYTHON ARGUMENT...
  python=$1
  shift
  command -v "$python" >/dev/null && "$python" -ISc "$check" $versions 2>/dev/null || return 0
  exec "$python" -IS "$root/lib/bin/${program##*/}" "$@"
}

if [ -n "${REMUDA_PYTHON:-}" ]; then
  try "$REMUDA_PYTHON" "$@"
  echo "remuda: REMUDA_PYTHON is $REMUDA_PYTHON, but this bundle needs CPython ${versions##* } to ${versions%% *}" >&2
  exit 2
fi
try "$root/python/bin/python3" "$@"
for version in $versions; do try "python$version" "$@"; done
try python3 "$@"
# Interpreters of GitHub's images that are not in the search path.
for python in "${RUNNER_TOOL_CACHE:-/nonexistent}"/Python/3.*/*/bin/python3; do try "$python" "$@"; done
echo "remuda: this machine has no CPython ${versions##* } to ${versions%% *}; install one, for example the package python${versions##* }" >&2
exit 2
