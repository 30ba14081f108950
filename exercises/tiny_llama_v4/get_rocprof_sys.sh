#!/usr/bin/env bash
# Host and device on one timeline, with sampled call stacks, by rocprof-sys.
# shellcheck source=exercises/tiny_llama_v4/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh" || exit 4
profile rocprof_sys/profile run_rocprof_sys.sh --sample -- "$@"
