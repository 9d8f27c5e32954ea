#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in one go: build, test, sanitize, benchmark, smoke.
#
#     benchmarks/gpu.sh [FOLDER]     writes logs and numbers to FOLDER (default: a new one)
#
# Needs a Python with torch (CUDA), NumPy, pytest and hypothesis, and a C compiler. PYTHON chooses
# the interpreter, ARL_LIBYAML_DIR where libyaml is; REPEATS the timed runs; PARTS which parts
# (default: all of "test sanitize bench smoke"). What needs more GPUs than there are is left out, by
# name.
# Each part has a limit of time. The exit status is the number of parts that failed.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$(mktemp -d)}
python=${PYTHON:-python3}
repeats=${REPEATS:-30}
parts=${PARTS:-test sanitize bench smoke}
site=$(mktemp -d)
failed=0
mkdir -p "$out"
trap 'rm -rf "$site"' EXIT

run() { # run NAME SECONDS COMMAND...: one part, with its log and its time
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    printf '\n==== %s\n' "$name"
    if timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.txt"; then
        printf '==== %s: done, %d s\n' "$name" $((SECONDS - begin))
    else
        printf '==== %s: FAILED, %d s\n' "$name" $((SECONDS - begin))
        failed=$((failed + 1))
    fi
}

wanted() { [[ " $parts " == *" $1 "* ]]; }

(cd "$root" && "$python" -m pip install -q --no-build-isolation --no-deps --target "$site" .) || exit 99
export PYTHONPATH=$site PYTHONUNBUFFERED=1
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -c 'import arctic_rl_c; print(arctic_rl_c.__file__)'

# The tests run outside of the source tree's root, so that the installed package is the tested one.
cd "$root/tests" || exit 99
pytest=("$python" -m pytest -q -c ../pyproject.toml --rootdir=.. -p no:cacheprovider -m gpu
    --timeout=120)

# By file: the others import what a machine with a GPU may lack (Hydra, tensordict, Ray).
if wanted test; then
    for file in test_gpu_*.py; do
        name=${file%.py}
        run "${name//_/-}" 240 "${pytest[@]}" --durations=5 "$file"
    done
fi

if wanted sanitize; then
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            run "$tool" 240 compute-sanitizer --tool "$tool" --error-exitcode 9 \
                "$python" ../benchmarks/gpu_copy_probe.py --quick --no-facts --no-timing
        done
    else
        echo "sanitize: compute-sanitizer is absent, not done"
    fi
fi

if wanted bench; then
    cd "$root/benchmarks" || exit 99
    run bench-copy 120 "$python" gpu_copy_probe.py --rounds "$repeats"
    run bench-cuda-ipc 120 "$python" bench_cuda_ipc.py --repeats "$repeats" --json "$out/cuda_ipc.json"
    run bench-ring 120 "$python" bench_ring.py --repeats "$repeats" --json "$out/ring.json"
    if [ "$gpus" -ge 2 ]; then
        run bench-nccl 180 "$python" bench_nccl.py --repeats "$repeats" --json "$out/nccl.json"
    else
        echo "bench-nccl: one GPU, not done"
    fi
    if [ "$gpus" -ge 3 ]; then
        for model in qwen3-0.6b qwen3-8b; do
            run "bench-nccl-many-$model" 240 "$python" bench_nccl_many.py --model "$model" \
                --repeats "$repeats" --json "$out/nccl_many_$model.json"
        done
    else
        echo "bench-nccl-many: fewer than three GPUs, not done"
    fi
fi

if wanted smoke; then
    cd "$out" || exit 99
    smoke=("$python" -m arctic_rl_c smoke --device cuda --shape qwen3-0.6b --prompts 16 --samples 8)
    run smoke-cuda-ipc 150 "${smoke[@]}" --transport cuda_ipc --json "$out/smoke_cuda_ipc.json"
    run smoke-ring 150 "${smoke[@]}" --transport ring --json "$out/smoke_ring.json"
    if [ "$gpus" -ge 2 ]; then
        run smoke-nccl 150 "${smoke[@]}" --transport nccl --json "$out/smoke_nccl.json"
    else
        echo "smoke-nccl: one GPU, not done"
    fi
fi

printf '\n%d parts failed; results in %s\n' "$failed" "$out"
exit "$failed"
