#!/usr/bin/env bash
# Hardware counters and metrics of single kernels, by rocprof-compute.
# shellcheck source=exercises/tiny_llama_v4/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh" || exit 4
profile rocprof_compute/profile run_rocprof_compute.sh -- "$@"
