# shellcheck shell=bash
# What run_rocprofv3.sh, run_rocprof_sys.sh, run_rocprof_compute.sh and run_all_profilers.sh share. Each defines
#   usage           prints its help
#   wrapper_option  looks at "$1"; if it is an option of its own, keeps it and sets `consumed` to its number of words
# and gets from parse_arguments: script, output_dir, dry_run, script_args (all that no wrapper knows, in order).

set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
program=${0##*/}
python=${PYTHON:-python3}
script=tiny_openfold_v2.py
script_given=no
output_dir=.
result_dir=
dry_run=no
script_args=()
results=
group= # of the tool that runs

# shellcheck disable=SC2034  # for the usage text of each wrapper
common_options="  --script FILE       version script to profile (default: $script)
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

need_value() { # OPTION [VALUE...]
    (($# > 1)) || fail 2 "$1 needs a value"
}

need_python() {
    command -v -- "$python" >/dev/null || fail 4 "there is no program $python: PYTHON names the interpreter"
}

ours() { # PROGRAM ARGUMENT...: a program of this repository, whether it is installed or not
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" "$@"
}

parse_arguments() { # "$@" of the wrapper
    while (($#)); do
        case $1 in
        --help | -h)
            usage
            exit 0
            ;;
        --dry-run)
            dry_run=yes
            shift
            ;;
        --script)
            need_value "$@"
            script=$2
            script_given=yes
            shift 2
            ;;
        --output-dir)
            need_value "$@"
            output_dir=$2
            shift 2
            ;;
        --result-dir)
            need_value "$@"
            result_dir=${2%/}
            [[ -n $result_dir ]] || fail 2 "--result-dir needs a directory"
            shift 2
            ;;
        --)
            script_args+=("${@:2}")
            shift $#
            ;;
        --script=* | --output-dir=* | --result-dir=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            ;;
        *)
            consumed=0
            if [[ $1 == --*=* ]]; then
                wrapper_option "${1%%=*}" "${1#*=}"
                ((consumed != 1)) || fail 2 "${1%%=*} takes no value"
                consumed=$((consumed / 2))
            else
                wrapper_option "$@"
            fi
            if ((consumed == 0)); then
                script_args+=("$1")
                consumed=1
            fi
            shift "$consumed"
            ;;
        esac
    done
    [[ -n $output_dir ]] || fail 2 "--output-dir needs a directory"
    output_dir=${output_dir/#-/./-} result_dir=${result_dir/#-/./-} script=${script/#-/./-} # no options of any tool
    need_python
    if [[ ! -f $script ]]; then
        [[ -f $root/$script ]] || fail 2 "--script $script: no such file"
        script=$root/$script
    fi
}

given() { # FLAG: is it among the script's arguments?
    local word
    for word in ${script_args[@]+"${script_args[@]}"}; do
        if [[ $word == "$1" || $word == "$1="* ]]; then return 0; fi
    done
    return 1
}

single_fusion() { # enable or disable: do the script's arguments switch one fusion so? Sets `flag` to the first such
    for flag in ${script_args[@]+"${script_args[@]}"}; do
        case $flag in
        --*-all-fusion | --*-torch-compile | --*-cuda-graph | --*-profiler | --*-profiling) ;;
        "--$1-"*) return 0 ;;
        esac
    done
    return 1
}

side() { # baseline: all fusions off, and V1; fused: all on; partial: some
    if [[ $script == *_v1.py ]]; then
        echo baseline
    elif given --disable-all-fusion; then
        if single_fusion enable; then echo partial; else echo baseline; fi
    elif single_fusion disable; then
        echo partial
    else
        echo fused
    fi
}

name_default() { # once, where no --script is given
    [[ $script_given == yes ]] || echo "$program: note: no --script is given, $(basename "$script") is taken" >&2
    script_given=yes
}

