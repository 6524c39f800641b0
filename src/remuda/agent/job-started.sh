# Remuda's job-started hook: refuses jobs that do not belong to this machine's run and repository. The agent rewrites
# this file and `assigned`, which holds the expected values as lines, before each start of the runner.
# shellcheck shell=sh
set -u
path=${PATH:-}
PATH=/usr/sbin:/usr/bin:/sbin:/bin
run='' repository='' refused_file='' image_hook='' trusted=''
{
  IFS= read -r run
  IFS= read -r repository
  IFS= read -r refused_file
  IFS= read -r image_hook
  IFS= read -r trusted
} <"${0%/*}/assigned" || run=
job_run=${GITHUB_RUN_ID:-}
job_repository=${GITHUB_REPOSITORY:-}

lower() { printf '%s' "$1" | tr '[:upper:]' '[:lower:]'; }

# The label is the run id, optionally with a suffix: a run may use several labels. A space stands for any run.
is_of_run() {
  [ -n "$job_run" ] || return 1
  case $run in
    ' ' | "$job_run" | "$job_run"[._-]*) return 0 ;;
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

# Prints the repository of a pull request's head, or nothing if the event's file does not name exactly one. Quotes
# separate the records, so texts that people wrote cannot pass for keys.
head_repository() {
  LC_ALL=C awk '
    BEGIN { RS = "\""; size = split("pull_request head repo full_name", wanted, " "); inside = 0 }
    function outside(text, i, char) {
      for (i = 1; i <= length(text); i++) {
        char = substr(text, i, 1)
        if (char == "{" || char == "[") { depth++; kind[depth] = char; name[depth] = "[]"; is_value[depth] = char == "[" }
        else if (char == "}" || char == "]") depth--
        else if (char == ":") { name[depth] = last; is_value[depth] = 1 }
        else if (char == "," && kind[depth] == "{") is_value[depth] = 0
      }
    }
    function take(text, i) {
      last = text
      if (!is_value[depth] || depth != size) return
      for (i = 1; i <= size; i++) if (kind[i] != "{" || name[i] != wanted[i]) return
      count++
      found = text
    }
    !inside { outside($0); inside = 1; text = ""; next }
    {
      text = text $0
      match($0, /\\*$/)
      if (RLENGTH % 2) { text = text "\""; next }
      take(text)
      inside = 0
    }
    END { if (count == 1 && depth == 0 && found ~ /^[A-Za-z0-9._-]+\/[A-Za-z0-9._-]+$/) print found }
  ' "${GITHUB_EVENT_PATH:-/dev/null}" 2>/dev/null
}

# $trusted lists the events that run the repository's own code, or is empty if any job may run.
is_trusted() {
  [ -n "$trusted" ] || return 0
  event=${GITHUB_EVENT_NAME:-}
  case $event in
    '' | *[!a-z_]*) return 1 ;;
    pull_request*) [ "$(lower "$(head_repository)")" = "$(lower "$job_repository")" ] ;;
    *)
      case $trusted in
        *" $event "*) return 0 ;;
      esac
      return 1
      ;;
  esac
}

refuse_foreign() {
  scope=
  [ -z "$repository" ] || scope=" of ${repository%/}"
  assigned="run ${run:-(unknown)}$scope"
  fix="Let runs-on name the label of the job's own run, and provision runners for that run."
  if [ "$run" = ' ' ]; then
    assigned="jobs$scope"
    fix='Let runs-on name the labels of a runner set that serves the repository of the job.'
  fi
  refuse '' "it belongs to run ${job_run:-(unknown)} of ${job_repository:-(unknown)}, and this machine is assigned to \
$assigned. $fix"
}

# $1 is the kind of the job for the list of refused ones, $2 is for people.
refuse() {
  printf '::error::Remuda refused this job: %s\n' "$2"
  printf '%s %s%s\n' "$job_run" "$job_repository" "$1" 2>/dev/null >>"$refused_file" || :
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

if ! is_of_run || ! is_of_repository; then refuse_foreign; fi
if ! is_trusted; then
  refuse ' untrusted' "its runner set is strict, and the event '$(printf '%s' "${GITHUB_EVENT_NAME:-}" | tr -cd 'a-z_')' \
does not prove that this job runs the repository's own code. Let runs-on of such jobs name the labels of a runner set \
with trust = \"untrusted\"."
fi

PATH=$path
case $image_hook in
  '') exit 0 ;;
  *.sh) exec "$(command -v bash || command -v sh)" -e "$image_hook" ;;
  *.ps1) exec pwsh -command ". '$image_hook'" ;;
  *) exec "$image_hook" ;;
esac
