#!/usr/bin/env bash
# Prepare a Python environment for the workshop; environment_setup.md says what it does and why.
set -euo pipefail

usage() {
    cat <<'END'
usage: environment_setup.sh [options]

Make a virtual environment, or use the active one, and install into it what is missing.
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

examples:
  bash setup/environment_setup.sh
  bash setup/environment_setup.sh --track rocm --dry-run
  bash setup/environment_setup.sh --track cpu --index-url https://download.pytorch.org/whl/cpu
END
}

# fail MESSAGE [STATUS]
fail() {
    rm -f -- "${unfinished:-}"
    printf 'environment_setup.sh: error: %s\n' "$1" >&2
    exit "${2:-1}"
}

# Print a command, quoted so that it can be copied into a shell, and, unless this is a dry run, run it.
run() {
    printf '+%s\n' "$(printf ' %q' "$@")"
    [[ $dry_run ]] || "$@"
}

root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
validation=$root/setup/validation_scripts
checks=$validation/checks.py
requirements=$root/setup/requirements.txt
track=auto venv='' index_url='' dry_run=''
[[ -r $checks ]] || fail "$checks is not there: run this script where the repository has it, or by a link" 4

while (($#)); do
    case $1 in
        --track | --venv | --index-url)
            [[ ${2:-} ]] || fail "$1 needs a value (--help lists all options)" 2
            name=${1#--}
            declare "${name//-/_}=$2"
            shift
            ;;
        --dev) requirements=$root/requirements-dev.txt ;;
        --dry-run) dry_run=yes ;;
        -h | --help)
            usage
            exit
            ;;
        *) fail "unknown option $1 (--help lists all options)" 2 ;;
    esac
    shift
done
venv=${venv/#-/./-}
[[ $track =~ ^(auto|cpu|nvidia|rocm)$ ]] || fail "--track must be auto, cpu, nvidia or rocm, not $track" 2

recent_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

host=''
for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if recent_enough "$candidate"; then
        host=$(command -v "$candidate")
        break
    fi
done

# The active environment: a virtual one, one of conda other than base (which serves all others), or, as in containers,
# a virtual one that is on PATH without having been activated.
active=${VIRTUAL_ENV:-}
if [[ -z $active && ${CONDA_DEFAULT_ENV:-} != base ]]; then
    active=${CONDA_PREFIX:-}
fi
if [[ -z $active && $host ]]; then
    active=$("$host" -c 'import sys; print(sys.prefix if sys.prefix != sys.base_prefix else "")')
fi

target=${venv:-${active:-$root/.venv}}
python=$target/bin/python
create=''
unfinished=${target%/}.unfinished # is there from when we make an environment until all is installed
if [[ -e $target && ! -e $unfinished ]]; then
    [[ -x $python && (-e $target/pyvenv.cfg || -d $target/conda-meta) ]] ||
        fail "$target exists and is not a Python environment: remove it, or give another --venv"
    recent_enough "$python" ||
        fail "$python does not work or is older than Python 3.10: remove $target, or give another --venv"
    echo "Environment: $target"
elif [[ $target == "$active" && ! -e $target ]]; then
    fail "the active environment $active does not exist: deactivate it first"
else
    create=yes
    python=$host
    [[ $python ]] || fail "no Python 3.10 or newer on PATH: load or install one (python3 --version shows yours)"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module: install it (Debian, Ubuntu: python3-venv), or activate an environment"
    echo "Environment: $target, to be made with $python"
fi

if [[ $track == auto ]]; then
    detected=$(PYTHONPATH=$root "$python" "$checks" track)
    track=${detected%% *}
    echo "Track: $track (${detected#* })"
else
    echo "Track: $track"
fi

refuse_diversion() {
    local advice
    advice=$(PYTHONPATH=$root "$python" "$checks" diverts)
    [[ -z $advice ]] || fail "pip is set to install elsewhere than in $target, or nothing: $advice, then run this again"
}
refuse_diversion # of the environment, or of the Python that makes one and may have no pip

# The PyTorch that is there: used if it can be, never replaced.
torch=$(PYTHONPATH=$root "$python" "$checks" torch "$track") ||
    fail "PyTorch of $python: $torch (nothing was changed; make and activate an environment without it, or load another)"
echo "PyTorch: ${torch:-missing}"

site_packages=()
if [[ $create && $torch ]]; then
    "$python" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' ||
        fail "PyTorch of $python is in a virtual environment, which a new one cannot use: leave out --venv"
    site_packages=(--system-site-packages)
fi

# PyTorch's index for the ROCm that is installed: the newest that is not newer.
if [[ $track == rocm && -z $torch && -z $index_url ]]; then
    file=${ROCM_PATH:-/opt/rocm}/.info/version
    version=$(cat "$file" 2>/dev/null) || version=''
    case $version in
        6.0* | 6.1*) version=6.1 ;;
        6.2*) version=6.2.4 ;;
        6.3*) version=6.3 ;;
        6.[4-9]*) version=6.4 ;;
        7.0*) version=7.0 ;;
        7.1*) version=7.1 ;;
        7.* | [89].* | [1-9][0-9].*) version=7.2 ;;
        *) fail "no ROCm version from 6.0 on in $file: give --index-url https://download.pytorch.org/whl/rocmX.Y" ;;
    esac
    index_url=https://download.pytorch.org/whl/rocm$version
