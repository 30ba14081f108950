#!/usr/bin/env bash
# rocprofv3 around a version script: which kernels take the time, a timeline, or hardware counters.
# shellcheck source=fusion_lab/rocm/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/fusion_lab/rocm/common.sh" || exit 4

flags="--hsa"
values="--mode --counters --from-db"
mode=hotspots
hsa=
from_db=
known= # what rocprofv3 --help says
counters="SQ_WAVES SQ_INSTS_VALU GRBM_GUI_ACTIVE"

usage() {
    cat <<END
Usage: $program [options] [script arguments]

Runs rocprofv3 around the measured steps of a version script. Results of a run with all fusions off (V1, or
--disable-all-fusion) land in rocprofv3_results_baseline/, with all on in rocprofv3_results_fused/, and with some of
them (--disable-all-fusion --enable-X, or --disable-X) in rocprofv3_results_partial/. Once baseline and fused are
there, they are compared per step. Between two models there is no comparison: the results stay, the status is 2.

  --mode hotspots     kernel statistics: stats.csv, the top kernels, their number (the default)
  --mode trace        timeline of HIP calls, markers, copies and kernels: a .pftrace for https://ui.perfetto.dev
  --mode kernels      as hotspots, but rocprofv3 chooses the format: csv (ROCm 6) or a database for rocpd (ROCm 7)
  --mode counters     hardware counters of every dispatch, in one pass
  --counters "A B"    which counters (default: $counters); rocprofv3 --list-avail lists them
  --hsa               also HSA calls (with --mode trace)
  --from-db FILE.db   make stats.csv from a database that rocprofv3 of ROCm 7 wrote; runs no script
$common_options

Examples:
  ./$program --batch-size 4 --seq-len 64 --disable-all-fusion
  ./$program --batch-size 4 --seq-len 64 --enable-all-fusion
END
}

results_of() { # SIDE
    echo "${result_dir:-$output_dir/rocprofv3_results_$1}"
}

show_statistics() { # SIDE: the top kernels, and what fusion saved if both sides are there
    local baseline fused
    read_files show "$(results_of "$1")"
    if [[ -n $result_dir ]]; then
        echo "Next: run_rocprofv3.sh --mode trace (when they ran), run_rocprof_compute.sh (why one is slow)."
        return
    fi
    if [[ $1 == partial ]]; then return; fi
    baseline=$(results_of baseline)
    fused=$(results_of fused)
    if [[ -f $baseline/stats.csv && -f $fused/stats.csv ]]; then
        echo
        ours "$root/analysis_tools/analyze_kernel_reduction.py" --baseline "$baseline" --fused "$fused" --top 0
    fi
}

show_launches() { # DIR: which files have every launch, and what to do with databases
    local databases
    mapfile -d '' databases < <(find "$1" -name '*_results.db' -print0 | sort -z)
    if ((${#databases[@]} == 0)); then
        echo "Every launch: $1/*_kernel_trace.csv"
        return
    fi
    echo "Every launch: in the database. Next:"
    show rocpd summary -i "${databases[@]}" --region-categories KERNEL
    show rocpd2csv -i "${databases[@]}" -o kernel_stats.csv
    echo "or, where rocpd2csv is missing:"
    show rocpd convert -i "${databases[@]}" -f csv -d "$1" -o kernel_stats
}

knows() { # OPTION: does this rocprofv3 have it? Without one (--dry-run) that of ROCm 7 is assumed
    if [[ -z $known ]] && command -v "$tool" >/dev/null; then known=$("$tool" --help 2>&1) || true; fi
    [[ -z $known || $known == *"$1"* ]]
}

profile() { # SIDE: run the script once
    local folder raw command regions=(--selected-regions)
    knows --selected-regions || regions=()
    if given --enable-cuda-graph && [[ $known == *--hip-graph-trace* ]]; then regions+=(--hip-graph-trace); fi
    folder=$(results_of "$1")
    raw=${result_dir:-$folder/$mode}
    # csv has to be asked for: ROCm 7 writes databases otherwise. --marker-trace records the phases, and rocprofv3
    # honours the regions that the script selects only with it. %pid% keeps the files of several processes apart.
    command=("$tool")
    case $mode in
    hotspots) command+=(--kernel-trace --stats --marker-trace --output-format csv) ;;
    kernels) command+=(--kernel-trace --stats --marker-trace) ;;
    trace)
        if [[ $hsa ]]; then command+=(--sys-trace); else command+=(--runtime-trace); fi
        command+=(--output-format pftrace)
        ;;
    counters) command+=(--pmc "${counter_names[@]}" --marker-trace --output-format csv) ;;
    esac
    application "$raw"
    command+=(${regions[@]+"${regions[@]}"} -d "$raw" -o %pid% -- "${app[@]}")
    if [[ $dry_run ]]; then
        show "${command[@]}"
        return
    fi
    open_results "$raw"
    run_tool "${command[@]}"
    if ((${#regions[@]} == 0)); then # for readers that would divide by the measured steps
        : >"$results/with_warm_up"
        echo "$program: note: this rocprofv3 does not know --selected-regions, so the warm-up is recorded, too" >&2
    fi
    case $mode in
    hotspots) read_files statistics "$results" "$folder/stats.csv" ;;
    kernels) read_files statistics "$results" "$results/stats.csv" ;;
    trace) read_files require "$results" '*_results.pftrace' ;;
    counters) read_files require "$results" '*_counter_collection.csv' ;;
    esac
    keep_results
    case $mode in
    hotspots) show_statistics "$1" ;;
    kernels)
        read_files show "$raw"
        show_launches "$raw"
        ;;
    trace) echo "Open with https://ui.perfetto.dev (Open trace file); it stays in the browser." ;;
    counters) echo "One row per dispatch and counter; GRBM_GUI_ACTIVE is in cycles." ;;
    esac
}

parse_arguments "$@"
case $mode in
hotspots | kernels | trace | counters) ;;
*) fail 2 "--mode must be hotspots, kernels, trace or counters" ;;
esac
[[ -z $hsa || $mode == trace ]] || fail 2 "--hsa goes with --mode trace"
read -ra counter_names <<<"$counters"
((${#counter_names[@]})) || fail 2 "--counters names no counter"

from_db=${from_db/#-/./-}
if [[ $from_db ]]; then
    folder=$(results_of "$(side)")
    if [[ $dry_run ]]; then
        show "$python" "$root/fusion_lab/rocm/files.py" statistics "$from_db" "$folder/stats.csv"
        exit
    fi
    [[ -f $from_db ]] || fail 2 "--from-db $from_db: no such file"
    own "$folder"
    read_files statistics "$from_db" "$folder/stats.csv"
    show_statistics "$(side)"
    exit
fi

name_default
find_tool rocprofiler-sdk rocprofv3
if [[ $mode == counters ]] && ! knows --pmc; then fail 4 "this rocprofv3 does not know --pmc: --mode counters needs it"; fi
profile "$(side)"
