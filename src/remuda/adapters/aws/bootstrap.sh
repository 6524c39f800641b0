# Bootstrap of a runner machine, run as user data. Remuda's user_data.py puts the variables above this text. Supports
# Amazon Linux 2023, Ubuntu 22.04 and 24.04. It contains no credential: anyone who can describe the launch template can
# read it.
# shellcheck shell=bash disable=SC2154  # the variables are set above
set -u
umask 077

# Set the dead-man timer before anything can fail or hang, so that the machine always powers off.
dead_man() { # UNIT SECONDS
  systemd-run --quiet --unit="$1" --on-active="$2" --timer-property=AccuracySec=1s systemctl poweroff --force
}
dead_man remuda-dead-man-boot "$boot_life_s" || shutdown -P "+$((boot_life_s / 60 + 1))"

set -eE -o pipefail
say() { printf 'remuda: %s\n' "$*"; }
# After a failure the machine stays up for debugging until the dead-man timer powers it off.
fail() {
  trap - ERR
  say "bootstrap failed: $*"
  exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR

mkdir -p "$opt/bin" "$state"
# Jobs may read and run the software, but not change it.
chmod 755 "$opt" "$opt/bin"
chmod 700 "$state"
# The agent stops the timers in this file after it has set its own.
printf 'remuda-dead-man-boot\n' >"$state/dead-man"

imds=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}
imds=${imds%/}
imds_curl() { curl -sSf --noproxy '*' --retry 5 --retry-connrefused --max-time 5 "$@"; }
imds_token=$(imds_curl -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 600' "$imds/latest/api/token")
metadata() { imds_curl -H @- "$imds/latest/meta-data/$1" <<<"X-aws-ec2-metadata-token: $imds_token"; }

# The launch may set a shorter dead-man timer in a tag.
first_life_s=$(metadata "tags/instance/$first_life_tag" 2>/dev/null || true)
if [[ $first_life_s =~ ^[0-9]{1,7}$ ]]; then
  printf 'remuda-dead-man-boot\nremuda-dead-man-launch\n' >"$state/dead-man"
  dead_man remuda-dead-man-launch "$first_life_s"
  systemctl stop remuda-dead-man-boot.timer || true
fi

work=$(mktemp -d)
fetch() { # URL SHA256 FILE
  say "fetching $1"
  case $1 in
    s3://*)
      command -v aws >/dev/null || fail "$1 needs the aws command: install it in the image, or use an https URL"
      aws s3 cp --only-show-errors "$1" "$3"
      ;;
    *) curl -sSfL --proto '=https' --retry 5 --retry-connrefused --max-time 600 -o "$3" "$1" ;;
  esac
  printf '%s  %s\n' "$2" "$3" | sha256sum --check --quiet - || fail "$1 does not have the expected SHA-256"
}

# The agent: installed in the image, or downloaded together with a Python interpreter.
if [[ ! -x $opt/bin/remuda ]]; then
  case $agent_url in
    '') fail "the image has no $opt/bin/remuda, and agent-url is not set" ;;
    *.tar.gz)
      fetch "$agent_url" "$agent_sha256" "$work/agent.tar.gz"
      tar -xzf "$work/agent.tar.gz" -C "$opt" --no-same-owner
      ;;
    *)
      fetch "$python_url" "$python_sha256" "$work/python.tar.gz"
      fetch "$agent_url" "$agent_sha256" "$work/${agent_url##*/}"
      # Layout of python-build-standalone: one relocatable directory.
      mkdir -p "$opt/python"
      tar -xzf "$work/python.tar.gz" -C "$opt/python" --strip-components=1 --no-same-owner
      "$opt/python/bin/python3" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
        "$work/${agent_url##*/}[aws]"
      ln -sf "$opt/python/bin/remuda" "$opt/bin/remuda"
      ;;
  esac
  [[ -x $opt/bin/remuda ]] || fail "$agent_url has no bin/remuda"
fi

# The actions runner, unmodified. The agent copies it for the jobs.
if [[ ! -x $opt/runner/bin/Runner.Listener ]]; then
  [[ -n $runner_version ]] || fail "the image has no runner in $opt/runner, and actions-runner-version is not set"
  case $(uname -m) in
    x86_64) arch=x64 ;;
    aarch64) arch=arm64 ;;
    *) fail "the actions runner does not support $(uname -m)" ;;
  esac
  name=actions-runner-linux-$arch-$runner_version.tar.gz
  fetch "${runner_url:-https://github.com/actions/runner/releases/download/v$runner_version/$name}" \
    "$runner_sha256" "$work/runner.tar.gz"
  mkdir -p "$opt/runner"
  tar -xzf "$work/runner.tar.gz" -C "$opt/runner" --no-same-owner
fi
# Whatever permissions the image or the archive set: only root may change it.
chown -R "$(id -u):$(id -g)" "$opt/runner"
chmod -R go+rX,go-w "$opt/runner"
if ! ldconfig -p | grep libicuuc >/dev/null; then
  if command -v dnf >/dev/null; then dnf -y -q install libicu; else "$opt/runner/bin/installdependencies.sh"; fi
fi

# Jobs run as an unprivileged user. It gets no subordinate ids: processes in a user namespace with such ids would not
# belong to the user any more.
id -u "$job_user" >/dev/null 2>&1 ||
  useradd --create-home --shell /bin/bash -K SUB_UID_COUNT=0 -K SUB_GID_COUNT=0 "$job_user"
