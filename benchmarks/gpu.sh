#!/usr/bin/env bash
# The records that need a GPU, in parts of at most ten minutes each, and the tests that only a GPU can run.
# bash benchmarks/gpu.sh PART [FOLDER]; PART: step, autotune, lanes, resnet18, large, inference, roofline, tests, memory
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/tests" PYTHONUNBUFFERED=1
part=${1:-} folder=${2:-benchmarks/results} python=${PYTHON:-python3}
both="lockstep; compile, graph"
check="$python -m pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib -q" # needs pytest alone

step() { $python benchmarks/gpu_step.py --output "$folder/$1.json" "${@:2}"; }
infer() { $python benchmarks/gpu_inference.py --model "$1" --output "$folder/gpu-inference-$1.json" "${@:2}"; }
roof() { $python benchmarks/roofline.py --model "$1" --output "$folder/roofline-$1.json"; }
apart() { # a log's name, then pytest's arguments; beside the others
  { $check "${@:2}" >"$folder/$1.log" 2>&1 || touch "$folder/failed.log"; tail -n 1 "$folder/$1.log"; } &
}

case $part in
step)
  step gpu-step --batch 128,1024,8192 --variants \
    "lockstep; plain loop; resident; lightning; jax; compile; compile, graph"
  ;;
autotune) step gpu-step-autotune --batch 1024,128,8192 --variants "lockstep; max-autotune, graph" --limit 180 ;;
lanes) step gpu-lanes --batch 4096 --lanes 1,8,64 --variants lockstep ;;
resnet18) step gpu-resnet18 --model resnet18 --batch 1024 --lanes 1,8 --variants "$both" ;;
large) step gpu-224 --model alexnet,googlenet,resnet50 --batch 256 --lanes 1,8 --variants "$both" --limit 100 ;;
inference) infer emotion48 && infer resnet18 --modes reduce-overhead ;;
roofline) roof emotion48 && roof resnet18 ;;
tests)
  folder=${2:-$(mktemp -d)} # for logs, which are no records
  rm -f "$folder/failed.log"
  apart whole-emotion48 tests/train/test_gpu.py -k "whole_steps and emotion48"
  apart whole-resnet18 tests/train/test_gpu.py -k "whole_steps and resnet18 and not compiled"
  apart whole-compiled tests/train/test_gpu.py -k "whole_steps and compiled"
  apart workers tests/train/test_gpu.py -k "workers_that_share or killed or nccl"
  apart rest tests/train/test_gpu.py -k "not whole_steps and not workers_that_share and not killed and not nccl"
  apart kernels tests/kernels/test_{device,box,residual,update,stock_conv}.py
  apart train tests/train/test_{fused,compiled,evaluate}.py
  wait
  [ ! -e "$folder/failed.log" ]
  ;;
memory)
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 \
    $check tests/kernels/test_device.py tests/kernels/test_box.py tests/kernels/test_residual.py
  ;;
*)
  sed -n '2,3s/^# //p' "$0" >&2
  exit 2
  ;;
esac
