#!/usr/bin/env bash
# One server, prefill and decode together, sparse KV offload on: the CPU reference platform.
# Edit the values here, or set them in the environment. Without a model, the demo's small random one is built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL=${MODEL:-}                              # a GLM-DSA or DeepSeek-V3.2 checkpoint
HOST=${HOST:-127.0.0.1}
PORT=${PORT:-8000}
MAX_MODEL_LEN=${MAX_MODEL_LEN:-8192}
MAX_NUM_SEQS=${MAX_NUM_SEQS:-4}               # also the number of rows in the hot pools
KV_BYTES=${KV_BYTES:-$((64 << 20))}           # "device" memory for KV
TOPK_BUFFER_SIZE=${TOPK_BUFFER_SIZE:-512}     # hot rows per request and layer: at least index_topk
DRAM_GB=${DRAM_GB:-1}                         # host memory for the main KV
TP=${TP:-1}

make setup
if [[ -z $MODEL ]]; then
  MODEL=$PWD/.demo/example-model
  .venv/bin/python - "$MODEL" <<'PYTHON'
import sys
from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint
build_checkpoint(sys.argv[1], MODELS["glm"])
PYTHON
fi

# vLLM leaves a core of a small machine idle by default, and threads that spin starve the copies beside them.
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

# --enforce-eager: torch.compile would take about a minute at the first start, and gains little on a small model.
exec .venv/bin/vllm serve "$MODEL" --enforce-eager \
  --host "$HOST" --port "$PORT" --tensor-parallel-size "$TP" \
  --max-model-len "$MAX_MODEL_LEN" --max-num-seqs "$MAX_NUM_SEQS" --kv-cache-memory-bytes "$KV_BYTES" \
  --additional-config "{
    \"sparse_kv_offload_config\": {
      \"enabled\": true,
      \"topk_buffer_size\": $TOPK_BUFFER_SIZE,
      \"dram_size_per_dp_GB\": $DRAM_GB
    }
  }"
