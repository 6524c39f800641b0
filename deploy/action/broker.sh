#!/usr/bin/env bash
# Step of the action for provision and release: gets an OIDC token from GitHub and sends the request to the broker.
#
# Requires bash 3.2 or newer (that of macOS) and curl. Requests to AWS Lambda are signed by curl 7.86 or newer: older
# ones sign few headers, not the session token (curl's commit 29c4aa00a1). With those, the AWS CLI is used.
# Token and AWS credentials never appear in arguments or the log: curl and the AWS CLI read them from standard input
# and the environment. Functions without output return their result in REPLY: a subshell would take milliseconds.
set -uo pipefail
# Each background command is a process group, and can be ended with its children.
set -m
export LC_ALL=C
umask 077

# generated: inputs
all_inputs='
  github-scope:INPUT_GITHUB_SCOPE github-token:INPUT_GITHUB_TOKEN github-app-id:INPUT_GITHUB_APP_ID
  github-app-key:INPUT_GITHUB_APP_KEY runner-group:INPUT_RUNNER_GROUP run-id:INPUT_RUN_ID run-attempt:INPUT_RUN_ATTEMPT
  instance-count:INPUT_INSTANCE_COUNT resource-class:INPUT_RESOURCE_CLASS usage-class:INPUT_USAGE_CLASS
  allowed-instance-types:INPUT_ALLOWED_INSTANCE_TYPES tier:INPUT_TIER repository:INPUT_REPOSITORY
  ephemeral:INPUT_EPHEMERAL add:INPUT_ADD max-runtime-min:INPUT_MAX_RUNTIME_MIN
  provision-timeout-sec:INPUT_PROVISION_TIMEOUT_SEC idle-time-sec:INPUT_IDLE_TIME_SEC
  release-time-sec:INPUT_RELEASE_TIME_SEC max-age-sec:INPUT_MAX_AGE_SEC max-uses:INPUT_MAX_USES reuse:INPUT_REUSE
  max-instances:INPUT_MAX_INSTANCES monthly-budget:INPUT_MONTHLY_BUDGET
  resource-class-config:INPUT_RESOURCE_CLASS_CONFIG runner-sets:INPUT_RUNNER_SETS
  pre-runner-script:INPUT_PRE_RUNNER_SCRIPT ami:INPUT_AMI subnet-ids:INPUT_SUBNET_IDS
  security-group-ids:INPUT_SECURITY_GROUP_IDS iam-instance-profile:INPUT_IAM_INSTANCE_PROFILE key-name:INPUT_KEY_NAME
  tags:INPUT_TAGS volume-size-gib:INPUT_VOLUME_SIZE_GIB volume-type:INPUT_VOLUME_TYPE volume-iops:INPUT_VOLUME_IOPS
  volume-throughput:INPUT_VOLUME_THROUGHPUT volume-kms-key:INPUT_VOLUME_KMS_KEY spot-fallback:INPUT_SPOT_FALLBACK
  actions-runner-version:INPUT_ACTIONS_RUNNER_VERSION actions-runner-sha256:INPUT_ACTIONS_RUNNER_SHA256
  actions-runner-url:INPUT_ACTIONS_RUNNER_URL agent-url:INPUT_AGENT_URL agent-sha256:INPUT_AGENT_SHA256
  job-image-url:INPUT_JOB_IMAGE_URL job-image-sha256:INPUT_JOB_IMAGE_SHA256 cache-paths:INPUT_CACHE_PATHS
  cache-size-gib:INPUT_CACHE_SIZE_GIB kernel-modules:INPUT_KERNEL_MODULES github-environment:INPUT_GITHUB_ENVIRONMENT
  environment:INPUT_ENVIRONMENT idle-config:INPUT_IDLE_CONFIG
  minimum-running-time-in-minutes:INPUT_MINIMUM_RUNNING_TIME_IN_MINUTES
  runner-boot-time-in-minutes:INPUT_RUNNER_BOOT_TIME_IN_MINUTES idle-scope:INPUT_IDLE_SCOPE
  max-removals-per-cycle:INPUT_MAX_REMOVALS_PER_CYCLE prices:INPUT_PRICES config:INPUT_CONFIG
  direct-bundle:INPUT_DIRECT_BUNDLE direct-bundle-sha256:INPUT_DIRECT_BUNDLE_SHA256 dry-run:INPUT_DRY_RUN
  sweep-only:INPUT_SWEEP_ONLY
