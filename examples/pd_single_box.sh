#!/usr/bin/env bash
# Prefill engine, decode engine with sparse KV offload, and the proxy, on one machine. Ctrl-C, or the end of one of them,
# ends all. With STORE=local or memcache, prefill's layers share a few device buffers and its KV goes to a store, too.
# Edit the values here, or set them in the environment. PLATFORM=cpu runs on any Linux machine; PLATFORM=ascend shows the
# same deployment on NPUs and has not been run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PLATFORM=${PLATFORM:-cpu}                     # cpu or ascend
MODEL=${MODEL:-}                              # a GLM-DSA or DeepSeek-V3.2 checkpoint
HOST=${HOST:-127.0.0.1}                       # an address that all three can reach, never 0.0.0.0
PROXY_PORT=${PROXY_PORT:-9000}                # where requests go
PREFILL_PORT=${PREFILL_PORT:-8100}
DECODE_PORT=${DECODE_PORT:-8200}
KV_PORT=${KV_PORT:-20050}                     # decode listens here, one port for each of its DP x TP ranks
if [[ $PLATFORM == cpu ]]; then               # the example model's sizes, and those of a real one
  DEFAULTS=(8192 4 512 1 1)
else
  DEFAULTS=(65536 32 4096 128 8)
fi
MAX_MODEL_LEN=${MAX_MODEL_LEN:-${DEFAULTS[0]}}
MAX_NUM_SEQS=${MAX_NUM_SEQS:-${DEFAULTS[1]}}          # decode has a partition of the hot pools for each
TOPK_BUFFER_SIZE=${TOPK_BUFFER_SIZE:-${DEFAULTS[2]}}  # decode's hot rows per request and layer: at least index_topk
DRAM_GB=${DRAM_GB:-${DEFAULTS[3]}}                    # decode's host memory for the main KV
PREFILL_TP=${PREFILL_TP:-${DEFAULTS[4]}}              # a multiple of DECODE_TP
DECODE_TP=${DECODE_TP:-${DEFAULTS[4]}}
STORE=${STORE:-none}                          # behind prefill: none; local, its own memory; memcache, a pool of MemCache (NPUs only)
SHARED_BUFFERS=${SHARED_BUFFERS:-3}           # with a store: device buffers that prefill's layers but the first share
STORE_GB=${STORE_GB:-4}                       # with a store: its host memory; with memcache of each prefill rank
META_PORT=${META_PORT:-5000}                  # with memcache: of the MetaService; its config store is at 1000 more
PROTOCOL=${PROTOCOL:-device_sdma}             # with memcache: device_sdma on A3 with HCCS, device_rdma on A2

case $STORE in
  none | local | memcache) ;;
  *) echo "STORE is none, local or memcache, not $STORE" >&2; exit 2 ;;
esac

if [[ $PLATFORM == cpu ]]; then
  make setup
  export PATH=$PWD/.venv/bin:$PATH
  # vLLM leaves a core of a small machine idle by default, and threads that spin starve the others.
  export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
  BACKEND=nixl
  DECODE_OPTIONS=() RECOMPUTE=
  PLATFORM_OPTIONS=(--enforce-eager --kv-cache-memory-bytes "${KV_BYTES:-$((64 << 20))}")
  if [[ -z $MODEL ]]; then
    MODEL=$PWD/.demo/example-model
    python - "$MODEL" <<'PYTHON'
import sys
from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint
build_checkpoint(sys.argv[1], MODELS["glm"])
PYTHON
  fi
else
  : "${MODEL:?give a checkpoint}"
  BACKEND=memfabric
  PLATFORM_OPTIONS=()
  DECODE_OPTIONS=(--enforce-eager)            # graphs take our operators: docs/ascend.md
  [[ -z ${KVOFFLOAD_ASCEND_OPS:-} ]] || DECODE_OPTIONS=(--compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}')
  # A request that decode preempts goes back to the proxy, which sends it on: docs/proxy.md.
  RECOMPUTE=', "recompute_scheduler_enable": true'
  PREFILL_DEVICES=${PREFILL_DEVICES:-0,1,2,3,4,5,6,7}
  DECODE_DEVICES=${DECODE_DEVICES:-8,9,10,11,12,13,14,15}
