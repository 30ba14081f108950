#!/usr/bin/env bash
# Kernels sorted by the time that they take, by rocprofv3.
# shellcheck source=exercises/tiny_llama_v4/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh" || exit 4
profile hotspots/hotspot run_rocprofv3.sh --mode hotspots -- "$@"
