#!/usr/bin/env bash
# Writes docker/.env with the digest behind each image tag that compose.yaml names, so
# that later builds and starts use exactly these images. Needs docker with buildx and
# access to the registry. Run it again to move to what the tags point to now.
set -euo pipefail
cd "$(dirname "$0")"

version=$(sed -n 's/^version = "\(.*\)"/\1/p' ../upstream.toml)

digest() {
    local found
    found=$(docker buildx imagetools inspect "$1" --format '{{.Manifest.Digest}}')
    [[ $found =~ ^sha256:[0-9a-f]{64}$ ]] || {
        echo "pin-images: $1: the registry gave '$found', not a digest" >&2
        exit 1
    }
    echo "$found"
}

# The default of VARIABLE in compose.yaml: the tag to look up.
tag() { sed -n "s/.*\${$1:-\([^}]*\)}.*/\1/p" compose.yaml | head -n 1; }

pinned=""
for variable in PYTHON_IMAGE PROMETHEUS_IMAGE GRAFANA_IMAGE; do
    image=$(tag "$variable")
    pinned+="$variable=$image@$(digest "$image")"$'\n'
done
pinned+="SGLANG_IMAGE_DIGEST=$(digest "lmsysorg/sglang:v$version")"$'\n'
kept=$(grep -vE '^(PYTHON|PROMETHEUS|GRAFANA)_IMAGE=|^SGLANG_IMAGE_DIGEST=' .env 2>/dev/null || true)
printf '%s%s\n' "$pinned" "$kept" >.env
cat .env
