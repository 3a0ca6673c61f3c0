#!/usr/bin/env bash
# Two prefill engines on one node, two decode engines with sparse KV offload on another (2P2D), and the proxy.
# Edit the values here once, copy the file to both nodes, and run it with a role on each:
#
#   node A:  examples/pd_two_nodes.sh prefill
#   node B:  examples/pd_two_nodes.sh decode
#   either:  examples/pd_two_nodes.sh proxy       # requests go to http://PROXY_HOST:PROXY_PORT
#
# Ctrl-C, or the end of one engine, ends that role; the order of starting doesn't matter. With STORE=local or memcache,
# prefill's layers share a few device buffers and its KV goes to a store, too. PLATFORM=cpu runs on any Linux
# machines, or with both roles on one and 127.0.0.1 for all three hosts. PLATFORM=ascend shows the same deployment on NPUs
# and has not been run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PLATFORM=${PLATFORM:-cpu}                     # cpu or ascend
MODEL=${MODEL:-}                              # a GLM-DSA or DeepSeek-V3.2 checkpoint: the same on both nodes
PREFILL_HOST=${PREFILL_HOST:-192.0.2.1}       # node A. Addresses that the other node reaches, never 0.0.0.0
DECODE_HOST=${DECODE_HOST:-192.0.2.2}         # node B
PROXY_HOST=${PROXY_HOST:-$DECODE_HOST}        # the node on which you start the proxy
PROXY_PORT=${PROXY_PORT:-9000}
PREFILL_PORTS=(${PREFILL_PORTS:-8100 8101})   # one engine for each
DECODE_PORTS=(${DECODE_PORTS:-8200 8201})
KV_PORT=${KV_PORT:-20050}                     # decode engine i listens at KV_PORT + i * DECODE_TP, one port for each rank
if [[ $PLATFORM == cpu ]]; then               # the example model's sizes, and those of a real one
  DEFAULTS=(8192 4 512 1 1)
else
  DEFAULTS=(65536 32 4096 128 8)
fi
MAX_MODEL_LEN=${MAX_MODEL_LEN:-${DEFAULTS[0]}}
MAX_NUM_SEQS=${MAX_NUM_SEQS:-${DEFAULTS[1]}}          # decode has a partition of the hot pools for each
TOPK_BUFFER_SIZE=${TOPK_BUFFER_SIZE:-${DEFAULTS[2]}}  # decode's hot rows per request and layer: at least index_topk
DRAM_GB=${DRAM_GB:-${DEFAULTS[3]}}                    # host memory for the main KV of each decode engine
PREFILL_TP=${PREFILL_TP:-${DEFAULTS[4]}}              # a multiple of DECODE_TP
DECODE_TP=${DECODE_TP:-${DEFAULTS[4]}}
STORE=${STORE:-none}                          # behind prefill: none; local, each engine's own; memcache, their common pool (NPUs only)
SHARED_BUFFERS=${SHARED_BUFFERS:-3}           # with a store: device buffers that prefill's layers but the first share
STORE_GB=${STORE_GB:-4}                       # with a store: host memory of each prefill engine; with memcache of each rank
META_PORT=${META_PORT:-5000}                  # with memcache: of the MetaService; its config store is at 1000 more
PROTOCOL=${PROTOCOL:-device_sdma}             # with memcache: device_sdma on A3 with HCCS, device_rdma on A2

case $STORE in
  none | local | memcache) ;;
  *) echo "STORE is none, local or memcache, not $STORE" >&2; exit 2 ;;
esac

ROLE=${1:-}
case $ROLE in
  prefill) NODE=$PREFILL_HOST ;;
  decode) NODE=$DECODE_HOST ;;
  proxy) NODE=$PROXY_HOST ;;
  *) echo "usage: $0 prefill | decode | proxy" >&2; exit 2 ;;
esac

if [[ $PLATFORM == cpu ]]; then
  make setup
  export PATH=$PWD/.venv/bin:$PATH
  # vLLM leaves a core of a small machine idle by default, and threads that spin starve the others.
  export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
  BACKEND=nixl
  DECODE_OPTIONS=() RECOMPUTE=
  PLATFORM_OPTIONS=(--enforce-eager --kv-cache-memory-bytes "${KV_BYTES:-$((64 << 20))}")
  if [[ -z $MODEL && $ROLE != proxy ]]; then
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
fi

