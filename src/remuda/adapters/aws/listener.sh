# Bootstrap of the listener, run as user data: Remuda's deployment/listener.py puts variables and functions above this
# text. It contains no credential: the listener reads that with the role of its machine. Supports Ubuntu 24.04.
# shellcheck shell=bash disable=SC2154  # the variables are set above
[[ $(uname -m) == aarch64 ]] && arch=arm64 || arch=x86_64
# Settings have one value for all architectures, or one per architecture: arm64=VALUE,x86_64=VALUE.
of_architecture() { # VALUES
  local each
  for each in ${1//,/ }; do
    [[ $each == *=* && $each != "$arch="* ]] || printf '%s' "${each#*=}"
  done
}

mkdir -p "$opt" "$etc"
work=$(mktemp -d)
url=$(of_architecture "$agent_url")
[[ -n $url ]] || fail "AgentUrl has no value for $arch, the architecture of this machine: $agent_url"
fetch "$url" "$(of_architecture "$agent_sha256")" "$work/agent.tar.gz"
tar -xzf "$work/agent.tar.gz" -C "$opt" --no-same-owner
rm -rf "$work"
"$opt/bin/remuda" --version &>/dev/null || retry install_packages python3.11
"$opt/bin/remuda" --version >/dev/null || fail "the program does not run"

imds_token=$(imds_curl -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 600' "$imds/latest/api/token")
{
  printf 'AWS_REGION=%s\nREMUDA_LISTENER_INSTANCE=%s\n' "$(metadata placement/region)" "$(metadata instance-id)"
  for pair in "${environment[@]}"; do printf '%s\n' "$pair"; done
} >"$etc/listener.env"
# The log is also that of the machine's console: aws ec2 get-console-output --latest shows it without access to it.
cat >"$units/remuda-listener.service" <<EOF
[Unit]
Description=Remuda listener
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
EnvironmentFile=$etc/listener.env
ExecStart=$opt/bin/remuda listen
Restart=always
RestartSec=5
TimeoutStopSec=60
StandardOutput=journal+console
StandardError=journal+console
DynamicUser=yes
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
PrivateTmp=yes
PrivateDevices=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service

[Install]
WantedBy=multi-user.target
EOF
systemctl daemon-reload
systemctl enable remuda-listener.service
# --no-block: this script may itself be part of the boot transaction.
systemctl start --no-block remuda-listener.service
say "listener started"