'
provision_inputs='github-scope github-app-id run-id run-attempt instance-count resource-class usage-class allowed-instance-types tier repository ephemeral add max-runtime-min provision-timeout-sec'
release_inputs='github-app-id run-id run-attempt'
# end of inputs

readonly EXIT_REFUSED=2 EXIT_UNAVAILABLE=4 EXIT_BUG=70 EXIT_INTERRUPTED=130
# Seconds that a provision may take: the timeout of the function, and an allowance for its start.
readonly PROVISION_LIMIT=930
# Seconds until the first progress line, between polls, and for one poll.
readonly POLL_AFTER=2 POLL_EVERY=3 POLL_LIMIT=20 MAX_POLL_FAILURES=10
# Seconds for which a throttled request is repeated, and between two attempts. A new account may have ten concurrent
# executions, and each waiting provision occupies one of them for minutes.
readonly THROTTLE_LIMIT=600 MAX_PAUSE=15
# Seconds for the request of a cancelled step: GitHub sends SIGTERM after 7.5 and SIGKILL after another 2.5.
readonly CANCEL_LIMIT=5
# In variables, because bash 3.2 and newer versions quote patterns differently.
readonly POOL_PATTERN='^[a-z0-9][a-z0-9-]{0,19}$' REGION_PATTERN='^[a-z]{2,4}(-[a-z]{2,12}){1,3}-[0-9]{1,2}$'
readonly TOKEN_PATTERN='"value"[[:space:]]*:[[:space:]]*"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)"'
readonly EXPIRY_PATTERN='"exp": *([0-9]+)' ISSUE_PATTERN='"iat": *([0-9]+)'
readonly MESSAGE_PATTERN='"errorMessage"[[:space:]]*:[[:space:]]*"([^"]+)"'
readonly CLI_ERROR_PATTERN='\(([A-Za-z]+)\) when calling' VERSION_PATTERN='^curl ([0-9]+)\.([0-9]+)'

mode=${INPUT_MODE:-}
title="remuda $mode"
pool='' region='' broker_url='' function='' lambda_url='' signer='' work=''
given=()
attempts=3 token_limit=10 throttle_limit=$THROTTLE_LIMIT
token='' token_expires=0
# `role` is part of file names: the progress is polled in a second process.
role='' poller='' is_provisioning='' provision_pid='' request=''
# Result of a request: `answered` (by the broker, in `answer`), `refused` (by AWS), `lost` or `unreachable`.
result='' answer='' status='' error_type='' function_error='' problem=''

# Messages -------------------------------------------------------------------------------------------------------------

# Callers pass fixed texts, and values that are checked or cleaned.
annotate() { printf '::%s title=%s::%s\n' "$1" "$title" "$2"; }

summarize() {
  if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then printf '### %s: %s\n\n%s\n' "$title" "$1" "$2" >>"$GITHUB_STEP_SUMMARY"; fi
}

fail() {
  annotate error "$2"
  summarize failed "$2"
  exit "$1"
}

# Text from outside: one line without characters that have a meaning in Markdown or in workflow commands.
clean() {
  REPLY=${1//[!A-Za-z0-9 .,:\/()=_-]/ }
  REPLY=${REPLY:0:200}
}

mask() {
  case $1 in
    '' | *[!A-Za-z0-9+/=._-]*) ;;
    *) printf '::add-mask::%s\n' "$1" ;;
  esac
}

# Requests -------------------------------------------------------------------------------------------------------------