application() { # RESULT_DIR [ARGUMENT...]: sets `app` to the command that runs the script under a profiler
    name_default
    app=("$python" "$script" --under-profiler --enable-rocm-profiling)
    if ! given --profile-dir; then app+=(--profile-dir "$1"); fi
    app+=("${@:2}" ${script_args[@]+"${script_args[@]}"})
}

find_tool() { # PACKAGE NAME...: sets `tool` to the first of the names that is installed
    local package=$1 name
    shift
    for name in "$@"; do
        if command -v "$name" >/dev/null; then
            tool=$name
            return
        fi
    done
    tool=$1
    if [[ $dry_run == yes ]]; then return; fi
    fail 4 "$1 not found: it comes with ROCm (package $package) and needs an AMD GPU; here \
'python run_pytorch_profiler.py --script $(basename "$script") --generate-report' answers the same question"
}

show() { # COMMAND...: print it as one could type it
    printf '%q ' "$@" | sed 's/ $//'
    echo
}

own() { # DIR: be the only one that writes there, until the end of this program and of the tools that it has started
    mkdir -p "$1" 2>/dev/null && [[ -w $1 ]] || fail 2 "$1: cannot write there"
    command -v flock >/dev/null || return 0 # a Mac, which has no ROCm
    exec {lock}<"$1"
    flock --nonblock "$lock" || fail 2 "$1: another profiler is writing there; wait for it, or give another folder"
}

# Results are replaced only by complete ones: while a tool runs, the earlier results wait in DIR.previous, and after a
# failure they come back and what the tool left is in DIR.failed.
open_results() { # DIR
    results=$1
    if [[ $results == "$result_dir" ]]; then
        mkdir -p "$(dirname "$results")" 2>/dev/null && [[ -w $(dirname "$results") ]] ||
            fail 2 "$(dirname "$results"): cannot write there"
        mkdir "$results" 2>/dev/null || fail 2 "--result-dir $results: it exists already"
    else
        own "$(dirname "$results")"
        if [[ -e $results.previous ]]; then # a wrapper was killed here
            rm -rf "$results"
            mv "$results.previous" "$results"
        fi
        if [[ -e $results ]]; then mv "$results" "$results.previous"; fi
        mkdir "$results"
    fi
    trap close_results EXIT
    end_at_signals "what was written is in $results.failed"
}

close_results() {
    rm -rf "$results.failed"
    mv "$results" "$results.failed"
    if [[ -e $results.previous ]]; then mv "$results.previous" "$results"; fi
}

keep_results() {
    rm -rf "$results.previous" "$results.failed"
    trap - EXIT INT TERM HUP
}

end_at_signals() { # WORDS: where to find what is left
    left=$1
    exec {stderr}>&2 # where a signal comes, it may lead to the log of a tool
    trap 'end_tool INT; fail 130 "interrupted; $left" 2>&"$stderr"' INT
    trap 'end_tool TERM; fail 143 "terminated; $left" 2>&"$stderr"' TERM
    trap 'end_tool TERM; fail 129 "the terminal is gone; $left" 2>&"$stderr"' HUP
}

# A tool runs in a group of its own, with all that it starts. So a signal reaches them all, and the wrapper, which waits
# in the background, can answer at once.
in_group() { # COMMAND...: returns its status
    local status=0
    set -m
    "$@" </dev/null &
    group=$!
    set +m
    wait "$group" || status=$?
    group=
    return "$status"
}

end_tool() { # SIGNAL: end the group, by force if it takes more than ten seconds
    local tenth
    trap '' INT TERM HUP
    if [[ -z $group ]]; then return; fi
    kill -"$1" -- "-$group" 2>/dev/null || true
    for ((tenth = 0; tenth < 100; tenth++)); do
        kill -0 -- "-$group" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL -- "-$group" 2>/dev/null || true
}

run_tool() { # COMMAND...
    local status=0
    show "$@"
    in_group "$@" || status=$?
    if ((status > 128)); then
        fail "$status" "$tool was ended by signal $((status - 128)); what it left is in $results.failed"
    elif ((status)); then
        fail "$status" "$tool ended with status $status; what it left is in $results.failed"
    fi
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
