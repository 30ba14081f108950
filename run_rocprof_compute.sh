#!/usr/bin/env bash
# rocprof-compute around a version script: roofline, and hardware counters of single kernels.
# shellcheck source=fusion_lab/rocm/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/fusion_lab/rocm/common.sh" || exit 4

mode=profile
roof_only=no
list_stats=no
dispatches=()

usage() {
    cat <<END
Usage: $program [options] [script arguments]

Runs rocprof-compute on a version script. It runs the script several times, so fewer steps are the default here
(--num-steps 2 --warmup-steps 1). Results land in rocprof_compute_results/workloads/; roofline_analysis.csv beside them
lists dispatch, kernel and time of the last profile. Needs a data-centre GPU (MI100, MI200, MI300, MI350).

  --roof-only         roofline plots (PDF) only
  --mode profile      collect (the default)
  --mode analyze      report on the last profile
  --dispatch ID       of one dispatch (with --mode analyze; may be repeated)
  --list-stats        of kernels by time and all dispatches (implies --mode analyze)
$common_options

Examples:
  ./$program --roof-only --batch-size 4 --seq-len 64
  grep gemm rocprof_compute_results/roofline_analysis.csv
  ./$program --mode analyze --dispatch 1538
END
}

wrapper_option() {
    case $1 in
    --roof-only)
        roof_only=yes
        consumed=1
        ;;
    --list-stats)
        list_stats=yes
        mode=analyze
        consumed=1
        ;;
    --mode | --dispatch)
        need_value "$@"
        case $1 in
        --mode) mode=$2 ;;
        --dispatch) dispatches+=("$2") ;;
        esac
        consumed=2
        ;;
    esac
}

refuse_consumer_gpu() { # the tool does, after minutes
    local gpu
    command -v rocminfo >/dev/null || return 0
    gpu=$(rocminfo 2>/dev/null | grep -o 'gfx[1-9][0-9a-f]*' || true)
    if [[ $gpu == gfx1* && $gpu != *gfx9* ]]; then
        gpu=${gpu%%$'\n'*}
        fail 4 "rocprof-compute supports data-centre GPUs only (MI100, MI200, MI300, MI350), this is $gpu; \
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
if [[ $mode == profile ]] && ((${#dispatches[@]})); then fail 2 "--dispatch goes with --mode analyze"; fi
find_tool rocprofiler-compute rocprof-compute
parent=${result_dir:-$output_dir/rocprof_compute_results}

if [[ $mode == analyze ]]; then
    ((${#script_args[@]} == 0)) || fail 2 "--mode analyze runs no script: ${script_args[0]} has no meaning here"
    last=$(ours "$root/fusion_lab/rocm/files.py" newest "$parent/workloads" 2>/dev/null || true)
    if [[ -z $last ]]; then
        if [[ $dry_run == no ]]; then fail 2 "no profile in $parent: run $program without --mode analyze first"; fi
        last=$parent/workloads/NAME/GPU
    fi
    if [[ $last == *_roof/* ]]; then
        echo "$program: note: $last is of --roof-only: it has the counters of the roofline and no others" >&2
    fi
    command=("$tool" analyze -p "$last")
    if [[ $list_stats == yes ]]; then command+=(--list-stats); fi
    if ((${#dispatches[@]})); then command+=(--dispatch "${dispatches[@]}"); fi
    show "${command[@]}"
    if [[ $dry_run == yes ]]; then exit; fi
    "${command[@]}" || fail $? "rocprof-compute analyze failed"
    exit
fi

name=$(basename "$script" .py)_$(side)
name=${name//[^A-Za-z0-9_]/_} # the tool takes no other
command=("$tool" profile)
if [[ $roof_only == yes ]]; then
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
if [[ $dry_run == yes ]]; then
    show "${command[@]}"
    exit
fi
refuse_consumer_gpu
open_results "$folder"
run_tool "${command[@]}"
if [[ $roof_only == yes ]]; then
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
    analyze=("$0" --mode analyze --list-stats)
    if [[ $0 != */* ]]; then analyze[0]=./$0; fi
    if [[ $output_dir != . ]]; then analyze+=(--output-dir "$output_dir"); fi
    echo "Dispatches: $parent/roofline_analysis.csv; next: $(show "${analyze[@]}")"
fi