# A text in double quotes, for JSON and for configurations of curl, which have the same escapes.
quote() {
  REPLY=${1//\\/\\\\}
  REPLY=${REPLY//\"/\\\"}
  REPLY=${REPLY//$'\n'/\\n}
  REPLY=${REPLY//$'\r'/\\r}
  REPLY="\"${REPLY//$'\t'/\\t}\""
}

# One line of a configuration of curl.
option() {
  quote "$2"
  printf '%s = %s\n' "$1" "$REPLY"
}

# -q: without ~/.curlrc. Redirects are not followed: token and credentials must reach no other server.
run_curl() { curl -q --silent --show-error --config - --connect-timeout 10 --max-time "$1" --write-out "$2"; }

request_token() {
  {
    # As in getIDToken of actions/toolkit.
    option url "$ACTIONS_ID_TOKEN_REQUEST_URL&audience=remuda-$pool"
    option header "Authorization: Bearer $ACTIONS_ID_TOKEN_REQUEST_TOKEN"
  } | run_curl "$token_limit" '\n%{http_code}'
}

# Get a token, unless there is one that stays valid for a while. In the background, as in `ask`.
get_token() {
  local text code attempt payload
  if [ -n "$token" ] && [ "$SECONDS" -lt "$token_expires" ]; then return 0; fi
  for ((attempt = 1; attempt <= attempts; attempt++)); do
    request_token >"$work/token$role" 2>/dev/null &
    wait "$!" 2>/dev/null
    text=$(cat "$work/token$role")
    rm -f "$work/token$role"
    code=${text##*$'\n'}
    if [ "$code" = 200 ] && [[ $text =~ $TOKEN_PATTERN ]]; then
      token=${BASH_REMATCH[1]}.${BASH_REMATCH[2]}.${BASH_REMATCH[3]} payload=${BASH_REMATCH[2]}
      mask "$token"
      # Replaced after four fifths of its life, which is 300 s on GitHub.
      token_expires=$((SECONDS + 240))
      while [ $((${#payload} % 4)) -ne 0 ]; do payload+='='; done
      payload=$(base64 --decode <<<"$(tr '_-' '/+' <<<"$payload")" 2>/dev/null)
      if [[ $payload =~ $EXPIRY_PATTERN ]]; then
        code=${BASH_REMATCH[1]}
        if [[ $payload =~ $ISSUE_PATTERN ]]; then token_expires=$((SECONDS + (code - BASH_REMATCH[1]) * 4 / 5)); fi
      fi
      return 0
    fi
    case $code in
      000 | 429 | 5??)
        if [ "$attempt" -lt "$attempts" ]; then
          sleep "$attempt" &
          wait "$!"
        fi
        ;;
      *) break ;;
    esac
  done
  clean "$code"
  problem="GitHub issued no OIDC token (HTTP status $REPLY); run the job again, and see githubstatus.com if it keeps failing"
  return 1
}

# Set `request`.
build_request() {
  local pair variable separator=''
  quote "${GITHUB_RUN_ID:-}"
  request="{\"operation\": \"$1\", \"token\": \"$token\", \"run-id\": $REPLY"
  quote "${GITHUB_RUN_ATTEMPT:-1}"
  request+=", \"run-attempt\": $REPLY, \"inputs\": {"
  for pair in "${given[@]}"; do
    # An empty first item: bash 3.2 fails for an empty array.
    if [ -z "$pair" ]; then continue; fi
    variable=${pair#*:}
    trim "${!variable}"
    quote "$REPLY"
    request+="$separator\"${pair%%:*}\": $REPLY"
    separator=', '
  done
  request+='}}'
}

# Send `request` and print the answer. The last line is `<status> <error type> <function error>`.
send() {
  case $signer in
    aws) send_with_aws_cli "$1" ;;
    curl)
      {
        option url "$lambda_url"
        option data-binary "$request"
        option header 'Content-Type: application/json'
        option aws-sigv4 "aws:amz:$region:lambda"
        option user "$AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY"
        if [ -n "${AWS_SESSION_TOKEN:-}" ]; then option header "X-Amz-Security-Token: $AWS_SESSION_TOKEN"; fi
      } | run_curl "$1" '\n%{http_code} %header{x-amzn-errortype} %header{x-amz-function-error}'
      ;;
    *)
      {
        option url "$broker_url"
        option data-binary "$request"
        option header 'Content-Type: application/json'
      } | run_curl "$1" '\n%{http_code}'
      ;;
  esac
}

send_with_aws_cli() {
  local file text
  file=$(mktemp "$work/XXXXXX")
  # One attempt: the CLI would repeat a provision. fileb: has the same meaning in versions 1 and 2.
  if text=$(
    printf '%s' "$request" | AWS_MAX_ATTEMPTS=1 AWS_PAGER='' aws lambda invoke --region "$region" \
      ${AWS_ENDPOINT_URL_LAMBDA:+--endpoint-url "$AWS_ENDPOINT_URL_LAMBDA"} --function-name "$function" \
      --cli-connect-timeout 10 --cli-read-timeout "$1" --payload fileb:///dev/stdin \
      --query FunctionError --output text "$file" 2>&1
  ); then
    cat "$file"
    printf '\n200 %s' "${text#None}"
    return 0
  fi
  if [[ $text =~ $CLI_ERROR_PATTERN ]]; then
    case ${BASH_REMATCH[1]} in
      ResourceNotFoundException) status=404 ;;
      TooManyRequestsException) status=429 ;;
      ServiceException) status=500 ;;
      *) status=403 ;;
    esac
    printf '\n%s %s' "$status" "${BASH_REMATCH[1]}"
    return 0
  fi
  printf '%s' "$text" >&2
  case $text in
    *'locate credentials'* | *'ould not connect'*) return 7 ;;
  esac
  return 56
}