fi

PREFILL_KV="{
  \"kv_connector\": \"SfaRemoteD2HConnector\", \"kv_role\": \"kv_producer\", \"kv_port\": $KV_PORT,
  \"kv_connector_extra_config\": {\"transfer_backend\": \"$BACKEND\"}
}"
PREFILL_OPTIONS=()
if [[ $STORE != none ]]; then                 # decode pulls out of layer buffers whose KV goes to a store as well
  STORE_SIZE=
  [[ $STORE != local ]] || STORE_SIZE=", \"local_dram_size_GB\": $STORE_GB"
  PREFILL_OPTIONS=(--enforce-eager)           # layers are loaded and saved between kernels
  PREFILL_KV="{
    \"kv_connector\": \"MultiConnector\", \"kv_role\": \"kv_producer\",
    \"kv_connector_extra_config\": {\"connectors\": [$PREFILL_KV, {
      \"kv_connector\": \"AscendStoreConnector\", \"kv_role\": \"kv_producer\",
      \"kv_connector_extra_config\": {
        \"backend\": \"$STORE\", \"use_layerwise\": true$STORE_SIZE,
        \"layerwise_num_shared_buffers\": $SHARED_BUFFERS, \"layerwise_independent_layers\": [0]
      }
    }]}
  }"
fi

trap 'trap "" INT TERM; kill 0; wait' EXIT      # TERM for all that was started here
export VLLM_HOST_IP=$HOST                     # the address that the engines give each other
COMMON=(--host "$HOST" --max-model-len "$MAX_MODEL_LEN" --max-num-seqs "$MAX_NUM_SEQS" "${PLATFORM_OPTIONS[@]}")

if [[ $STORE == memcache ]]; then             # engines that share it must hash blocks alike, hence the seed
  kvoffload conf --force --out .demo/memcache --meta-host "$HOST" --meta-port "$META_PORT" \
    --config-store-port $((META_PORT + 1000)) --services-per-node "$PREFILL_TP" \
    --protocol "$PROTOCOL" --dram-size "${STORE_GB}GB"
  export MMC_META_CONFIG_PATH=$PWD/.demo/memcache/mmc-meta.conf PYTHONHASHSEED=0
  export MMC_LOCAL_CONFIG_PATH=$PWD/.demo/memcache/mmc-local.conf
  kvoffload meta &
  until (: < "/dev/tcp/$HOST/$META_PORT") 2> /dev/null; do kill -0 $!; sleep 0.2; done
fi

ASCEND_RT_VISIBLE_DEVICES=${PREFILL_DEVICES:-} vllm serve "$MODEL" "${COMMON[@]}" "${PREFILL_OPTIONS[@]}" \
  --port "$PREFILL_PORT" --tensor-parallel-size "$PREFILL_TP" --kv-transfer-config "$PREFILL_KV" &

ASCEND_RT_VISIBLE_DEVICES=${DECODE_DEVICES:-} vllm serve "$MODEL" "${COMMON[@]}" "${DECODE_OPTIONS[@]}" \
  --port "$DECODE_PORT" --tensor-parallel-size "$DECODE_TP" \
  --additional-config "{
    \"sparse_kv_offload_config\": {
      \"enabled\": true, \"topk_buffer_size\": $TOPK_BUFFER_SIZE, \"dram_size_per_dp_GB\": $DRAM_GB
    }$RECOMPUTE
  }" \
  --kv-transfer-config "{
    \"kv_connector\": \"SfaRemoteD2HConnector\", \"kv_role\": \"kv_consumer\", \"kv_port\": $KV_PORT,
    \"kv_connector_extra_config\": {\"transfer_backend\": \"$BACKEND\", \"use_layerwise\": true}
  }" &

# The proxy answers at once, and its /health says 503 until both engines are up.
kvoffload proxy --host "$HOST" --port "$PROXY_PORT" \
  --prefiller-hosts "$HOST" --prefiller-ports "$PREFILL_PORT" --decoder-hosts "$HOST" --decoder-ports "$DECODE_PORT" &

wait -n
