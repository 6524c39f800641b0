# Remuda: refuses a job that is not of the run and repository that this machine is assigned to. The agent writes this
# file and `assigned` beside it anew at each start of the runner: what is expected comes from there, as lines.
# shellcheck shell=sh
set -u
path=${PATH:-}
PATH=/usr/sbin:/usr/bin:/sbin:/bin
run='' repository='' refused='' theirs=''
{
  IFS= read -r run
  IFS= read -r repository
  IFS= read -r refused
  IFS= read -r theirs
} <"${0%/*}/assigned" || run=
job_run=${GITHUB_RUN_ID:-}
job_repository=${GITHUB_REPOSITORY:-}

lower() { printf '%s' "$1" | tr '[:upper:]' '[:lower:]'; }

# A label may have more after the run's id: several for one run.
is_of_run() {
  [ -n "$job_run" ] || return 1
  case $run in
    "$job_run" | "$job_run"[._-]*) return 0 ;;
  esac
  return 1
}

# "owner/name", or "owner/" for all that the owner has, or nothing where the runner serves more than one owner.
is_of_repository() {
  case $(lower "$job_repository") in
    '' | */) return 1 ;;
    "$repository") return 0 ;;
    "${repository%/}"/?*) [ "${repository%/}" != "$repository" ] ;;
    *) [ -z "$repository" ] ;;
  esac
}

refuse() {
  whose=
  [ -z "$repository" ] || whose=" of ${repository%/}"
  printf '::error::Remuda refused this job: it belongs to run %s of %s, and this machine is assigned to run %s%s. %s\n' \
    "${job_run:-(unknown)}" "${job_repository:-(unknown)}" "${run:-(unknown)}" "$whose" \
    "Let runs-on name the label of the job's own run, and provision runners for that run."
  printf '%s %s\n' "$job_run" "$job_repository" 2>/dev/null >>"$refused" || :
  # A hook that fails is not enough: steps with `if: always()` would still run. A worker that is told to stop skips
  # these, too, and tells this hook to stop as soon as it has understood. One that does not is killed.
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
case $theirs in
  '') exit 0 ;;
  *.sh) exec "$(command -v bash || command -v sh)" -e "$theirs" ;;
  *.ps1) exec pwsh -command ". '$theirs'" ;;
  *) exec "$theirs" ;;
esac