# A field of the answer. Values are plain characters or base64, so that no JSON parser is needed.
field() {
  REPLY=${answer#*\""$1"\":}
  if [ "$REPLY" = "$answer" ]; then REPLY='' && return 1; fi
  REPLY=${REPLY#"${REPLY%%[![:space:]]*}"}
  REPLY=${REPLY#\"}
  REPLY=${REPLY%%\"*}
  case $REPLY in
    *[!A-Za-z0-9+/=]*) REPLY='' && return 1 ;;
  esac
}

decoded() {
  field "$1" || return 1
  printf '%s' "$REPLY" | base64 --decode
}

# Set the variables of the result from the files and the exit code of `send`.
read_result() {
  local text
  text=$(cat "$work/$2")
  clean "$(cat "$work/$2.errors")"
  answer='' error_type='' function_error='' problem=${REPLY%% }
  case $1 in
    0) ;;
    # Not sent: URL, proxy, name, connection, TLS (section EXIT CODES of curl's manual).
    3 | 5 | 6 | 7 | 35 | 60 | 77 | 97) result=unreachable && return ;;
    *) result=lost && return ;;
  esac
  answer=${text%$'\n'*}
  read -r status error_type function_error <<<"${text##*$'\n'}"
  # Without an error type, the second word is the function error. Function URLs have the status 502 for it.
  case $status:$error_type in
    200:?*) function_error=$error_type ;;
    502:) function_error=Unhandled ;;
  esac
  clean "HTTP status $status $error_type"
  problem=${REPLY%% }
  if [ -n "$function_error" ]; then
    result=refused
  elif field exit && field log; then
    result=answered
  elif [[ $status == [25]* ]]; then
    result=lost
  else
    result=refused
  fi
}

# Send a request and wait for its end: in the background, because bash handles signals in `wait`, but not while another
# command runs. Repeated if it could not be sent, and for minutes if it was throttled.
ask() {
  local attempt pid pause throttled_at=''
  for ((attempt = 1; ; attempt++)); do
    if ! get_token; then
      result=refused status=token
      return
    fi
    build_request "$1"
    # Before the request: a signal may arrive right after it.
    if [ "$1" = provision ]; then is_provisioning=yes; fi
    send "$2" >"$work/$1" 2>"$work/$1.errors" &
    pid=$!
    if [ "$1" = provision ]; then provision_pid=$pid && printf '%s' "$pid" >"$work/provision.pid"; fi
    wait "$pid" 2>/dev/null
    read_result "$?" "$1"
    pause=$attempt
    if [ "$result:$status" = refused:429 ]; then
      if [ -z "$throttled_at" ] && [ "$throttle_limit" -gt 0 ]; then
        throttled_at=$SECONDS
        printf 'AWS Lambda has no free concurrent execution (HTTP status 429); trying again for up to %s s\n' "$throttle_limit"
      fi
      if [ $((SECONDS - ${throttled_at:-0})) -ge "$throttle_limit" ]; then return; fi
      # At different times: many jobs may wait.
      pause=$((attempt * 2 < MAX_PAUSE ? attempt * 2 : MAX_PAUSE))
      pause=$((pause + RANDOM % 3))
    elif [ "$result" != unreachable ] || [ "$attempt" -ge "$attempts" ]; then
      return
    fi
    sleep "$pause" &
    wait "$!"
  done
}

