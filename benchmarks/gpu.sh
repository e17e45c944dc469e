#!/usr/bin/env bash
# The records that need a GPU, in parts of at most ten minutes, and what must hold before they count.
# bash benchmarks/gpu.sh PART [FOLDER]: step, lanes, resnet18, large, inference, roofline, autotune or tests
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.:tests PYTHONUNBUFFERED=1
part=${1:-} folder=${2:-benchmarks/results}
step() { python benchmarks/gpu_step.py --output "$folder/$1.json" "${@:2}"; }
check="python -m pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib -q" # needs pytest alone
both="lockstep; compile, graph"
case $part in
step) step gpu-step --batch 128,1024,8192 --variants "lockstep; plain loop; lightning; jax; compile; compile, graph" ;;
autotune) step gpu-step-autotune --batch 1024 --variants "lockstep; max-autotune, graph" --limit 400 ;;
lanes) step gpu-lanes --batch 4096 --lanes 1,8,64 --variants lockstep ;;
resnet18) step gpu-resnet18 --model resnet18 --batch 1024 --lanes 1,8 --variants "$both" ;;
large) step gpu-224 --model alexnet,googlenet,resnet50 --batch 256 --lanes 1,8 --variants "$both" --limit 100 ;;
inference) python benchmarks/gpu_inference.py --output "$folder/gpu-inference.json" ;;
roofline)
  python benchmarks/roofline.py --output "$folder/roofline-emotion48.json" &&
    python benchmarks/roofline.py --model resnet18 --output "$folder/roofline-resnet18.json"
  ;;
tests)
  for file in tests/train/test_{gpu,fused,resident,compiled}.py tests/kernels/test_{device,box,residual,update}.py; do
    $check "$file" >"/tmp/${file##*/}.log" 2>&1 || echo "$file failed: see /tmp/${file##*/}.log" &
  done
  wait
  tail -qn 1 /tmp/test_*.py.log
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 \
    $check tests/kernels/test_box.py
  ;;
*)
  sed -n '2,3s/^# //p' "$0" >&2
  exit 2
  ;;
esac
