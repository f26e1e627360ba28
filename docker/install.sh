#!/usr/bin/env bash
# Installs the patched SGLang, the gateway and the agent client from this checkout.
#
#   docker/install.sh [--demo] [PYTHON]
#
# PYTHON is the interpreter of the environment to install into (default: python3).
# Needs the Python package index and nothing else; no compiler, no git.
#
# - Packages that the environment has stay at its versions; every other one is installed
#   at the version of requirements/constraints.txt.
# - In an environment that has SGLang already (the official image) only our own packages
#   and what they lack are added. Its version must be the one that upstream.toml pins.
# - --demo also installs what the demo's tasks use.
#
# Exit status: 0 installed, 1 a step failed, 2 the environment or the command is wrong.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { echo "install: $*"; }
refuse() { echo "install: $*" >&2; exit 2; }

demo=false
python=python3
for word in "$@"; do
    case $word in
        --demo) demo=true ;;
        -*) refuse "option $word: unknown; allowed: --demo" ;;
        *) python=$word ;;
    esac
done
python=$(command -v "$python") || refuse "PYTHON: no such interpreter"
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
"$python" -m pip --version >/dev/null 2>&1 || refuse "$python: has no pip"

pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }

# "name==version" of every package that the environment holds, SGLang and pip's own
# tools left out; of two copies the one that an import finds.
held() {
    "$python" - <<'PYTHON'
import re
from importlib.metadata import distributions

found = {}
for package in distributions():
    name = re.sub("[-_.]+", "-", package.metadata["Name"] or "").lower()
    found.setdefault(name, package.version)
for name in sorted(found.keys() - {"", "pip", "setuptools", "sglang", "wheel"}):
    print(f"{name}=={found[name]}")
PYTHON
}

# requirements/constraints.txt without the packages that are there already.
constraints() {
    held >"$work/held.txt"
    "$python" - "$work/held.txt" "$root/requirements/constraints.txt" <<'PYTHON'
import re
import sys
from pathlib import Path

held, pinned = (Path(name).read_text().splitlines() for name in sys.argv[1:])
normal = lambda line: re.sub("[-_.]+", "-", line.split("==")[0]).lower()
names = {normal(line) for line in held}
print(*held, *(p for p in pinned if "==" in p and normal(p) not in names), sep="\n")
PYTHON
}

installed_sglang() {
    "$python" -c 'from importlib.metadata import version; print(version("sglang"))' 2>/dev/null || true
}

wanted=$(cd "$root" && "$python" setup.py version)
present=$(installed_sglang)
if [[ -n $present && ${present%%+*} != "${wanted%%+*}" ]]; then
    refuse "sglang $present is installed; the patches are for ${wanted%%+*}"
fi

say "building the wheels of sglang $wanted, the gateway and the agent client"
mkdir "$work/wheels"
(cd "$root" && "$python" setup.py wheel --output "$work/wheels" >/dev/null)
"$python" -m venv --without-pip "$work/build"
pip --python "$work/build/bin/python" install --constraint "$root/requirements/constraints.txt" setuptools
for folder in python sgl-router; do
    cp -r "$root/$folder" "$work/${folder}-source" # a build leaves files behind
    pip --python "$work/build/bin/python" wheel --no-deps --no-build-isolation \
        --wheel-dir "$work/wheels" "$work/${folder}-source"
done

constraints >"$work/constraints.txt"
if [[ -n $present ]]; then
    say "replacing sglang $present; its dependencies stay as they are"
    pip install --no-deps --force-reinstall "$work"/wheels/sglang-*.whl
else
    say "installing sglang and its dependencies"
    pip install --constraint "$work/constraints.txt" "$work"/wheels/sglang-*.whl
    constraints >"$work/constraints.txt"
fi
agent=$(echo "$work"/wheels/sglang_agent-*.whl)
extras=mcp,plots,simulate
more=()
$demo && more=(mcp-server-git mcp-server-time accelerate)
pip install --constraint "$work/constraints.txt" \
    "$work"/wheels/sgl_router-*.whl "${agent}[$extras]" ${more[@]+"${more[@]}"}
$demo && "$python" -m sglang_agent.side_packages mcp-server-sqlite >/dev/null
say "ready: $("$python" -c 'import sys; print(sys.prefix)') has sglang $(installed_sglang)"