# Jobs must not use cron or at, which would start processes after their end. If an allow file exists, the job user is
# not in it. Without allow and deny files, all users may use cron on Debian and Ubuntu; in all other cases only root may
# use cron and at, and creating a deny file would allow all other users.
deny() { # FILE
  grep -qxF "$job_user" "$1" 2>/dev/null || printf '%s\n' "$job_user" >>"$1"
}
if [[ ! -e $etc/cron.allow && (-e $etc/cron.deny || -e $etc/debian_version) ]]; then
  # Readable for all: crontab does not read it as root.
  [[ -e $etc/cron.deny ]] || install -m 644 /dev/null "$etc/cron.deny"
  deny "$etc/cron.deny"
fi
if [[ ! -e $etc/at.allow && -e $etc/at.deny ]]; then deny "$etc/at.deny"; fi
if ! command -v iptables >/dev/null && command -v dnf >/dev/null; then dnf -y -q install iptables-nft; fi
command -v iptables >/dev/null || fail "iptables is missing; it is needed to block the metadata service for jobs"
cat >"$opt/bin/remuda-firewall" <<EOF
#!/bin/sh
# Blocks the metadata service for jobs, which would give them the agent's role. Fails if a rule cannot be set.
set -eu
# The job user, and its subordinate ids for user namespaces.
users=$job_user
uid=\$(id -u $job_user)
[ ! -r /etc/subuid ] || while IFS=: read -r who first count; do
  case \$who in $job_user | "\$uid") ;; *) continue ;; esac
  case \$first:\$count in :* | *: | *[!0-9:]* | *:0) continue ;; esac
  users="\$users \$first-\$((first + count - 1))"
done </etc/subuid
rule() { # COMMAND TABLE RULE...
  command=\$1 table=\$2
  shift 2
  "\$command" -w -t "\$table" -C "\$@" 2>/dev/null || "\$command" -w -t "\$table" -I "\$@"
}
guard() { # COMMAND ADDRESS
  # Replace a separate chain as a whole: with -C, some versions of ip6tables confuse rules of different users.
  {
    printf '*filter\n:REMUDA - [0:0]\n'
    for user in \$users; do printf -- '-A REMUDA -d %s -m owner --uid-owner %s -j REJECT\n' "\$2" "\$user"; done
    printf 'COMMIT\n'
  } | "\$1-restore" -w --noflush
  rule "\$1" filter OUTPUT -j REMUDA
  # Packets of containers are forwarded. Use mangle: container software inserts its rules before others in filter.
  rule "\$1" mangle FORWARD -d "\$2" -j DROP
}
guard iptables 169.254.169.254
# The launch template disables the IPv6 endpoint; block it too if the machine has IPv6.
if [ -e /proc/net/if_inet6 ] && command -v ip6tables >/dev/null; then guard ip6tables fd00:ec2::254; fi
EOF
chmod 700 "$opt/bin/remuda-firewall"

if [[ -n $script ]]; then
  base64 -d <<<"$script" | gzip -d >"$state/pre-runner.sh"
  chmod 700 "$state/pre-runner.sh"
fi

region=$(metadata placement/region)
{
  printf 'AWS_REGION=%s\nAWS_EC2_METADATA_SERVICE_ENDPOINT=%s\n' "$region" "$imds"
  for pair in "${environment[@]}"; do printf '%s\n' "$pair"; done
} >"$state/agent.env"

mkdir -p "$units"
# A job may reboot the machine, which removes the timers above and the firewall rules. These units restore them.
cat >"$units/remuda-dead-man-reboot.timer" <<EOF
[Unit]
Description=Power off this machine unless its agent starts

[Timer]
OnBootSec=$boot_life_s
AccuracySec=1s

[Install]
WantedBy=timers.target
EOF
cat >"$units/remuda-dead-man-reboot.service" <<EOF
[Unit]
Description=Power off this machine

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'systemctl poweroff --force'
EOF
# Set the rules before the network is up, and before cron, at or a systemd user instance can start something that a job
# left behind. Without the rules none of the three starts.
cat >"$units/remuda-firewall.service" <<EOF
[Unit]
Description=Block the instance metadata service for jobs
DefaultDependencies=no
After=local-fs.target nftables.service netfilter-persistent.service ufw.service
Wants=network-pre.target
Before=network-pre.target systemd-user-sessions.service cron.service crond.service atd.service
Conflicts=shutdown.target
Before=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=$opt/bin/remuda-firewall

[Install]
WantedBy=multi-user.target
RequiredBy=cron.service crond.service atd.service user@.service
EOF
# KillMode=process: a restart of the agent must not kill a running job. The new agent finds the runner by its stored pid.
cat >"$units/remuda-agent.service" <<EOF
[Unit]
Description=Remuda agent
Wants=network-online.target
After=network-online.target remuda-firewall.service
StartLimitIntervalSec=0

[Service]
EnvironmentFile=$state/agent.env
ExecStartPre=$opt/bin/remuda-firewall
ExecStart=$opt/bin/remuda agent
Restart=always
RestartSec=2
KillMode=process
Slice=remuda.slice
OOMScoreAdjust=-900

[Install]
WantedBy=multi-user.target
EOF
chmod 644 "$units"/remuda-*
rm -rf "$work"
systemctl daemon-reload
systemctl enable remuda-firewall.service remuda-agent.service remuda-dead-man-reboot.timer
# --no-block: this script may itself be part of the boot transaction.
systemctl start --no-block remuda-agent.service
say "agent started"
