#!/usr/bin/env bash
# rocprof-compute around a version script: roofline, and hardware counters of single kernels.
# shellcheck source=fusion_lab/rocm/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/fusion_lab/rocm/common.sh" || exit 4

flags="--roof-only"
values="--mode --dispatch"
mode=profile
roof_only=
dispatch=

usage() {
    cat <<END
Usage: $program [options] [script arguments]

Runs rocprof-compute on a version script. It runs the script several times, so fewer steps are the default here
(--num-steps 2 --warmup-steps 1). Results land in rocprof_compute_results/workloads/; roofline_analysis.csv beside them
lists dispatch, kernel and time of the last profile. Which GPUs it knows depends on its release.

  --roof-only         roofline plots (PDF) only
  --mode profile      collect (the default)
  --mode analyze      report on the last profile
  --dispatch ID       of one dispatch, or of several, as "ID ID" (with --mode analyze)
$common_options

Examples:
  ./$program --roof-only --batch-size 4 --seq-len 64
  grep gemm rocprof_compute_results/roofline_analysis.csv
  ./$program --mode analyze --dispatch 1538
END
}

refuse_unknown_gpu() { # the tool does, after minutes. Its help lists those that it knows
    local known gpus
    known=$("$tool" analyze --help 2>/dev/null | grep -oE 'gfx[1-9][0-9a-f]+' | sort -u) || return 0
    gpus=$(rocminfo 2>/dev/null | grep -oE 'gfx[1-9][0-9a-f]+' | sort -u) || return 0
    if ! grep -qxFf <(echo "$known") <<<"$gpus"; then
        fail 4 "this release of rocprof-compute does not know ${gpus//$'\n'/, } (but ${known//$'\n'/, }); \
run_rocprofv3.sh works here"
    fi
}

options= # that the installed release has for profiles; where none is, those of ROCm 7.0
takes() { # OPTION
    options=${options:-$("$tool" profile --help 2>/dev/null || echo --kernel-names)}
    grep -qe "$1\b" <<<"$options"
}

parse_arguments "$@"
[[ $mode == profile || $mode == analyze ]] || fail 2 "--mode must be profile or analyze"
[[ $mode == analyze || -z $dispatch ]] || fail 2 "--dispatch goes with --mode analyze"
find_tool rocprofiler-compute rocprof-compute
parent=${result_dir:-$output_dir/rocprof_compute_results}

if [[ $mode == analyze ]]; then
    ((${#script_args[@]} == 0)) || fail 2 "--mode analyze runs no script: ${script_args[0]} has no meaning here"
    last=$(ours "$root/fusion_lab/rocm/files.py" newest "$parent/workloads" 2>/dev/null || true)
    if [[ -z $last ]]; then
        if [[ -z $dry_run ]]; then fail 2 "no profile in $parent: run $program without --mode analyze first"; fi
        last=$parent/workloads/NAME/GPU
    fi
    if [[ $last == *_roof/* ]]; then
        echo "$program: note: $last is of --roof-only: it has the counters of the roofline and no others" >&2
    fi
    command=("$tool" analyze -p "$last")
    read -ra dispatches <<<"$dispatch"
    if [[ $dispatch ]]; then command+=(--dispatch "${dispatches[@]}"); fi
    show "${command[@]}"
    if [[ $dry_run ]]; then exit; fi
    "${command[@]}" || fail $? "rocprof-compute analyze failed"
    exit
fi

name_default
name=$(basename "$script" .py)_$(side)
name=${name//[^A-Za-z0-9_]/_} # the tool takes no other
command=("$tool" profile)
if [[ $roof_only ]]; then
    name+=_roof
    command+=(--roof-only)
    if takes --kernel-names; then command+=(--kernel-names); fi
fi
if takes --output-directory; then place=--output-directory; else place=-p; fi
folder=$parent/workloads/$name
defaults=()
given --num-steps || defaults+=(--num-steps 2)
given --warmup-steps || defaults+=(--warmup-steps 1)
application "$folder" ${defaults[@]+"${defaults[@]}"}
command+=(-n "$name" "$place" "$folder" -- "${app[@]}")
if [[ $dry_run ]]; then
    show "${command[@]}"
    exit
fi
refuse_unknown_gpu
open_results "$folder"
run_tool "${command[@]}"
if [[ $roof_only ]]; then
    if takes --kernel-names; then
        read_files require "$results" '*.pdf'
    else
        echo "$program: note: this release of rocprof-compute draws rooflines when it analyzes" >&2
    fi
fi
read_files dispatches "$results" "$parent/roofline_analysis.csv"
if [[ -n $result_dir && ! -e $folder/rocprof ]]; then # a name that does not depend on GPU and release
    data=$(ours "$root/fusion_lab/rocm/files.py" newest "$folder")
    ln -s ".${data#"$folder"}" "$folder/rocprof"
fi
keep_results
if [[ -n $result_dir ]]; then
    echo "Dispatches: $parent/roofline_analysis.csv; next, with one of them as N:"
    echo "$(show "$tool" analyze -p "$folder/rocprof") --dispatch N"
else
    analyze=("$0" --mode analyze)
    if [[ $0 != */* ]]; then analyze[0]=./$0; fi
    if [[ $output_dir != . ]]; then analyze+=(--output-dir "$output_dir"); fi
    echo "Dispatches: $parent/roofline_analysis.csv; next: $(show "${analyze[@]}")"
fi
