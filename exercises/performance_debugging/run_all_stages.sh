#!/usr/bin/env bash
# Train and profile V1, all stages and the final version, and compare them.
# shellcheck source=fusion_lab/rocm/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../../fusion_lab/rocm/common.sh" || exit 4
here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
results=$here/results
given=()
gpu_sizes="--batch-size 8 --seq-len 128 --num-steps 20"
cpu_sizes="--hidden-dim 32 --num-layers 1 --num-heads 2 --intermediate-dim 16 --vocab-size 100 --seq-len 8 --batch-size 2 \
--num-steps 2 --warmup-steps 1"

# name of its results, script
stages=(
    baseline "$root/tiny_llama_v1.py"
    stage1 "$here/v3_stage1_broken_loss.py"
    stage2 "$here/v3_stage2_slow_performance.py"
    stage3 "$here/v3_stage3_fake_timing.py"
    stage4 "$here/v3_stage4_slow_kernels.py"
    stage5 "$root/tiny_llama_v3.py"
    stage6 "$here/v3_stage6_too_fast.py"
)

usage() {
    cat <<USAGE
Usage: $program [--result-dir DIR] [arguments of tiny_llama_v1.py and tiny_llama_v3.py]

Trains V1, stages 1 to 4, the final version (stage 5) and stage 6 one after the other with
  $gpu_sizes
(on a CPU, where the kernels run in Triton's interpreter, in a minute or two with
  $cpu_sizes)
and what is given beyond that; the last of two equal arguments counts. Each is profiled, by rocprofv3 where it is
installed, else by the PyTorch profiler, and its gradients are checked. A stage that fails is named at the end, and the
status is 1; the others still run.

  --result-dir DIR   where the results go (default: results/ beside this script); until the last stage has run they are
                     in DIR/running, and earlier ones stay
  --help             this text
PYTHON names another interpreter than python3.

In the result folder:
  <stage>_output.log    what the stage printed, and one step of it looked at from inside
  <stage>_profile.csv   its kernels (on a CPU: operators); sort -t',' -k4 -nr shows the slowest
  comparison.md         loss, speed, memory and gradients of all in one table
  <stage>/              the files of the script and of the profiler; <stage>_rocprofv3.log has what rocprofv3 printed
USAGE
}

while (($#)); do
    case $1 in
    --help | -h)
        usage
        exit
        ;;
    --result-dir)
        (($# > 1)) || fail 2 "$1 needs a value"
        results=${2%/}
        [[ -n $results ]] || fail 2 "--result-dir needs a directory"
        results=${results/#-/./-}
        shift 2
        ;;
    --result-dir=*)
        set -- --result-dir "${1#*=}" "${@:2}"
        ;;
    *)
        given+=("$1")
        shift
        ;;
    esac
done
new=$results/running # earlier results are replaced at the end

check_arguments() { # before anything is done: do V1 and V3 know them? Prints the sizes for this device
    "$python" - "$root" "$gpu_sizes" "$cpu_sizes" ${given[@]+"${given[@]}"} <<'END'
import sys
root, gpu, cpu, *given = sys.argv[1:]
sys.path.insert(0, root)
from fusion_lab.cli import run_tool
from fusion_lab.script import load_script, script_arguments

def check():
    scripts = [load_script(f"{root}/tiny_llama_v{version}.py") for version in (1, 3)]
    device = script_arguments(scripts[0], given, None)[1].device
    sizes = cpu if device == "cpu" else gpu
    for script in scripts:
        script_arguments(script, [*sizes.split(), *given], None)
    print(sizes)
    return 0

sys.exit(run_tool("arguments", check))
END
}

run_stage() { # NAME SCRIPT: train, check, profile; sets `log` to what has the output of the last of it
    local folder=$new/$1 profiler=(--enable-pytorch-profiler)
    if command -v rocprofv3 >/dev/null; then profiler=(); fi
    log=$new/$1_output.log
    "$python" "$here/check_step.py" --train "$2" "${arguments[@]}" ${profiler[@]+"${profiler[@]}"} \
        --profile-dir "$folder" </dev/null >"$log" 2>&1 || return
    if ((${#profiler[@]} == 0)); then
        log=$new/$1_rocprofv3.log
        "$root/run_rocprofv3.sh" --script "$2" --result-dir "$folder/rocprofv3" -- "${arguments[@]}" </dev/null >"$log" 2>&1
    fi
}

alive() { # NAME: a line every 8 s, until it is killed or this program has ended
    [[ -z ${lock-} ]] || exec {lock}<&-
    exec {never}<> <(:) # read waits, and unlike sleep leaves no process behind
    while ! read -rt 8 -u "$never" && kill -0 $$ 2>/dev/null; do echo "$1: still running" >&2; done
}

command -v -- "$python" >/dev/null || fail 4 "there is no program $python: PYTHON names the interpreter"
message=$(check_arguments 2>&1) || fail $? "${message##*$'\n'}"
read -ra arguments <<<"${message##*$'\n'}"
if [[ ${arguments[*]} == "$cpu_sizes" ]]; then
    echo "No GPU is used, so the kernels run in Triton's interpreter, with sizes for that: $cpu_sizes"
    [[ -z ${given[*]-} ]] || echo "Your own arguments come after them, and win: ${given[*]}"
fi
arguments+=(${given[@]+"${given[@]}"})
own "$results"
rm -rf "$new" # what an interrupted run has left
mkdir "$new"
end_at_signals "what was written is in $new"
failed=()
for ((i = 0; i < ${#stages[@]}; i += 2)); do
    name=${stages[i]} script=${stages[i + 1]} status=0
    echo "$name: $(basename "$script"), its output goes to ${results#"$PWD"/}/${name}_output.log"
    alive "$name" &
    ticker=$!
    disown "$ticker"
    run_stage "$name" "$script" || status=$?
    kill "$ticker" 2>/dev/null || true
    if ((status)); then
        failed+=("$name")
        echo "$name: status $status: $(tail -n 1 "$log")" >&2
    fi
done
echo
"$python" "$here/compare_stages.py" "$new" | tee "$new/comparison.md" || ((${#failed[@]})) || failed+=(comparison)
for ((i = 0; i < ${#stages[@]}; i += 2)); do
    rm -rf "${results:?}/${stages[i]}" "$results/${stages[i]}"_{output.log,rocprofv3.log,profile.csv}
done
mv -f "$new"/* "$results"
rmdir "$new"
((${#failed[@]} == 0)) || fail 1 "failed: ${failed[*]}"
