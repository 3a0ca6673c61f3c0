#!/usr/bin/env bash
# Two prefill engines on one node, two decode engines with sparse KV offload on another (2P2D), and the proxy.
# Edit the values here once, copy the file to both nodes, and run it with a role on each:
#
#   node A:  examples/pd_two_nodes.sh prefill
#   node B:  examples/pd_two_nodes.sh decode
#   either:  examples/pd_two_nodes.sh proxy       # requests go to http://PROXY_HOST:PROXY_PORT
#
# Ctrl-C, or the end of one engine, ends that role; the order of starting doesn't matter. PLATFORM=cpu runs on any Linux
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
MAX_MODEL_LEN=${MAX_MODEL_LEN:-8192}
MAX_NUM_SEQS=${MAX_NUM_SEQS:-4}
TOPK_BUFFER_SIZE=${TOPK_BUFFER_SIZE:-512}     # decode's hot rows per request and layer: at least index_topk (GLM-5.x: 4096)
DRAM_GB=${DRAM_GB:-1}                         # host memory for the main KV of each decode engine
PREFILL_TP=${PREFILL_TP:-1}                   # a multiple of DECODE_TP
DECODE_TP=${DECODE_TP:-1}

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
fi

export VLLM_HOST_IP=$NODE                     # what this node's engines tell the others
COMMON=(--host "$NODE" --max-model-len "$MAX_MODEL_LEN" --max-num-seqs "$MAX_NUM_SEQS" "${PLATFORM_OPTIONS[@]}")
trap 'trap "" INT TERM; kill 0; wait' EXIT      # TERM for all that was started here

devices() {  # NPUs of engine $1, if each has $2: "8,9,10,11" for 2 and 4
  [[ $PLATFORM == cpu ]] || seq -s, $(($1 * $2)) $((($1 + 1) * $2 - 1))
}

serve_prefill() {
  export ASCEND_RT_VISIBLE_DEVICES=$(devices "$1" "$PREFILL_TP")
  exec vllm serve "$MODEL" "${COMMON[@]}" \
    --port "${PREFILL_PORTS[$1]}" --tensor-parallel-size "$PREFILL_TP" \
    --kv-transfer-config "{
      \"kv_connector\": \"SfaRemoteD2HConnector\", \"kv_role\": \"kv_producer\", \"kv_port\": $KV_PORT,
      \"kv_connector_extra_config\": {\"transfer_backend\": \"$BACKEND\"}
    }"
}

serve_decode() {
  export ASCEND_RT_VISIBLE_DEVICES=$(devices "$1" "$DECODE_TP")
  exec vllm serve "$MODEL" "${COMMON[@]}" \
    --port "${DECODE_PORTS[$1]}" --tensor-parallel-size "$DECODE_TP" \
    --additional-config "{
      \"sparse_kv_offload_config\": {
        \"enabled\": true, \"topk_buffer_size\": $TOPK_BUFFER_SIZE, \"dram_size_per_dp_GB\": $DRAM_GB
      }
    }" \
    --kv-transfer-config "{
      \"kv_connector\": \"SfaRemoteD2HConnector\", \"kv_role\": \"kv_consumer\", \"kv_port\": $((KV_PORT + $1 * DECODE_TP)),
      \"kv_connector_extra_config\": {\"transfer_backend\": \"$BACKEND\", \"use_layerwise\": true}
    }"
}

repeated() {  # $1, as often as there are further arguments
  local host=$1; shift
  printf "$host\n%.0s" "$@"
}

case $ROLE in
  prefill) for i in "${!PREFILL_PORTS[@]}"; do serve_prefill "$i" & done ;;
  decode) for i in "${!DECODE_PORTS[@]}"; do serve_decode "$i" & done ;;
  proxy)  # answers at once, and says 503 until engines of both roles are up
    kvoffload proxy --host "$PROXY_HOST" --port "$PROXY_PORT" \
      --prefiller-hosts $(repeated "$PREFILL_HOST" "${PREFILL_PORTS[@]}") --prefiller-ports "${PREFILL_PORTS[@]}" \
      --decoder-hosts $(repeated "$DECODE_HOST" "${DECODE_PORTS[@]}") --decoder-ports "${DECODE_PORTS[@]}" &
    ;;
esac
wait -n
