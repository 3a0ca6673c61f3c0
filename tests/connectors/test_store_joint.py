"""Prefill with shared layer buffers, a store and remote decode at once: the same answers as without any.

Two prefill servers with a store of different kinds, one decode server for both. The reference is a plain
prefill server, which computes a request alone when its KV is not requested. Decode caches no prefixes,
so that it pulls all of a prompt, also what prefill has loaded from its store.
"""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests import hostsim, import_path
from tests.connectors.pd_servers import Engine, check_same, completion, fleet, metric, wait_free
from tests.hostsim.cluster import MetaCluster
from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint
from vllm_kvoffload.demo.server import transfer_options, with_store

pytest.importorskip("nixl_cu12")
pytestmark = pytest.mark.slow

MODEL = dataclasses.replace(MODELS["glm-tiny"], layer_pattern="FFSSFSS")
ROW_BYTES = 7 * 384 + 3 * 256
BLOCK = 64
LEASE_S = 30.0
"""Workers that share cores may not answer for seconds."""


@dataclasses.dataclass(frozen=True)
class Store:
    """Options of a prefill engine. tp_size: of prefill. plan: remaining caches of the layers' ten."""

    backend: str
    tp_size: int
    shared: int
    independent: list[int] | str
    plan: str


STORES = {
    "local": Store("local", 2, 1, [0], "4 descriptors using 2 buffer assignments."),
    "memcache": Store("memcache", 1, 3, [0], "6 descriptors using 4 buffer assignments."),
}

PULLED = "vllm:external_prefix_cache_hits_total"  # tokens: on decode pulled, on prefill out of the store
LOADED = "vllm:kvoffload_store_loaded_bytes_total"
STAND_INS = """
from tests import hostsim

hostsim.activate()
"""


def joint(kind: str) -> Engine:
    """Prefill's options. Its connectors are in the wrong order: the order of waiting must not depend on
    it."""
    store = STORES[kind]
    options = {
        "backend": store.backend,
        "layerwise_num_shared_buffers": store.shared,
        "layerwise_independent_layers": store.independent,
    }
    if store.backend == "local":
        options["local_dram_size_GB"] = 0.25
    transfer = with_store(transfer_options("kv_producer", 20050, lease_s=LEASE_S), options)
    transfer["kv_connector_extra_config"]["connectors"].reverse()
    return Engine(tp_size=store.tp_size, transfer=transfer)


def with_stand_ins(engine: Engine, cluster: MetaCluster) -> Engine:
    """The same engine in processes in which MemCache runs without an NPU."""
    (cluster.folder / "sitecustomize.py").write_text(STAND_INS)
    return dataclasses.replace(
        engine, environment={**cluster.environ, "PYTHONPATH": import_path(cluster.folder)}
    )


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joint")
    checkpoint = build_checkpoint(folder / "model", MODEL)
    prefill = {kind: joint(kind) for kind in STORES if possible(kind)}
    topologies = {kind: ((number,), (0,)) for number, kind in enumerate(prefill)}
    with ExitStack() as stack:
        for kind, engine in prefill.items():
            if STORES[kind].backend == "memcache":
                cluster = MetaCluster(tmp_path_factory.mktemp("memcache"), dram_size="64MB")
                prefill[kind] = with_stand_ins(engine, stack.enter_context(cluster))
        yield stack.enter_context(
            fleet(
                checkpoint,
                folder,
                prefill=[*prefill.values(), Engine()],
                decode=[Engine(arguments=("--no-enable-prefix-caching",))],
                topologies=topologies,
                lease_s=LEASE_S,
                arguments=("--enforce-eager",),
            )
        )


@pytest.fixture(params=STORES)
def kind(request):
    if not possible(request.param):
        pytest.skip(hostsim.missing())
    return request.param


def possible(kind: str) -> bool:
    return STORES[kind].backend != "memcache" or not hostsim.missing()


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 2000) for _ in range(length)]


def prefill_of(servers, kind: str):
    return servers.prefill[list(STORES).index(kind)]


def test_layers_share_memory(servers, kind):
    log = prefill_of(servers, kind).log.read_text()
    assert f"merged 10 descriptors into {STORES[kind].plan}" in log
    assert "used again when the store has them and decode has read them" in log


@pytest.mark.parametrize("length", [10, 65, 256, 1500])
def test_same_answers_cold_and_warm(servers, kind, length):
    """Below and above top-k, one chunk and several (of 256); then again, with a prefix out of the store."""
    prefill, decode = prefill_of(servers, kind), servers.decode[0]
    cold = prompt(length, seed=length)
    warm = [*cold, *prompt(30, seed=1)]
    for tokens, found in ((cold, 0), (warm, length // BLOCK * BLOCK)):
        names = ((prefill, PULLED), (decode, PULLED), (prefill, LOADED))
        before = [metric(server, name) for server, name in names]
        servers.check(completion(tokens), kind)
        hits, pulled, loaded = (metric(*one) - b for one, b in zip(names, before, strict=True))
        assert (hits, pulled) == (found, len(tokens))
        assert loaded >= found * ROW_BYTES


def test_several_at_once(servers, kind):
    lengths = (30, 300, 500, 90, 620, 257)
    bodies = [completion(prompt(length, seed=100 + length)) for length in lengths]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: servers.ask(body, kind), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        check_same(answer, servers.reference(body))
    for server in (prefill_of(servers, kind), servers.decode[0]):
        wait_free(server, 20)
