#!/bin/bash
# Like config.sh of actions/runner (src/Misc/layoutroot, 2.336.0): same commands and flags.
if [[ $EUID -eq 0 && -z "$RUNNER_ALLOW_RUNASROOT" ]]; then
  echo "Must not run with sudo"
  exit 1
fi
case "$0" in
  */*) cd -- "${0%/*}" || exit 1 ;;
esac
source ./env.sh
if [[ "$1" == "remove" ]]; then
  exec ./bin/Runner.Listener "$@"
fi
exec ./bin/Runner.Listener configure "$@"
