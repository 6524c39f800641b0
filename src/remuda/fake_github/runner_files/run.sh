#!/bin/bash
# Like run.sh of actions/runner: restarts the listener after a retryable exit code, and always exits with 0.
if [[ $EUID -eq 0 && -z "$RUNNER_ALLOW_RUNASROOT" ]]; then
  echo "Must not run interactively with sudo"
  exit 1
fi
case "$0" in
  */*) cd -- "${0%/*}" || exit 1 ;;
esac
listener=
stopping=
trap 'stopping=1; [[ -n "$listener" ]] && kill -TERM "$listener"' TERM INT
while true; do
  ./bin/Runner.Listener run "$@" &
  listener=$!
  wait "$listener"
  code=$?
  # A trapped signal interrupts `wait` before the listener has ended.
  while kill -0 "$listener" 2>/dev/null; do
    wait "$listener"
    code=$?
  done
  if [[ -n "$stopping" ]]; then
    exit 0
  fi
  case $code in
    0) echo "Runner listener exited with error code 0"; echo "Runner listener exit with 0 return code, stop the service, no retry needed."; exit 0 ;;
    2 | 3 | 4) echo "Runner listener exit with retryable error, re-launch runner in 5 seconds."; sleep 5 ;;
    5) echo "Runner listener exit with Session Conflict error, stop the service, no retry needed."; exit 0 ;;
    *) echo "Runner listener exit with terminated error, stop the service, no retry needed."; exit 0 ;;
  esac
done
