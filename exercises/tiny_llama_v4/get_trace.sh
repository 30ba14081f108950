#!/usr/bin/env bash
# Timeline of HIP and HSA calls, kernels and memory copies for https://ui.perfetto.dev, by rocprofv3.
# shellcheck source=exercises/tiny_llama_v4/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh" || exit 4
profile traces/trace run_rocprofv3.sh --mode trace --hsa -- "$@"
