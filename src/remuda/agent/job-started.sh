# Remuda's job-started hook: refuses jobs that do not belong to this machine's run and repository. The agent rewrites
# this file and `assigned`, which holds the expected values as lines, before each start of the runner.
# shellcheck shell=sh
set -u
path=${PATH:-}
PATH=/usr/sbin:/usr/bin:/sbin:/bin
run='' repository='' refused_file='' image_hook=''
{
  IFS= read -r run
  IFS= read -r repository
  IFS= read -r refused_file
  IFS= read -r image_hook
} <"${0%/*}/assigned" || run=
job_run=${GITHUB_RUN_ID:-}
job_repository=${GITHUB_REPOSITORY:-}

lower() { printf '%s' "$1" | tr '[:upper:]' '[:lower:]'; }

# The label is the run id, optionally with a suffix: a run may use several labels.
is_of_run() {
  [ -n "$job_run" ] || return 1
  case $run in
    "$job_run" | "$job_run"[._-]*) return 0 ;;
  esac
  return 1
}

# $repository is "owner/name", or "owner/" for all repositories of the owner, or empty for an enterprise runner.
is_of_repository() {
  case $(lower "$job_repository") in
    '' | */) return 1 ;;
    "$repository") return 0 ;;
    "${repository%/}"/?*) [ "${repository%/}" != "$repository" ] ;;
    *) [ -z "$repository" ] ;;
  esac
}

refuse() {
  scope=
  [ -z "$repository" ] || scope=" of ${repository%/}"
  printf '::error::Remuda refused this job: it belongs to run %s of %s, and this machine is assigned to run %s%s. %s\n' \
    "${job_run:-(unknown)}" "${job_repository:-(unknown)}" "${run:-(unknown)}" "$scope" \
    "Let runs-on name the label of the job's own run, and provision runners for that run."
  printf '%s %s\n' "$job_run" "$job_repository" 2>/dev/null >>"$refused_file" || :
  # A failing hook is not enough: steps with `if: always()` would still run. After SIGTERM the worker skips those too
  # and then signals this hook. If it does not within 10 seconds, it is killed.
  trap 'kill "$waiting" 2>/dev/null; exit 1' INT TERM HUP
  case $(tr '\0' ' ' <"/proc/$PPID/cmdline") in
    *Runner.Worker*) worker=$PPID ;;
    *) exit 1 ;;
  esac
  sleep 10 >/dev/null 2>&1 &
  waiting=$!
  kill -TERM "$worker" 2>/dev/null || :
  wait "$waiting" || :
  kill -KILL "$worker" 2>/dev/null || :
  exit 1
}

if ! is_of_run || ! is_of_repository; then refuse; fi

PATH=$path
case $image_hook in
  '') exit 0 ;;
  *.sh) exec "$(command -v bash || command -v sh)" -e "$image_hook" ;;
  *.ps1) exec pwsh -command ". '$image_hook'" ;;
  *) exec "$image_hook" ;;
esac
