#!/usr/bin/env bash
# Step of the action without the broker: runs Remuda from its bundle, which is unpacked once into the tool cache.
set -euo pipefail

# The file of a release with the digests of its bundles.
sums=$GITHUB_ACTION_PATH/deploy/action/SHA256SUMS

fail() {
  # Messages do not quote inputs, which are untrusted text.
  printf '::error title=remuda::%s\n' "$2"
  exit "$1"
}

case ${INPUT_MODE:-} in
  provision | release | refresh | scale-down) ;;
  *) fail 2 'mode must be provision, release, refresh or scale-down' ;;
esac
case ${INPUT_DIRECT:-} in
  true | false) ;;
  *) fail 2 'direct must be true or false' ;;
esac
case $(uname -sm) in
  'Linux x86_64') architecture=x86_64 ;;
  'Linux aarch64') architecture=arm64 ;;
  *) fail 2 "without the broker, remuda requires Linux on x86_64 or arm64; change runs-on of this job" ;;
esac

bundle=${INPUT_DIRECT_BUNDLE:-} digest=${INPUT_DIRECT_BUNDLE_SHA256:-}
if [ -z "$bundle" ]; then
  [ -e "$sums" ] || fail 2 'this version of the action has no bundle; use a released version, or set direct-bundle and direct-bundle-sha256'
  name=$(grep -o "remuda-direct-[0-9a-z.]*-$architecture\.tar\.gz" "$sums")
  version=${name#remuda-direct-}
  bundle=$GITHUB_SERVER_URL/$ACTION_REPOSITORY/releases/download/v${version%-"$architecture".tar.gz}/$name
fi
if [ -z "$digest" ] && [ -e "$sums" ]; then
  digest=$(grep -F "  ${bundle##*/}" "$sums" || true)
  digest=${digest%% *}
fi
[[ $digest =~ ^[0-9a-f]{64}$ ]] || fail 2 'direct-bundle-sha256 must be the SHA-256 digest of direct-bundle: 64 digits from 0 to 9 and a to f'

# The tool cache persists on self-hosted runners.
cache=${RUNNER_TOOL_CACHE:-}/remuda
if [ -z "${RUNNER_TOOL_CACHE:-}" ] || ! mkdir -p "$cache" 2>/dev/null || [ ! -w "$cache" ]; then
  cache=${RUNNER_TEMP:-/tmp}/remuda
  mkdir -p "$cache"
fi
place=$cache/$digest
if [ ! -d "$place" ]; then
  draft=$(mktemp -d "$cache/draft.XXXXXX")
  trap 'rm -rf "$draft"' EXIT
  archive=$draft/bundle
  case $bundle in
    https://*)
      curl -q --silent --show-error --fail --location --proto '=https' --retry 3 --max-time 120 --output "$archive" "$bundle" ||
        fail 4 'the bundle cannot be downloaded; the message of curl is in the log above'
      ;;
    *://*) fail 2 'direct-bundle must be a path or a URL that starts with https://' ;;
    *)
      [ -f "$bundle" ] || fail 2 'direct-bundle does not exist; give the path of a bundle, or omit it'
      archive=$bundle
      ;;
  esac
  sha256sum --quiet --check <<<"$digest  $archive" >/dev/null 2>&1 ||
    fail 2 'the digest of the bundle is not direct-bundle-sha256; nothing was executed'
  mkdir "$draft/files"
  # --force-local: a colon in the path does not name a host.
  tar --extract --gzip --no-same-owner --force-local --file "$archive" --directory "$draft/files"
  # Atomic. Fails if another job was faster, whose files are the same.
  mv --no-target-directory "$draft/files" "$place" 2>/dev/null || [ -d "$place" ]
  rm -rf "$draft"
  trap - EXIT
fi
exec "$place/bin/remuda-action"
