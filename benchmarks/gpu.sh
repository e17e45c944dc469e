#!/usr/bin/env bash
# The records that need a GPU, in parts of at most ten minutes each, and the tests that only a GPU can run.
# bash benchmarks/gpu.sh PART [FOLDER]; PART: step, autotune, lanes, resnet18, start, googlenet, resnet50, alexnet,
# timm-compile, then timm, or timm-NAME, tf32-NAME, kernels-NAME (of timm's models), inference, roofline,
# matrix-fused, matrix-compiled, matrix-googlenet, matrix-fp16, recompute, tree-reduce, lightning, checkpoints, lab, lab-skinny, tests, memory, lab-memory
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/tests" PYTHONUNBUFFERED=1
part=${1:-} folder=${2:-benchmarks/results} python=${PYTHON:-python3}
both="lockstep; compile, graph"
timm="mobilenetv3_small_100 convnext_atto efficientnet_b0 regnety_004"
check="$python -m pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib -q" # needs pytest alone

step() { $python benchmarks/gpu_step.py --output "$folder/$1.json" "${@:2}"; }
infer() { $python benchmarks/gpu_inference.py --model "$1" --output "$folder/gpu-inference-$1.json" "${@:2}"; }
matrix() { # workers share the GPU; bf16
  $python benchmarks/matrix.py --device cuda --precision bf16 --output "$folder/matrix-h200-$1.json" "${@:2}"
}
roof() { $python benchmarks/roofline.py --model "$1" --output "$folder/roofline-$1.json"; }
apart() { # a name, then pytest's arguments; beside the others, into one log
  { $check -p told_at_once --tb=short --show-capture=no --no-summary "${@:2}" 2>&1 || echo FAILED; } |
    sed -u "s/^/$1: /" | tee -a "$log" &
}

case $part in
step)
  step gpu-step --batch 128,1024,8192 --variants \
    "lockstep; plain loop; resident; lightning; jax; compile; compile, graph"
  ;;
autotune) step gpu-step-autotune --batch 8192,1024,128 --variants "lockstep; max-autotune, graph" --limit 150 ;;
lanes) step gpu-lanes --batch 4096 --lanes 1,8,64 --variants lockstep ;;
resnet18) step gpu-resnet18 --model resnet18 --batch 1024 --lanes 1,8 --variants "$both" ;;
start) # the same twice: elapsed_s says what compiling takes
  TRITON_CACHE_DIR=$(mktemp -d)
  export TRITON_CACHE_DIR
  for caches in cold warm; do
    step "gpu-start-$caches" --model resnet18 --batch 1024 --lanes 8 --variants lockstep
  done
  ;;
googlenet | resnet50 | alexnet) # at 224x224; most of it is compiling
  step "gpu-224-$part" --model "$part" --batch 256 --lanes 8,1 --variants "$both" --limit 180
  ;;
timm-compile) # all four at once, into the caches, for the next part; no record
  scratch=$(mktemp -d)
  for name in $timm; do
    $python benchmarks/gpu_step.py --model "timm:$name" --batch 256 --lanes 8,1 --variants "$both" --rounds 1 \
      --limit 500 --output "$scratch/$name.json" 2>&1 | sed -u "s/^/$name: /" &
  done
  wait
  ;;
timm) # one after another
  for name in $timm; do
    step "gpu-224-$name" --model "timm:$name" --batch 256 --lanes 8,1 --variants "$both" --limit 120
  done
  ;;
timm-*) # timm-efficientnet_b0, timm-convnext_atto, timm-mobilenetv3_small_100, timm-regnety_004
  name=${part#timm-}
  step "gpu-224-$name" --model "timm:$name" --batch 256 --lanes 8,1 --variants "$both" --limit 190
  ;;
tf32-*) # the same in tf32
  name=${part#tf32-}
  step "gpu-224-tf32-$name" --model "timm:$name" --batch 256 --lanes 8,1 --variants "$both" --limit 190 --precision tf32
  ;;
kernels-*) # which kernels the step spends its time in
  name=${part#kernels-}
  $python benchmarks/step_kernels.py --model "timm:$name" --lanes 1,8 --output "$folder/step-kernels-$name.json"
  ;;
inference) infer emotion48 && infer resnet18 --modes reduce-overhead ;;
roofline) roof emotion48 && roof resnet18 ;;
matrix-fused) matrix fused --kernels fused --workers 1 2 3 4 --launchers lockstep torchrun --jobs 5 ;;
matrix-compiled)
  matrix compiled --kernels compiled --models alexnet --workers 1 2 3 4 --launchers lockstep torchrun --jobs 5
  ;;