fi

if [[ $create ]]; then
    again=()
    if [[ -e $target ]]; then again=(--clear); fi # an interrupted setup has left it
    if [[ ! $dry_run ]]; then
        mkdir -p "$(dirname "$target")" || fail "$target: cannot write there"
        : >"$unfinished" || fail "$target: cannot write there"
    fi
    run "$python" -m venv "${again[@]}" "${site_packages[@]}" "$target" || {
        rm -rf -- "$target"
        fail "the environment could not be made, see the message above"
    }
    [[ $dry_run ]] || python=$target/bin/python
    if [[ $torch && $(PYTHONPATH=$root "$python" "$checks" torch "$track") != "$torch" ]]; then
        fail "$target does not see PyTorch $torch of $host: remove it, and activate the environment that has PyTorch"
    fi
fi
pip=("$target/bin/python" -m pip)
[[ $dry_run ]] || refuse_diversion

# Say why pip did not do it.
install_failed() {
    "${pip[@]}" --version >/dev/null 2>&1 ||
        fail "$target has no pip: run $target/bin/python -m ensurepip, or give another --venv"
    fail "pip failed, see its message above; if it cannot reach the package index, set PIP_INDEX_URL to one that it can"
}

if [[ -z $torch && -z $index_url ]]; then
    cpu_build=()
    if [[ $track == cpu ]]; then # other builds bring CUDA's libraries, gigabytes that nothing here would use
        mapfile -t cpu_build < <(PYTHONPATH=$root "$python" "$checks" cpu-build "$requirements")
    fi
    run "${pip[@]}" install -r "$requirements" "${cpu_build[@]}" || install_failed
else
    questions=("$python")
    if [[ -z $torch ]]; then
        run "${pip[@]}" install --index-url "$index_url" "$(grep '^torch[<>=]' "$root/requirements.txt")" ||
            install_failed
        if [[ $dry_run ]]; then
            torch=VERSION_INSTALLED_ABOVE
            if [[ $create ]]; then
                questions+=(-E -s -S) # as in the new environment: nothing but the standard library
            fi
        else
            torch=$(PYTHONPATH=$root "$python" "$checks" torch "$track") || fail "PyTorch from $index_url: $torch"
        fi
    fi
    answer=$(PYTHONPATH=$root "${questions[@]}" "$checks" missing "$requirements")
    missing=()
    while read -r line; do
        # In a dry run these two are missing, but the command above would have brought them.
        [[ -z $line || $line == torch[\<\>=]* || ($line == triton* && $index_url == */rocm*) ]] || missing+=("$line")
    done <<<"$answer"
    if ((${#missing[@]})); then
        # With this constraint pip cannot change the PyTorch that is there, whatever it installs.
        printf '+%s --constraint <(echo %q)%s\n' "$(printf ' %q' "${pip[@]}" install)" "torch==$torch" \
            "$(printf ' %q' "${missing[@]}")"
        [[ $dry_run ]] ||
            "${pip[@]}" install --constraint <(echo "torch==$torch") "${missing[@]}" || install_failed
    else
        echo "Nothing to install: all of ${requirements##*/} is there."
    fi
fi

[[ $dry_run ]] || rm -f "$unfinished"
[[ $target == "$active" ]] || echo "Activate it with: source $target/bin/activate"
echo
run "$target/bin/python" "$validation/test_environment.py" --track "$track"
