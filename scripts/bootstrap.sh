#!/bin/sh
# Build .venv with everything that the checks and the demo need; do nothing where it is up to date.
#
#   sh scripts/bootstrap.sh              # finds Python 3.12 or newer by itself
#   PYTHON=/opt/bin/python3.13 sh scripts/bootstrap.sh
#
# Exit codes: 0 .venv is ready, 2 no suitable Python.
set -eu
CDPATH='' cd -- "$(dirname -- "$0")/.."

venv=.venv
stamp=$venv/.hexi-stamp

say() { printf 'bootstrap: %s\n' "$*" >&2; }

# A name on PATH may be a shim that refuses to run, so run it.
suits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' </dev/null >/dev/null 2>&1; }
# Debian and Ubuntu package ensurepip apart, and a venv cannot be made without.
makes_venvs() { "$1" -c 'import ensurepip, venv' </dev/null >/dev/null 2>&1; }
version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])'; }

# One candidate a line, best first: Megatron's own version, then newer ones; PATH, pyenv, uv.
candidates() {
  pyenv=${PYENV_ROOT:-${HOME:-}/.pyenv}/versions
  uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python}
  for minor in 3.12 3.13 3.14; do
    command -v "python$minor" || true
    for found in "$pyenv/$minor".*/bin/"python$minor" "$uv/cpython-$minor"*/bin/"python$minor"; do
      if [ -x "$found" ]; then printf '%s\n' "$found"; fi
    done
  done
  command -v python3 || true
}

# Prints the Python to use. Fails where there is none, and says what to do about it.
find_python() {
  if [ -n "${PYTHON:-}" ]; then
    if ! suits "$PYTHON"; then
      say "error: PYTHON=$PYTHON does not run or is older than 3.12; give another, or unset PYTHON"
      return 2
    fi
    if ! makes_venvs "$PYTHON"; then refuse_without_venv "$PYTHON"; return 2; fi
    printf '%s\n' "$PYTHON"
    return
  fi
  crippled=
  while IFS= read -r candidate; do
    if ! suits "$candidate"; then continue; fi
    if makes_venvs "$candidate"; then printf '%s\n' "$candidate"; return; fi
    crippled=${crippled:-$candidate}
  done <<LIST
$(candidates)
LIST
  if [ -n "$crippled" ]; then refuse_without_venv "$crippled"; else refuse_without_python; fi
  return 2
}

refuse_without_venv() {
  say "error: $1 lacks venv or ensurepip; install them (Debian, Ubuntu: apt install python3-venv," \
    "or python3.12-venv for Python 3.12), or set PYTHON to another Python"
}

refuse_without_python() {
  say 'error: no Python 3.12 or newer found, which megatron-core needs. Install one, for example:
  Debian 13, Ubuntu 24.04 or newer   apt install python3 python3-venv
  Fedora, RHEL 9 or newer            dnf install python3.12
  any, without root                  uv python install 3.12      (https://docs.astral.sh/uv)
  any, without root                  pyenv install 3.12          (https://github.com/pyenv/pyenv)
and run this again; or set PYTHON to one that lies elsewhere.'
}

# Whether .venv works, was made where it now lies (its commands hold their path), and is of the Python asked for.
venv_works() {
  if ! suits "$venv/bin/python"; then return 1; fi
  case "$("$venv/bin/pip" --version 2>/dev/null)" in
    *" from $(pwd -P)/$venv/"*) ;;
    *) return 1 ;;
  esac
  [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON" 2>/dev/null)" = "$(version_of "$venv/bin/python")" ]
}

# What the installation depends on; it is brought up to date when any of this changes.
fingerprint() {
  cat setup.py pyproject.toml scripts/bootstrap.sh | cksum
  version_of "$venv/bin/python"
}

if venv_works; then
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; then exit 0; fi
else
  python=$(find_python) || exit 2
  say "$venv: new, with Python $(version_of "$python") ($python)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi

rm -f "$stamp"
say "$venv: installing what setup.py asks for. The first time that is 5 GB, most of it torch with CUDA:"
say "two to ten minutes, by connection and disk"
"$venv/bin/python" -m pip install --disable-pip-version-check -e '.[dev]'
# The Python of Transformer Engine, for tests that emulate its library. Beside the environment's packages, where
# Megatron does not see it.
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --upgrade \
  --target "$venv/transformer-engine" 'transformer-engine==2.20.2'
# Megatron Bridge without the forty packages that it asks for, and what reads its configuration; likewise beside.
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --upgrade \
  --target "$venv/megatron-bridge" 'megatron-bridge==0.6.2' 'omegaconf==2.4.0' 'antlr4-python3-runtime==4.9.3'
fingerprint >"$stamp"
say "$venv: ready"