matrix-googlenet) # two minutes to compile it, in each worker
  matrix googlenet --kernels compiled --models googlenet --workers 1 3 --launchers lockstep --jobs 4
  ;;
matrix-fp16) # with steps that overflow
  for kernels in fused compiled; do
    $python benchmarks/matrix.py --device cuda --precision fp16 --output "$folder/matrix-h200-fp16-$kernels.json" \
      --kernels $kernels --models "$([ $kernels = fused ] && echo resnet18 || echo alexnet)" --workers 1 2 3 \
      --launchers lockstep --jobs 4
  done
  ;;
recompute) # resnet50 at 224x224
  $python benchmarks/recompute.py --batch 128 --lanes 1 --output "$folder/recompute-gpu.json"
  ;;
tree-reduce) $python benchmarks/tree_reduce.py --gpu --rounds 21 --output "$folder/tree-reduce-gpu.json" ;;
lab)
  lab() { # a name, the seconds it may take, what comes after `lockstep bench`
    echo "$1: $(date +%T)"
    timeout "$2" $python benchmarks/lab.py --folder "$folder" "$1" "${@:3}" || echo "$1 FAILED"
  }
  lab threads-gpu 90 threads --picture "$folder/lab-threads-gpu.png"
  lab baselines-bf16-gpu 170 baselines --precision bf16 --images 16384 --batch 1024 --epochs 8 \
    --only cuda,torch,compiled,jax,lightning,lockstep --picture "$folder/lab-baselines-bf16-gpu.png"
  lab conv-fp32-gpu 110 conv
  lab conv-bf16-gpu 110 conv --precision bf16
  lab baselines-fp32-gpu 150 baselines --epochs 2
  lab conv-map-gpu 200 conv --map "$folder/lab-conv-map-gpu.png"
  ;;
lab-skinny) $python benchmarks/lab.py --folder "$folder" gemm-skinny-gpu gemm --skinny ;;
lightning) $python benchmarks/lightning_overhead.py --gpu --rounds 7 --output "$folder/lightning-gpu.json" ;;
checkpoints) # most of it is compiling
  $python benchmarks/checkpoint_cost.py --model resnet50 --size 224 --batch 256 --every 100 --rounds 4 --device cuda \
    --precision bf16 --output "$folder/checkpoint-cost-gpu.json"
  ;;
tests)
  log=${2:-$(mktemp -d)}/gpu-tests.log # no record
  echo "$log"
  : >"$log" || exit 2
  gpu=tests/train/test_gpu.py other="not whole_steps and not compiled_steps"
  for model in emotion48 resnet18 sync_norm; do apart "whole-$model" $gpu -k "whole_steps and $model"; done
  for model in resnet18 alexnet googlenet resnet50; do apart "compiled-$model" $gpu -k "compiled_steps and $model"; done
  for model in efficientnet convnext mobilenet regnety; do apart "timm-$model" $gpu -k "timms_models and $model"; done
  apart workers $gpu -k "workers_that_share or killed or nccl"
  apart rest $gpu -k "$other and not workers_that_share and not killed and not nccl"
  apart kernels tests/kernels/test_{fused_kernels,tma,norm_kernels,optimizer_update,stock_conv,compiler_watch}.py
  fused=tests/lower/test_fused.py tiny="residual or norms or boxes or statistics or sums"
  for model in vgg11 resnet18; do apart "fused-$model" $fused -k "whole_model and $model"; done
  apart fused-small $fused -k "whole_model and not vgg11 and not resnet18"
  apart fused-tiny $fused -k "not whole_model and ($tiny)"
  apart fused-rest $fused -k "not whole_model and not ($tiny)"
  apart compiled tests/lower/test_{compiled,lane_graph}.py
  apart evaluate tests/train/test_evaluate.py
  wait
  ! grep -q ": FAILED$" "$log"
  ;;
memory)
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 \
    $check tests/kernels/test_{fused_kernels,tma,norm_kernels}.py
  ;;
lab-memory)
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  for tool in memcheck racecheck; do
    compute-sanitizer --tool $tool --error-exitcode 9 $check tests/lab -k "on_a_gpu or threads_of_a_gpu or in_cuda"
  done
  ;;
*)
  sed -n '2,5s/^# //p' "$0" >&2
  exit 2
  ;;
esac
