#!/bin/bash
# Like run.sh and run-helper.sh of actions/runner (src/Misc/layoutroot, 2.336.0): restarts the listener after a retryable
# exit code, and always exits with 0.
finish() {
  echo "$1"
  echo "Exiting runner..."
  exit 0
}
if [[ $EUID -eq 0 && -z "$RUNNER_ALLOW_RUNASROOT" ]]; then
  finish "Must not run interactively with sudo"
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
    0) finish "Runner listener exit with 0 return code, stop the service, no retry needed." ;;
    1) finish "Runner listener exit with terminated error, stop the service, no retry needed." ;;
    2) echo "Runner listener exit with retryable error, re-launch runner in 5 seconds."; sleep 5 ;;
    3 | 4)
      echo "Runner listener exit because of updating, re-launch runner after successful update"
      for _ in {0..30}; do
        if [[ -f update.finished ]]; then
          echo "Update finished successfully."
          rm update.finished
          break
        fi
        sleep 1
      done
      ;;
    5) finish "Runner listener exit with Session Conflict error, stop the service, no retry needed." ;;
    *) finish "Exiting with unknown error code: $code" ;;
  esac
  echo "Restarting runner..."
done
