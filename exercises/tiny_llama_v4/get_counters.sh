#!/usr/bin/env bash
# Kernel trace by rocprofv3: how often each kernel ran and for how long.
# shellcheck source=exercises/tiny_llama_v4/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh" || exit 4
profile counters/counter run_rocprofv3.sh --mode kernels -- "$@"
