# shellcheck shell=bash
# What the five get_*.sh share; they source it before they look at their arguments.
set -euo pipefail
here=$(dirname -- "${BASH_SOURCE[0]}")

dry_run=()
case ${1-} in
--help | -h)
    echo "Usage: $0 [--dry-run] [arguments of tiny_llama_v4.py]"
    echo "Results land in a new folder beside this script. With --dry-run the command is printed, and nothing runs."
    exit
    ;;
--dry-run)
    dry_run=(--dry-run)
    shift # takes it off the script's own arguments
    ;;
esac

profile() { # FOLDER WRAPPER [OPTION...] -- [ARGUMENT...]: tiny_llama_v4.py under a profiler, into FOLDER_<timestamp>
    exec "$here/../../$2" --script "$here/../../tiny_llama_v4.py" ${dry_run[@]+"${dry_run[@]}"} \
        --result-dir "$here/$1_$(date +%Y%m%d_%H%M%S)" "${@:3}"
}
