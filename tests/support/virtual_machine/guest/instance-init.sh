#!/bin/bash
# Replacement of cloud-init: unpacks the software of the image, then runs the user data once per instance.
set -eu -o pipefail
umask 022

imds=http://169.254.169.254
request() { curl -sSf --retry 10 --retry-connrefused --max-time 30 "$@"; }
token=$(request -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 600' "$imds/latest/api/token")
get() { request -H @- "$imds/latest/$1" <<<"X-aws-ec2-metadata-token: $token"; }

instance=/var/lib/cloud/instances/$(get meta-data/instance-id)
[[ ! -e $instance/done ]] || exit 0
mkdir -p "$instance"
# The second disk is a tar archive without a file system.
tar -xf /dev/vdb -C / --no-same-owner
touch "$instance/done"
install -m 700 /dev/null "$instance/user-data.txt"
get user-data >"$instance/user-data.txt"
exec "$instance/user-data.txt"
