#!/usr/bin/env bash
# NVIDIA's Nsight Compute (ncu) around one step of a version script: what each kernel moves, and what limits it.
# shellcheck source=fusion_lab/rocm/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/fusion_lab/rocm/common.sh" || exit 4

flags="--warm-caches"
warm_caches=

usage() {
    cat <<END
Usage: $program [options] [script arguments]

Runs ncu around one training step of a version script, kernel by kernel, without a graph: bytes from and to device memory
and the L2 cache, time, and how busy the GPU is. Results land in ncu_results/, in baseline/ with all fusions off (V1, or
--disable-all-fusion), in fused/ with all on, in partial/ with some of them: ncu.csv has each launch, stats.csv each
kernel as rocprofv3 names its columns.

  --warm-caches       leave the caches as the kernels before left them; without it they are emptied before each kernel
$common_options

Example:
  ./$program --script tiny_llama_v4.py --use-amp --seq-len 128
END
}

parse_arguments "$@"
name_default
tool=ncu
if [[ ! $dry_run ]] && ! command -v ncu >/dev/null; then
    fail 4 "ncu not found: it comes with CUDA (Nsight Compute) and needs an NVIDIA GPU; results/h200/counters.json has a \
recording, and exercises/nvidia/README.md reads it"
fi
folder=${result_dir:-$output_dir/ncu_results/$(side)}
application "$folder" --num-steps 1 --warmup-steps 2 --disable-cuda-graph
caches=all
if [[ $warm_caches ]]; then caches=none; fi
mapfile -t command < <(ours "$root/fusion_lab/profile/ncu.py" command "$folder/ncu.csv" --caches "$caches")
command+=("${app[@]}")
if [[ $dry_run ]]; then
    show "${command[@]}"
    exit
fi
open_results "$folder"
show "${command[@]}"
"${command[@]}" </dev/null || fail $? "ncu ended with status $?; what it left is in $results.failed"
ours "$root/fusion_lab/profile/ncu.py" show "$results/ncu.csv" --stats "$results/stats.csv" || exit $?
keep_results
