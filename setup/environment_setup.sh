#!/usr/bin/env bash
# Prepare a Python environment for the workshop; environment_setup.md says what it does and why.
set -euo pipefail

usage() {
    cat <<'END'
usage: environment_setup.sh [options]

Make a virtual environment, or use the active one, and install into it what is missing, and this project.
A PyTorch that is already there is never replaced.

options:
  --track auto|cpu|nvidia|rocm  what to install for (default: auto, what is detected)
  --venv DIR                    environment to make or to use (default: the active one, otherwise
                                .venv in the repository)
  --index-url URL               package index to take PyTorch from, if it is missing
                                (default on the rocm track: PyTorch's index for this ROCm version)
  --dev                         also what tests and analysis tools need
  --dry-run                     print the commands, change nothing
  --help                        print this
END
}

fail() { # MESSAGE [STATUS]
    printf 'environment_setup.sh: error: %s\n' "$1" >&2
    exit "${2:-1}"
}

run() { # COMMAND...: print it, quoted so that it can be copied into a shell, and run it
    printf '+%s\n' "$(printf ' %q' "$@")"
    [[ $dry_run ]] || "$@"
}

install() { # ARGUMENT... of pip
    run "$target/bin/python" -m pip install "$@" ||
        fail "pip failed, see its message above; if it cannot reach the package index, set PIP_INDEX_URL to one it can"
}

recent_enough() { # PYTHON
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
validation=$root/setup/validation_scripts
checks=$validation/checks.py
requirements=("$root/requirements.txt" "$root/setup/requirements.txt")
track=auto
venv=
index_url=
dry_run=

while (($#)); do
    case $1 in
        --track | --venv | --index-url)
            [[ ${2:-} ]] || fail "$1 needs a value (--help lists all options)" 2
            name=${1#--}
            declare "${name//-/_}=$2"
            shift
            ;;
        --dev) requirements+=("$root/requirements-dev.txt") ;;
        --dry-run) dry_run=yes ;;
        -h | --help)
            usage
            exit
            ;;
        *) fail "unknown option $1 (--help lists all options)" 2 ;;
    esac
    shift
done
[[ $track =~ ^(auto|cpu|nvidia|rocm)$ ]] || fail "--track must be auto, cpu, nvidia or rocm, not $track" 2

# The environment. Whatever pip's settings say elsewhere, it installs into this one.
export PIP_USER=0
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_DRY_RUN PIP_NO_DEPS
python=
for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if recent_enough "$candidate"; then
        python=$(command -v "$candidate")
        break
    fi
done
[[ $python ]] || fail "no Python 3.10 or newer on PATH: load or install one (python3 --version shows yours)"
# active is a virtual environment, or one of conda other than base, which serves all others
active=$("$python" -c 'import os, sys
conda = os.path.isdir(f"{sys.prefix}/conda-meta") and os.environ.get("CONDA_DEFAULT_ENV") != "base"
print(sys.prefix if sys.prefix != sys.base_prefix or conda else "")')
target=${venv:-${active:-$root/.venv}}
create=
if [[ -x $target/bin/python ]]; then
    python=$target/bin/python
    recent_enough "$python" ||
        fail "$python does not work or is older than Python 3.10: remove $target, or give another --venv"
    echo "Environment: $target"
elif [[ -e $target ]]; then
    fail "$target exists and is not a Python environment: remove it, or give another --venv"
else
    create=yes
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module: install it (Debian, Ubuntu: python3-venv), or activate an environment"
    echo "Environment: $target, to be made with $python"
fi

if [[ $track == auto ]]; then
    detected=$("$python" "$checks" track)
    track=${detected%% *}
    echo "Track: $track (${detected#* })"
fi
torch=$("$python" "$checks" torch "$track") ||
    fail "PyTorch of $python: $torch (nothing was changed; make and activate an environment without it, or load another)"
echo "PyTorch: ${torch:-missing}"

# PyTorch's index for the ROCm that is installed: the newest that is not newer.
if [[ $track == rocm && -z $torch && -z $index_url ]]; then
    file=${ROCM_PATH:-/opt/rocm}/.info/version
    version=$(cat "$file" 2>/dev/null) || version=
    for known in 6.1 6.2.4 6.3 6.4 7.0 7.1 7.2; do
        oldest=$(printf '%s\n' "$known" "$version" | sort -V | head -n 1)
        [[ $oldest != "$known" ]] || index_url=https://download.pytorch.org/whl/rocm$known
    done
    [[ $index_url ]] ||
        fail "no ROCm version from 6.1 on in $file: give --index-url https://download.pytorch.org/whl/rocmX.Y"
fi

if [[ $create ]]; then
    [[ -z $torch ]] || "$python" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' ||
        fail "PyTorch of $python is in a virtual environment, which a new one cannot use: leave out --venv"
    run "$python" -m venv ${torch:+--system-site-packages} "$target" || fail "$target could not be made, see above"
    [[ $dry_run ]] || python=$target/bin/python
fi

# What the files ask for. Lines with `-r` name files of this list, `-e .` is the last step here. PyTorch for ROCm brings
# Triton under another package name, so it is looked for as a module: pip would put PyPI's over it.
bounds=()
packages=()
while read -r line; do
    case $line in
        '' | '#'* | -*) ;;
        torch[\<\>=]*) bounds+=("$line") ;;
        triton*) [[ -z $torch && $track == rocm ]] || "$python" -c 'import triton' 2>/dev/null || packages+=(triton) ;;
        *) packages+=("$line") ;;
    esac
done < <(cat "${requirements[@]}")
if [[ -z $torch && $index_url ]]; then
    install --index-url "$index_url" "${bounds[@]}"
elif [[ -z $torch ]]; then
    cpu_build=
    if [[ $track == cpu ]]; then # other builds bring CUDA's libraries, gigabytes that nothing here would use
        cpu_build=$("$python" "$checks" cpu-build "${bounds[@]}")
    fi
    packages+=("${cpu_build:-"${bounds[@]}"}")
fi
install "${packages[@]}"
install -e "$root" --no-deps

[[ $target == "$active" ]] || echo "Activate it with: source $target/bin/activate"
echo
run "$target/bin/python" "$validation/test_environment.py" --track "$track"