# Fail with one sentence about a request that the broker did not answer.
explain() {
  local what="the broker $function in $region" message='no message'
  if [ -n "$broker_url" ]; then what='the broker at broker-url'; fi
  if [ "$status" = token ]; then fail "$EXIT_UNAVAILABLE" "$problem"; fi
  if [ "$result" != refused ]; then
    fail "$EXIT_UNAVAILABLE" "$what does not respond ($problem); run the job again, and check the network of this runner if it keeps failing"
  fi
  if [ -n "$function_error" ]; then
    if [[ $answer =~ $MESSAGE_PATTERN ]]; then
      clean "${BASH_REMATCH[1]}"
      message=$REPLY
    fi
    fail "$EXIT_UNAVAILABLE" "the broker failed ($message); see the log group /remuda/$pool/broker"
  fi
  clean "${error_type%%:*}"
  case $status:$REPLY in
    *:ExpiredToken* | *:UnrecognizedClient* | *:InvalidSignature* | *:IncompleteSignature* | *:MissingAuthenticationToken*)
      fail "$EXIT_REFUSED" "AWS does not accept the credentials of this step ($REPLY); run aws-actions/configure-aws-credentials right before it"
      ;;
    40[134]:*)
      if [ -n "$broker_url" ]; then
        fail "$EXIT_REFUSED" "AWS refused the request to broker-url (HTTP status $status); use the output BrokerUrl of the stack"
      elif [ "$status" = 404 ]; then
        fail "$EXIT_REFUSED" "the function $function does not exist in $region; check the inputs pool and aws-region, or create the stack with remuda deploy"
      fi
      fail "$EXIT_REFUSED" "AWS refused to invoke $function ($REPLY); let aws-actions/configure-aws-credentials assume the workflow role of the stack"
      ;;
    429:*)
      fail "$EXIT_UNAVAILABLE" "AWS Lambda throttles $what; run the job again, or raise the account's quota of concurrent executions, for which remuda doctor shows the command"
      ;;
    *)
      fail "$EXIT_UNAVAILABLE" "$what gave an unexpected response ($problem); run the job again"
      ;;
  esac
}

# Write log, summary and outputs of the broker's answer. Fails if the outputs cannot be written.
write_answer() {
  decoded log
  if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then decoded summary >>"$GITHUB_STEP_SUMMARY"; fi
  if [ -n "${GITHUB_OUTPUT:-}" ]; then decoded outputs >>"$GITHUB_OUTPUT"; fi
}

finish() {
  if [ "$result" != answered ]; then explain; fi
  if ! write_answer; then
    fail "$EXIT_UNAVAILABLE" 'the outputs of this step cannot be written; release gives its runners back'
  fi
  field exit
  case $REPLY in
    '' | *[!0-9]* | ????*) exit "$EXIT_BUG" ;;
  esac
  exit "$REPLY"
}

# Provision ------------------------------------------------------------------------------------------------------------

# Print a line whenever the progress of the provision changes. Runs in the background.
poll() {
  local shown='' line was_running=''
  role=.poll throttle_limit=0
  sleep "$POLL_AFTER"
  while :; do
    ask state "$POLL_LIMIT"
    if [ "$result" = answered ] && field 'done'; then
      if [ "$REPLY" = false ]; then
        was_running=yes line=$(decoded log)
        if [ "$line" != "$shown" ]; then printf '%s\n' "$line"; fi
        shown=$line
      elif [ "$REPLY" = true ] && [ -n "$was_running" ]; then
        # A dead connection goes unnoticed. End the request, so that the step asks for the result.
        sleep "$POLL_LIMIT"
        kill -- "-$(cat "$work/provision.pid")" 2>/dev/null
      fi
    fi
    sleep "$POLL_EVERY"
  done
}

