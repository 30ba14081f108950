# shellcheck shell=bash disable=SC2034  # the wrappers use what is set here
# What run_rocprofv3.sh, run_rocprof_sys.sh, run_rocprof_compute.sh and run_all_profilers.sh share. Each defines
#   usage   prints its help
#   flags   its own options without a value; --some-flag sets some_flag=yes
#   values  its own options with a value; --some-option X sets some_option=X
# and gets from parse_arguments: these, script, and script_args (all that no wrapper knows, in order).

set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
program=${0##*/}
python=${PYTHON:-python3}
default_script=tiny_openfold_v2.py
flags=
values=
script=
output_dir=.
result_dir=
dry_run=
script_args=()
results=

common_options="  --script FILE       version script to profile (default: $default_script)
  --output-dir DIR    where the result folder is made (default: the current directory)
  --result-dir DIR    the result folder itself, a new one, instead of one named after the fusions
  --dry-run           print the command and run nothing
  --help              this text
All other arguments go to the script as they are, and so do all behind --.
PYTHON names another interpreter than python3."

fail() { # STATUS MESSAGE
    echo "$program: error: $2" >&2
    exit "$1"
}

ours() { # PROGRAM ARGUMENT...: a program of this repository, whether it is installed or not
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" "$@"
}

is_one_of() { # WORD WORD...: is the first an option, and one of the others?
    [[ $1 == --* && " ${*:2} " == *" $1 "* ]]
}

parse_arguments() { # "$@" of the wrapper
    local option name
    while (($#)); do
        option=${1%%=*}
        name=${option#--}
        name=${name//-/_}
        if is_one_of "$option" --dry-run "$flags"; then
            [[ $1 == "$option" ]] || fail 2 "$option takes no value"
            declare -g "$name=yes"
        elif is_one_of "$option" --script --output-dir --result-dir "$values"; then
            if [[ $1 == "$option" ]]; then set -- "$1=${2-}" "${@:3}"; fi
            [[ $1 != "$option=" ]] || fail 2 "$option needs a value"
            declare -g "$name=${1#*=}"
        elif [[ $1 == --help || $1 == -h ]]; then
            usage
            exit 0
        elif [[ $1 == -- ]]; then
            script_args+=("${@:2}")
            break
        else
            script_args+=("$1")
        fi
        shift
    done
    script=${script/#-/./-} output_dir=${output_dir/#-/./-} result_dir=${result_dir/#-/./-} # no options of any tool
    result_dir=${result_dir%/}
    command -v -- "$python" >/dev/null || fail 4 "there is no program $python: PYTHON names the interpreter"
    if [[ $script && ! -f $script ]]; then
        [[ -f $root/$script ]] || fail 2 "--script $script: no such file"
        script=$root/$script
    fi
}

name_default() { # where no --script is given
    if [[ -z $script ]]; then
        echo "$program: note: no --script is given, $default_script is taken" >&2
        script=$root/$default_script
    fi
}

given() { # FLAG: is it among the script's arguments?
    local word
    for word in ${script_args[@]+"${script_args[@]}"}; do
        if [[ $word == "$1" || $word == "$1="* ]]; then return 0; fi
    done
    return 1
}

side() { # baseline: all fusions off, and V1; fused: all on; partial: some
    local word found=fused on='' off=''
    for word in ${script_args[@]+"${script_args[@]}"}; do
        case $word in
        --disable-all-fusion) found=baseline ;;
        --*-all-fusion | --*-torch-compile | --*-cuda-graph | --*-profiler | --*-profiling) ;;
        --enable-*) on=yes ;;
        --disable-*) off=yes ;;
        esac
    done
    if [[ $script == *_v1.py ]]; then
        found=baseline
    elif [[ $found$on == baselineyes || $found$off == fusedyes ]]; then
        found=partial
    fi
    echo $found
}

application() { # RESULT_DIR [ARGUMENT...]: sets `app` to the command that runs the script under a profiler
    app=("$python" "$script" --under-profiler --enable-rocm-profiling)
    if ! given --profile-dir; then app+=(--profile-dir "$1"); fi
    app+=("${@:2}" ${script_args[@]+"${script_args[@]}"})
}

find_tool() { # PACKAGE NAME: sets `tool`
    tool=$2
    if [[ $dry_run ]] || command -v "$tool" >/dev/null; then return; fi
    fail 4 "$tool not found: it comes with ROCm (package $1) and needs an AMD GPU; here \
'python run_pytorch_profiler.py --script $(basename "$script") --generate-report' answers the same question"
}

show() { # COMMAND...: print it as one could type it
    printf '%q ' "$@" | sed 's/ $//'
    echo
}

own() { # DIR: be the only one that writes there, until this program and the tools that it has started end
    mkdir -p "$1" 2>/dev/null && [[ -w $1 ]] || fail 2 "$1: cannot write there"
    command -v flock >/dev/null || return 0 # a Mac, which has no ROCm
    exec {lock}<"$1"
    flock --nonblock "$lock" || fail 2 "$1: another profiler is writing there; wait for it, or give another folder"
}

# Results are replaced only by complete ones: while a tool runs, the earlier results wait in DIR.previous, and after a
# failure they come back and what the tool left is in DIR.failed.
open_results() { # DIR
    results=$1
    if [[ $result_dir ]]; then
        mkdir -p "$(dirname "$results")" 2>/dev/null && mkdir "$results" 2>/dev/null ||
            fail 2 "--result-dir $result_dir: it exists already, or cannot be made"
    else
        own "$(dirname "$results")"
        if [[ -e $results.previous ]]; then close_results; fi # a wrapper was killed here
        if [[ -e $results ]]; then mv "$results" "$results.previous"; fi
        mkdir "$results"
    fi
    trap close_results EXIT
    end_at_signals "what was written is in $results.failed"
}

close_results() {
    rm -rf "$results.failed"
    if [[ -e $results ]]; then mv "$results" "$results.failed"; fi
    if [[ -e $results.previous ]]; then mv "$results.previous" "$results"; fi
}

keep_results() {
    rm -rf "$results.previous" "$results.failed"
    trap - EXIT INT TERM HUP
}

end_at_signals() { # WORDS: where to find what is left. Signals reach the whole group, and the tool ends first
    left=$1
    trap 'fail 130 "interrupted; $left"' INT
    trap 'fail 143 "terminated; $left"' TERM
    trap 'fail 129 "the terminal is gone; $left"' HUP
}

run_tool() { # COMMAND...
    local status=0
    read_files libraries "$(command -v "$tool")"
    show "$@"
    "$@" </dev/null || status=$?
    ((status == 0)) || fail "$status" "$tool ended with status $status; what it left is in $results.failed"
}

read_files() { # SUBCOMMAND ARGUMENT...: fusion_lab/rocm/files.py; if it fails, what it says is the one line
    local message status=0
    { message=$(ours "$root/fusion_lab/rocm/files.py" "$@" 2>&1 >&3) || status=$?; } 3>&1
    if ((status)); then
        local folder=${results#./} # its files are about to move, see close_results
        if [[ -n $folder ]]; then message=${message//"$folder"/"$folder.failed"}; fi
        fail "$status" "$message"
    elif [[ -n $message ]]; then
        echo "$message" >&2
    fi
}
