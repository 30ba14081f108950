#!/usr/bin/env bash
# rocprof-sys around a version script: host and device on one timeline.
# shellcheck source=fusion_lab/rocm/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/fusion_lab/rocm/common.sh" || exit 4

flags="--sample"
sample=

usage() {
    cat <<END
Usage: $program [options] [script arguments]

Runs rocprof-sys-run around a version script: a timeline of host and device for https://ui.perfetto.dev and a call-stack
profile as text. Results land in rocprof_sys_results/, in baseline/ with all fusions off (V1, or --disable-all-fusion),
in fused/ with all on, in partial/ with some of them. Steps have the ranges data, forward, backward and optimizer; the
first ones in the trace are warm-up.

  --sample            also sample the call stacks of the host
$common_options

Example:
  ./$program --batch-size 4 --seq-len 64 --num-steps 5 --enable-all-fusion
END
}

parse_arguments "$@"
name_default
find_tool rocprofiler-systems rocprof-sys-run
folder=${result_dir:-$output_dir/rocprof_sys_results/$(side)}
command=("$tool" --trace --profile)
if [[ $sample ]]; then command+=(--sample cputime); fi
application "$folder"
command+=(-o "$folder" -- "${app[@]}")
if [[ $dry_run ]]; then
    show "${command[@]}"
    exit
fi
open_results "$folder"
run_tool "${command[@]}"
read_files require "$results" '*perfetto-trace*.proto'
keep_results
echo "Open with https://ui.perfetto.dev (Open trace file); it stays in the browser."