stop() {
  if [ -n "$1" ]; then kill -- "-$1" 2>/dev/null; fi
}

# Wait for the result of a provision whose connection was lost: a function continues without its client.
follow() {
  local failures=0 begun=''
  printf 'the connection to the broker was lost (%s); waiting for the provision\n' "$problem"
  while [ "$SECONDS" -lt "$PROVISION_LIMIT" ] && [ "$failures" -lt "$MAX_POLL_FAILURES" ]; do
    ask state "$POLL_LIMIT"
    if [ "$result" = answered ] && field 'done' && [ "$REPLY" = true ]; then return; fi
    failures=$((failures + 1))
    if [ "$result" = answered ]; then
      if [ "$REPLY" = false ]; then failures=0 begun=yes; fi
      result=lost problem='the request had no effect'
      if [ -n "$begun" ]; then problem='the provision takes too long'; fi
    fi
    sleep "$POLL_EVERY" &
    wait "$!"
  done
}

provision() {
  get_token || fail "$EXIT_UNAVAILABLE" "$problem"
  poll &
  poller=$!
  # Bash does not report its end.
  disown
  ask provision "$PROVISION_LIMIT"
  stop "$poller"
  poller=''
  if [ "$result" = lost ]; then follow; fi
  finish
}

# The step was cancelled. The function does not notice that its client is gone.
# shellcheck disable=SC2317 # called by a trap
cancel() {
  trap '' INT TERM
  stop "$poller"
  poller='' attempts=1 token_limit=2 throttle_limit=0
  if [ -z "$is_provisioning" ]; then
    annotate notice interrupted
    summarize cancelled interrupted
    exit "$EXIT_INTERRUPTED"
  fi
  # A request that is not sent yet must not follow its cancellation.
  stop "$provision_pid"
  ask cancel "$CANCEL_LIMIT"
  if [ "$result" = answered ]; then
    write_answer
  else
    annotate warning "interrupted, but the broker did not confirm that the provision is stopped ($problem); release gives its instances back"
    summarize cancelled 'the broker did not confirm that the provision is stopped'
  fi
  exit "$EXIT_INTERRUPTED"
}

# shellcheck disable=SC2317 # called by a trap
clean_up() {
  # Bash would report the ended commands.
  exec 2>/dev/null
  stop "$poller"
  stop "$provision_pid"
  if [ -n "$work" ]; then rm -rf "$work"; fi
}

# Inputs ---------------------------------------------------------------------------------------------------------------

