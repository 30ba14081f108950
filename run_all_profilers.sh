#!/usr/bin/env bash
# Every profiler that works here around one version script, each in a folder of its own, and a summary of what ran.
# shellcheck source=fusion_lab/rocm/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/fusion_lab/rocm/common.sh" || exit 4

default_script=tiny_llama_v2.py # as in the sheets that name this program
flags="--enable-rocm-tools"
values="--profile-dir"
enable_rocm_tools=
profile_dir=

usage() {
    cat <<END
Usage: $program [options] [script arguments]

Runs the PyTorch profiler, the FLOPs count and, if asked, the ROCm profilers around a version script. What ran, what was
skipped and why is in summary.md and summary.json. Ends with status 1 only if something that ran failed. Two such
directories can be compared: python analysis_tools/analyze_kernel_reduction.py --baseline DIR --fused DIR

  --enable-rocm-tools   also rocprofv3, rocprof-sys and rocprof-compute (roofline), where they are installed
  --script FILE         version script to profile (default: $default_script)
  --profile-dir DIR     for all results (default: ./profiles_SCRIPT)
  --dry-run             print the commands and run nothing
  --help                this text
All other arguments go to the script as they are. PYTHON names another interpreter than python3.

Example:
  ./$program --enable-rocm-tools --script tiny_llama_v2.py --batch-size 8 --seq-len 128 --profile-dir ./profiles
END
}

step() { # NAME COMMAND...
    local name=$1 status=0 start
    start=$(date +%s)
    shift
    if [[ $dry_run ]]; then
        show "$@"
        return
    fi
    echo "$name: running, its output goes to $directory/logs/$name.log"
    "$@" </dev/null >"$directory/logs/$name.log" 2>&1 || status=$?
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$start" "$(($(date +%s) - start))" >>"$directory/steps.tsv"
}

summarise() { ours "$root/fusion_lab/rocm/summarise_profiles.py" "$directory" "$(basename "$script")"; }

parse_arguments "$@"
[[ $output_dir == . && -z $result_dir ]] || fail 2 "--output-dir, --result-dir: give --profile-dir for all results"
name_default
directory=${profile_dir:-./profiles_$(basename "$script" .py)}
directory=${directory/#-/./-}
if [[ -z $dry_run ]]; then
    own "$directory"
    mkdir -p "$directory/logs"
    : >"$directory/steps.tsv"
    trap 'summarise || true' EXIT
    end_at_signals "what ran until then is in $directory/summary.md"
fi
common=(--script "$script" ${script_args[@]+"${script_args[@]}"})
step pytorch_profiler "$python" "$root/run_pytorch_profiler.py" --profile-dir "$directory/pytorch" --generate-report \
    "${common[@]}"
step flops "$python" "$root/run_deepspeed_flops.py" --profile-dir "$directory/flops" --computational-intensity \
    "${common[@]}"
if [[ $enable_rocm_tools ]]; then
    step rocprofv3 "$root/run_rocprofv3.sh" --output-dir "$directory" "${common[@]}"
    step rocprof_sys "$root/run_rocprof_sys.sh" --output-dir "$directory" "${common[@]}"
    step rocprof_compute "$root/run_rocprof_compute.sh" --roof-only --output-dir "$directory" "${common[@]}"
fi
if [[ $dry_run ]]; then exit; fi
trap - EXIT INT TERM HUP
summarise
