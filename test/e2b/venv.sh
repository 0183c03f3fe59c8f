#!/usr/bin/env bash
# Installs requirements.txt into .venv, unless it is there already.
set -euo pipefail
cd "$(dirname "$0")"
cmp -s requirements.txt .venv/installed && exit 0
missing() {
  echo "$1: install python3 (3.10 or newer), python3-venv and python3-pip, on Debian: apt-get install python3-venv python3-pip" >&2
  exit 1
}
command -v python3 >/dev/null || missing "there is no python3"
rm -rf .venv
python3 -m venv .venv || missing "python3 cannot make a virtual environment"
.venv/bin/python -m pip --version >/dev/null || missing "the virtual environment has no pip"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
.venv/bin/python -m pip check --disable-pip-version-check
cp requirements.txt .venv/installed # last of all