trim() {
  REPLY=${1#"${1%%[![:space:]]*}"}
  REPLY=${REPLY%"${REPLY##*[![:space:]]}"}
}

# The value of an input, or else of a variable.
input() {
  trim "${!1:-}"
  if [ -z "$REPLY" ]; then trim "${2:-}"; fi
}

# Set `given`, and warn of inputs without effect.
read_inputs() {
  local pair variable used=$provision_inputs unused=''
  if [ "$mode" = release ]; then used=$release_inputs; fi
  given=('')
  for pair in $all_inputs; do
    variable=${pair#*:}
    trim "${!variable:-}"
    if [ -z "$REPLY" ]; then continue; fi
    if [[ " $used " != *" ${pair%%:*} "* ]]; then
      unused+=", ${pair%%:*}"
      continue
    fi
    case ${REPLY//[$'\t\r\n']/} in
      *[[:cntrl:]]*) fail "$EXIT_REFUSED" "the input ${pair%%:*} contains control characters; remove them" ;;
    esac
    given+=("$pair")
  done
  if [ -n "$unused" ]; then
    annotate warning "mode $mode does not use ${unused#, } with the broker: remove it"
  fi
}

check_token_permission() {
  if [ -n "${ACTIONS_ID_TOKEN_REQUEST_URL:-}" ] && [ -n "${ACTIONS_ID_TOKEN_REQUEST_TOKEN:-}" ]; then return; fi
  case ${GITHUB_EVENT_NAME:-} in
    pull_request | pull_request_review | pull_request_review_comment)
      # The repository of a deleted fork is empty.
      if [ "${HEAD_REPOSITORY:-}" != "${GITHUB_REPOSITORY:-}" ]; then
        fail "$EXIT_REFUSED" 'pull requests from forks get no OIDC token, which the broker requires; use a runner set for them (runs-on with its labels)'
      fi
      ;;
  esac
  fail "$EXIT_REFUSED" "this job has no OIDC token, which the broker requires; add 'permissions: id-token: write' to the job"
}

# Set the URL of the function and how requests to it are signed.
choose_function() {
  local suffix=amazonaws.com version
  input INPUT_AWS_REGION "${AWS_REGION:-${AWS_DEFAULT_REGION:-}}"
  region=$REPLY
  if ! [[ $region =~ $REGION_PATTERN ]]; then
    fail "$EXIT_REFUSED" 'aws-region is not a region such as eu-central-1; set it, or run aws-actions/configure-aws-credentials before this step'
  fi
  # As in partitions.json of botocore.
  case $region in
    cn-*) suffix=amazonaws.com.cn ;;
    eusc-*) suffix=amazonaws.eu ;;
    us-iso-*) suffix=c2s.ic.gov ;;
    us-isob-*) suffix=sc2s.sgov.gov ;;
  esac
  lambda_url=${AWS_ENDPOINT_URL_LAMBDA:-https://lambda.$region.$suffix}
  lambda_url=${lambda_url%/}/2015-03-31/functions/$function/invocations
  if [ -n "${AWS_ACCESS_KEY_ID:-}" ] && [ -n "${AWS_SECRET_ACCESS_KEY:-}" ]; then
    version=$(curl --version)
    if [[ $version =~ $VERSION_PATTERN ]] && ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] >= 7086)); then
      signer=curl
      return
    fi
    if ! command -v aws >/dev/null; then
      fail "$EXIT_REFUSED" 'the broker requires curl 7.86 or newer, or the AWS CLI; install one, or set broker-url'
    fi
  elif ! command -v aws >/dev/null; then
    fail "$EXIT_REFUSED" 'this step has no AWS credentials; run aws-actions/configure-aws-credentials before it, or set broker-url'
  fi
  signer=aws
}

main() {
  trap clean_up EXIT
  trap cancel INT TERM
  mask "${AWS_SECRET_ACCESS_KEY:-}"
  mask "${AWS_SESSION_TOKEN:-}"
  if [ "${RUNNER_OS:-}" = Windows ]; then
    fail "$EXIT_REFUSED" 'remuda requires a Linux or macOS runner; change runs-on of this job'
  fi
  if ! command -v curl >/dev/null; then fail "$EXIT_REFUSED" 'curl is not installed; install it on this runner'; fi
  input INPUT_POOL "${REMUDA_POOL:-default}"
  pool=$REPLY
  if ! [[ $pool =~ $POOL_PATTERN ]]; then
    fail "$EXIT_REFUSED" 'pool must have at most 20 lower-case letters, digits and dashes; use the name of the pool in the stack'
  fi
  read_inputs
  check_token_permission
  function=remuda-$pool-broker
  input INPUT_BROKER_URL ''
  broker_url=$REPLY
  case $broker_url in
    '') choose_function ;;
    https://* | http://127.0.0.1:* | http://localhost:*) ;;
    *) fail "$EXIT_REFUSED" 'broker-url must start with https://; use the output BrokerUrl of the stack' ;;
  esac
  work=$(mktemp -d "${RUNNER_TEMP:-${TMPDIR:-/tmp}}/remuda.XXXXXX") || exit "$EXIT_BUG"
  if [ "$mode" = provision ]; then provision; fi
  ask "$mode" "$PROVISION_LIMIT"
  finish
}

main
