# Bootstrap of a runner machine, run as user data: Remuda's user_data.py puts the variables above this text. Also prepares
# images (purpose=image, see deploy/image), with the variables in the environment. Supports Amazon Linux 2023, Debian 12,
# Ubuntu 22.04 and 24.04. It contains no credential: anyone who can describe the launch template can read it.
# shellcheck shell=bash disable=SC2154  # the variables are set above
set -u
umask 077

# Set the dead-man timer before anything can fail or hang, so that the machine always powers off.
# If systemctl cannot start or does not end, for lack of memory, systemd itself cuts the power.
at_once=(--service-type=oneshot --property=TimeoutStartSec=60 --property=FailureAction=poweroff-immediate)
dead_man() { # UNIT SECONDS
  systemd-run --quiet --unit="$1" --on-active="$2" --timer-property=AccuracySec=1s "${at_once[@]}" systemctl poweroff --force
}
[[ $purpose == image ]] || dead_man remuda-dead-man-boot "$boot_life_s" || shutdown -P "+$((boot_life_s / 60 + 1))"

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
chmod 755 "$opt" "$opt/bin"
chmod 700 "$state"
# Others must not be able to replace what root runs. In images built by actions/runner-images, anyone can write to /opt.
for folder in "$opt/bin" "$state/dead-man"; do
  while [[ $folder == */* ]]; do
    folder=${folder%/*}
    open=$(find -L "${folder:-/}" -maxdepth 0 \( -perm /022 ! -perm -1000 -o ! -uid 0 ! -uid "$EUID" \))
    [[ -z $open ]] || fail "users other than root can write to $open; run in the image: chown root $open; chmod go-w $open"
  done
done

# Shared with the user data of the listener: downloads and packages.
imds=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}
imds=${imds%/}
imds_curl() { curl -sSf --noproxy '*' --retry 5 --retry-connrefused --max-time 5 "$@"; }
metadata() { imds_curl -H @- "$imds/latest/meta-data/$1" <<<"X-aws-ec2-metadata-token: $imds_token"; }

# Gets an object with the role of this machine. Stock images lack the aws command, but have a Python for cloud-init.
# Signature: Amazon S3 API Reference, "Authenticating Requests (AWS Signature Version 4)".
s3_get() { # URL FILE
  python3 -I - "$imds" "$1" "$2" <<'EOF'
import hashlib, hmac, json, os, re, shutil, sys, time, urllib.error
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

class NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None

def metadata(path, headers, method="GET"):
    request = Request(imds + "/latest/" + path, headers=headers, method=method)
    return build_opener(ProxyHandler({})).open(request, timeout=5).read().decode()

def get(region):
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or "https://s3.%s.%s" % (region, read("services/domain"))
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = [now[:8], region, "s3", "aws4_request"]
    sent = {"host": urlsplit(endpoint).netloc, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": now}
    sent["x-amz-security-token"] = keys["Token"]
    lines = ["%s:%s" % pair for pair in sorted(sent.items())]
    signed = ";".join(sorted(sent))
    canonical = "\n".join(["GET", path, "", *lines, "", signed, "UNSIGNED-PAYLOAD"])
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    mac = ("AWS4" + keys["SecretAccessKey"]).encode()
    for text in [*scope, "\n".join(["AWS4-HMAC-SHA256", now, "/".join(scope), digest])]:
        mac = hmac.new(mac, text.encode(), "sha256").digest()
    credential = "/".join([keys["AccessKeyId"], *scope])
    value = "AWS4-HMAC-SHA256 Credential=%s,SignedHeaders=%s,Signature=%s" % (credential, signed, mac.hex())
    request = Request(endpoint + path, headers={**sent, "authorization": value})
    with build_opener(NoRedirect).open(request, timeout=60) as answer, open(file, "wb") as out:
        shutil.copyfileobj(answer, out)

imds, url, file = sys.argv[1:]
path, region = "/" + quote(url[5:], safe="/~"), ""
for pause in 1, 2, 4, 8, 0:
    try:
        life = {"X-aws-ec2-metadata-token-ttl-seconds": "600"}
        token = {"X-aws-ec2-metadata-token": metadata("api/token", life, "PUT")}
        read = lambda name: metadata("meta-data/" + name, token)
        role = "iam/security-credentials/"
        keys = json.loads(read(role + read(role).split()[0]))
        region = region or read("placement/region")
        get(region)
        break
    except urllib.error.HTTPError as error:
        text = error.read(4096).decode(errors="replace")
        problem = " ".join([str(error), *re.findall("<(?:Code|Message)>([^<]*)", text)])
        # The bucket is in another region.
        region = error.headers.get("x-amz-bucket-region") or "".join(re.findall("<Region>([a-z0-9-]+)", text)) or region
    except (OSError, ValueError, KeyError, IndexError) as error:
        problem = str(error) or type(error).__name__
    print("remuda: cannot get %s: %s" % (url, problem), flush=True)
    time.sleep(pause)
else:
    sys.exit(1)
EOF
}
fetch() { # URL SHA256 FILE
  say "fetching $1"
  case $1 in
    # While an image is built; the setting agent-url cannot name a file.
    file://*) cp "${1#file://}" "$3" ;;
    s3://*) s3_get "$1" "$3" || fail "the role of this machine needs s3:GetObject on $1" ;;
    *) curl -sSfL --proto '=https' --retry 5 --retry-connrefused --max-time 600 -o "$3" "$1" ;;
  esac
  printf '%s  %s\n' "$2" "$3" | sha256sum --check --quiet - || fail "$1 does not have the expected SHA-256"
}

# Others may hold the locks of the package manager. With this setting, which installdependencies.sh of the runner gets,
# too, apt-get waits for the lock of dpkg. It never waits for those of the package lists and of downloads, so it is tried
# again (GetLockMaybeWait in apt's debsystem.cc, GetLock in acquire.cc). dnf waits for all of its locks.
retry() { # COMMAND...
  local try
  # Without needrestart, which restarts services after an installation.
  local -x DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 APT_CONFIG
  APT_CONFIG=$(mktemp)
  printf 'DPkg::Lock::Timeout "240";\n' >"$APT_CONFIG"
  for try in {1..6}; do
    "$@" && rm -f "$APT_CONFIG" && return
    say "try $try of 6 failed: $*"
    sleep "$((try * 5))"
  done
  fail "cannot install packages: $*"
}
install_packages() { # PACKAGE...
  if command -v dnf >/dev/null; then
    dnf -y -q install "$@"
  else
    apt-get -qq update && apt-get -qq install --no-install-recommends "$@"
  fi
}

# End of the shared part.

if [[ $purpose == boot ]]; then
  # The agent stops the timers in this file after it has set its own.
  printf 'remuda-dead-man-boot\n' >"$state/dead-man"
  imds_token=$(imds_curl -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 600' "$imds/latest/api/token")
  # The launch may set a shorter dead-man timer in a tag.
  first_life_s=$(metadata "tags/instance/$first_life_tag" 2>/dev/null || true)
  if [[ $first_life_s =~ ^[0-9]{1,7}$ ]]; then
    printf 'remuda-dead-man-boot\nremuda-dead-man-launch\n' >"$state/dead-man"
    dead_man remuda-dead-man-launch "$first_life_s"
    systemctl stop remuda-dead-man-boot.timer || true
  fi
fi

# Updates come with images. Automatic ones hold the locks of apt for up to 1,300 s after the first boot of Ubuntu
# (commonwarexyz/monorepo#2915), and later replace files below running sandboxes and restart services. Units that a
# distribution does not have are masked, too. --no-block: an upgrade ends after its current package, see `retry`.
updates=(apt-daily.timer apt-daily-upgrade.timer apt-daily.service apt-daily-upgrade.service unattended-upgrades.service)
updates+=(dnf-automatic.timer dnf-automatic-install.timer dnf-automatic.service dnf-automatic-install.service)
systemctl --quiet mask "${updates[@]}" || say "automatic updates cannot be masked"
systemctl --quiet --no-block stop "${updates[@]}" 2>/dev/null || true

work=$(mktemp -d)
case $(uname -m) in
  x86_64)
    arch=x64 runner_url=$runner_url_x64 runner_sha256=$runner_sha256_x64
    agent_url=$agent_url_x86_64 agent_sha256=$agent_sha256_x86_64
    ;;
  aarch64)
    arch=arm64 runner_url=$runner_url_arm64 runner_sha256=$runner_sha256_arm64
    agent_url=$agent_url_arm64 agent_sha256=$agent_sha256_arm64
    ;;
  *) fail "Remuda and the actions runner do not support $(uname -m)" ;;
esac

# The agent: that of the image, unless agent-url names another one.
if [[ ! -x $opt/bin/remuda || (-n $agent_url && $(cat "$opt/agent.sha256" 2>/dev/null) != "$agent_sha256") ]]; then
  [[ -n $agent_url ]] || fail "the image has no $opt/bin/remuda, and agent-url is not set for $(uname -m)"
  fetch "$agent_url" "$agent_sha256" "$work/agent.tar.gz"
  rm -rf "${opt:?}"/{lib,python,agent.sha256} "$opt"/bin/remuda*
  tar -xzf "$work/agent.tar.gz" -C "$opt" --no-same-owner
  [[ -x $opt/bin/remuda ]] || fail "$agent_url has no bin/remuda"
  # Older distributions have a supported Python beside their default one.
  "$opt/bin/remuda" agent --help &>/dev/null || retry install_packages python3.11
  "$opt/bin/remuda" agent --help >/dev/null || fail "the agent does not run"
  printf '%s\n' "$agent_sha256" >"$opt/agent.sha256"
fi

# The actions runner, unmodified. Jobs run a copy-on-write clone. GitHub refuses old versions, so that of an image is
# replaced, unless no version is set. In invariant mode .NET needs no libicu.
listener=$opt/runner/bin/Runner.Listener
installed=$(DOTNET_SYSTEM_GLOBALIZATION_INVARIANT=1 "$listener" --version </dev/null 2>/dev/null || true)
if [[ ! -x $listener || (-n $runner_version && $installed != "$runner_version") ]]; then
  [[ -n $runner_version ]] || fail "the image has no runner in $opt/runner, and actions-runner-version is image"
  [[ -n $runner_url ]] || fail "actions-runner-sha256 has no value for $arch"
  say "runner ${installed:-none}, wanted $runner_version"
  fetch "$runner_url" "$runner_sha256" "$work/runner.tar.gz"
  rm -rf "$opt/runner"
  mkdir -p "$opt/runner"
  tar -xzf "$work/runner.tar.gz" -C "$opt/runner" --no-same-owner
fi
# Written by the check of the version.
rm -rf "$opt/runner/_diag"
# Whatever permissions the image or the archive set: only root may change it.
chown -R "$(id -u):$(id -g)" "$opt/runner"
chmod -R go+rX,go-w "$opt/runner"
if ! ldconfig -p | grep libicuuc >/dev/null; then
  if command -v dnf >/dev/null; then retry install_packages libicu; else retry "$opt/runner/bin/installdependencies.sh"; fi
fi

# Jobs run in sandboxes, containers of systemd-nspawn with their own root file system.
missing=()
need() { # COMMAND DEBIAN-PACKAGE FEDORA-PACKAGE
  command -v "$1" >/dev/null || if command -v dnf >/dev/null; then missing+=("$3"); else missing+=("$2"); fi
}
need systemd-nspawn systemd-container systemd-container
need iptables iptables iptables-nft
need ip iproute2 iproute
need sudo sudo sudo
need dockerd docker.io docker
if ((${#missing[@]})); then
  say "installing ${missing[*]}"
  retry install_packages "${missing[@]}"
fi
for command in systemd-nspawn iptables ip sudo; do
  command -v "$command" >/dev/null || fail "$command is missing; sandboxes need it"
done
command -v dockerd >/dev/null || say "dockerd is missing: jobs cannot use docker"
[[ $(stat -fc %T /sys/fs/cgroup) == cgroup2fs ]] || fail "the machine does not use cgroup v2; sandboxes need it"
kernel=$(uname -r)
[[ $(printf '5.19\n%s\n' "$kernel" | sort -V | head -n 1) == 5.19 ]] ||
  fail "the kernel is $kernel; sandboxes need Linux 5.19 or newer"
# The root file system of jobs, if it is not this machine's own. Unpacked once; sandboxes use copy-on-write clones.
if [[ -n $job_image_url && ! -e $state/job-image ]]; then
  fetch "$job_image_url" "$job_image_sha256" "$work/job-image"
  mkdir -p "$state/job-image.new"
  tar -xf "$work/job-image" -C "$state/job-image.new" --numeric-owner --same-permissions --xattrs --xattrs-include='*'
  chmod 755 "$state/job-image.new"
  [[ -x $state/job-image.new/usr/lib/systemd/systemd || -x $state/job-image.new/lib/systemd/systemd ]] ||
    fail "$job_image_url has no systemd; sandboxes need it"
  mv "$state/job-image.new" "$state/job-image"
fi
rm -rf "$work"
if [[ $purpose == image ]]; then
  say "the image is prepared"
  exit
fi
cat >"$opt/bin/remuda-firewall" <<'EOF'
#!/bin/sh
# Network rules of sandboxes: they reach the network through this machine's address, but neither the metadata service,
# which would give jobs the agent's role, nor this machine itself. Fails if a rule cannot be set.
set -eu
rule() { # COMMAND TABLE RULE...
  command=$1 table=$2
  shift 2
  "$command" -w -t "$table" -C "$@" 2>/dev/null || "$command" -w -t "$table" -I "$@"
}
sandboxes=ve-remuda-+
# Sandboxes must not fill the table of connections, which this machine needs, too: at most 16,384 of theirs are open. The
# rate bounds those that the kernel keeps for up to 120 s after their end, and the time that counting takes. Only the first
# packet of a connection is not of a confirmed one. The agent deletes connections with the mark (connections.py).
rule iptables mangle FORWARD -i "$sandboxes" -j CONNMARK --set-mark 0x52454d55
first="-m conntrack --ctstate NEW ! --ctstatus CONFIRMED"
# shellcheck disable=SC2086  # several words
rule iptables mangle FORWARD -i "$sandboxes" $first -m connlimit --connlimit-above 16384 --connlimit-mask 0 -j DROP
# shellcheck disable=SC2086
rule iptables mangle FORWARD -i "$sandboxes" $first -m hashlimit --hashlimit-name remuda \
  --hashlimit-above 500/second --hashlimit-burst 10000 -j DROP
# All forwarded packets, not only those of sandboxes. Use mangle: other software inserts its rules before ours in filter.
rule iptables mangle FORWARD -d 169.254.169.254 -j DROP
rule iptables filter INPUT -i "$sandboxes" -j DROP
rule iptables filter FORWARD -o "$sandboxes" -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
rule iptables filter FORWARD -i "$sandboxes" -j ACCEPT
rule iptables nat POSTROUTING -s 198.18.0.0/15 -j MASQUERADE
# On machines with up to 4 GiB of memory the table is smaller than what these limits permit. Only the first network
# namespace can change it.
table=/proc/sys/net/netfilter/nf_conntrack_max
[ ! -w $table ] || [ "$(cat $table)" -ge 262144 ] || echo 262144 >$table
if [ -e /proc/net/if_inet6 ] && command -v ip6tables >/dev/null; then
  rule ip6tables mangle FORWARD -d fd00:ec2::254 -j DROP
  rule ip6tables filter INPUT -i "$sandboxes" -j DROP
  rule ip6tables filter FORWARD -i "$sandboxes" -j DROP
fi
echo 1 >/proc/sys/net/ipv4/ip_forward
EOF
chmod 700 "$opt/bin/remuda-firewall"

if [[ -n $script ]]; then
  printf '%s' "$script" >"$state/pre-runner.sh"
  chmod 700 "$state/pre-runner.sh"
fi

region=$(metadata placement/region)
{
  printf 'AWS_REGION=%s\nAWS_EC2_METADATA_SERVICE_ENDPOINT=%s\n' "$region" "$imds"
  for pair in "${environment[@]}"; do printf '%s\n' "$pair"; done
} >"$state/agent.env"

mkdir -p "$units" "${units%/*}/network"
# The agent configures these interfaces. systemd-networkd would give them addresses and routes of 169.254.0.0/16, which
# has the address of the metadata service.
printf '[Match]\nName=ve-remuda-*\n\n[Link]\nUnmanaged=yes\n' >"${units%/*}/network/10-remuda.network"
chmod 644 "${units%/*}/network/10-remuda.network"
if command -v networkctl >/dev/null; then networkctl reload || say "systemd-networkd does not run"; fi
# A reboot removes the timers above and the network rules. These units restore them.
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
FailureAction=poweroff-immediate

[Service]
Type=oneshot
TimeoutStartSec=60
ExecStart=/bin/sh -c 'systemctl poweroff --force'
EOF
cat >"$units/remuda-firewall.service" <<EOF
[Unit]
Description=Network rules of sandboxes
DefaultDependencies=no
After=local-fs.target nftables.service netfilter-persistent.service ufw.service
Wants=network-pre.target
Before=network-pre.target
Conflicts=shutdown.target
Before=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=$opt/bin/remuda-firewall

[Install]
WantedBy=multi-user.target
EOF
# KillMode=process: a restart of the agent must not kill a running job. Jobs inherit the limits. On GitHub's images, too,
# 65,536 files can be open; a program may ask for more. The number of processes is limited per sandbox. WatchdogSec: the
# agent reports to systemd while its loop works. SIGABRT, the default, would not reach an agent that waits in the kernel.
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
WatchdogSec=120
WatchdogSignal=SIGKILL
Slice=remuda.slice
OOMScoreAdjust=-900
LimitNOFILE=65536:1048576
LimitNPROC=infinity

[Install]
WantedBy=multi-user.target
EOF
chmod 644 "$units"/remuda-*
systemctl daemon-reload
systemctl enable remuda-firewall.service remuda-agent.service remuda-dead-man-reboot.timer
# --no-block: this script may itself be part of the boot transaction.
systemctl start --no-block remuda-agent.service
say "agent started"