PREFILL_KV="{
  \"kv_connector\": \"SfaRemoteD2HConnector\", \"kv_role\": \"kv_producer\", \"kv_port\": $KV_PORT,
  \"kv_connector_extra_config\": {\"transfer_backend\": \"$BACKEND\", \"decode_hosts\": [\"$DECODE_HOST\"]}
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

export VLLM_HOST_IP=$NODE                     # the address that this node's engines give the others
COMMON=(--host "$NODE" --max-model-len "$MAX_MODEL_LEN" --max-num-seqs "$MAX_NUM_SEQS" "${PLATFORM_OPTIONS[@]}")
trap 'trap "" INT TERM; kill 0; wait' EXIT      # TERM for all that was started here

devices() {  # NPUs of engine $1, if each has $2: "8,9,10,11" for 2 and 4
  [[ $PLATFORM == cpu ]] || seq -s, $(($1 * $2)) $((($1 + 1) * $2 - 1))
}

start_store() {  # MemCache's service; engines that share it must hash blocks alike, hence the seed
  kvoffload conf --force --out .demo/memcache --meta-host "$NODE" --meta-port "$META_PORT" \
    --config-store-port $((META_PORT + 1000)) --services-per-node $((${#PREFILL_PORTS[@]} * PREFILL_TP)) \
    --protocol "$PROTOCOL" --dram-size "${STORE_GB}GB"
  export MMC_META_CONFIG_PATH=$PWD/.demo/memcache/mmc-meta.conf PYTHONHASHSEED=0
  export MMC_LOCAL_CONFIG_PATH=$PWD/.demo/memcache/mmc-local.conf
  kvoffload meta &
  until (: < "/dev/tcp/$NODE/$META_PORT") 2> /dev/null; do kill -0 $!; sleep 0.2; done
}

serve_prefill() {
  export ASCEND_RT_VISIBLE_DEVICES=$(devices "$1" "$PREFILL_TP")
  exec vllm serve "$MODEL" "${COMMON[@]}" "${PREFILL_OPTIONS[@]}" \
    --port "${PREFILL_PORTS[$1]}" --tensor-parallel-size "$PREFILL_TP" --kv-transfer-config "$PREFILL_KV"
}

serve_decode() {
  export ASCEND_RT_VISIBLE_DEVICES=$(devices "$1" "$DECODE_TP")
  exec vllm serve "$MODEL" "${COMMON[@]}" "${DECODE_OPTIONS[@]}" \
    --port "${DECODE_PORTS[$1]}" --tensor-parallel-size "$DECODE_TP" \
    --additional-config "{
      \"sparse_kv_offload_config\": {
        \"enabled\": true, \"topk_buffer_size\": $TOPK_BUFFER_SIZE, \"dram_size_per_dp_GB\": $DRAM_GB
      }$RECOMPUTE
    }" \
    --kv-transfer-config "{
      \"kv_connector\": \"SfaRemoteD2HConnector\", \"kv_role\": \"kv_consumer\", \"kv_port\": $((KV_PORT + $1 * DECODE_TP)),
      \"kv_connector_extra_config\": {
        \"transfer_backend\": \"$BACKEND\", \"use_layerwise\": true, \"metaserver_hosts\": [\"$PROXY_HOST\"]
      }
    }"
}

repeated() {  # $1, as often as there are further arguments
  local host=$1; shift
  printf "$host\n%.0s" "$@"
}

case $ROLE in
  prefill)
    [[ $STORE != memcache ]] || start_store
    for i in "${!PREFILL_PORTS[@]}"; do serve_prefill "$i" & done
    ;;
  decode) for i in "${!DECODE_PORTS[@]}"; do serve_decode "$i" & done ;;
  proxy)  # answers at once, and says 503 until engines of both roles are up
    kvoffload proxy --host "$PROXY_HOST" --port "$PROXY_PORT" \
      --prefiller-hosts $(repeated "$PREFILL_HOST" "${PREFILL_PORTS[@]}") --prefiller-ports "${PREFILL_PORTS[@]}" \
      --decoder-hosts $(repeated "$DECODE_HOST" "${DECODE_PORTS[@]}") --decoder-ports "${DECODE_PORTS[@]}" &
    ;;
esac
wait -n
