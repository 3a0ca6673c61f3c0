"""Prefill with layers that share memory, a store with faults and remote decode: the joint deployment."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.fault_client import Client
from tests.faults.fault_cluster import Cluster, Kind, metrics
from tests.faults.fault_scene import BEFORE, DEADLINE_S, Scene, after, together

POOL_GB = 0.03
"""Size of the local store: enough for running requests, which is checked at the start, and a few prefixes."""


PLANT = """
from tests.faults import faulty_store
faulty_store.plant({folder!r})
"""


class Fault:
    """A fault that can be begun and ended. times: how often it happens, None for as long as it lasts."""

    def __init__(self, folder: Path, number: int, name: str, times: int | None, options: Any) -> None:
        self._path = folder / name
        self._hits = folder / f"hits-{number}"
        self._text = json.dumps({"number": number, "times": times, **options})

    def begin(self) -> None:
        """It happens from now on."""
        draft = self._path.with_name(f".{self._path.name}")
        draft.write_text(self._text, encoding="utf-8")
        os.replace(draft, self._path)

    def end(self) -> None:
        """It happens no more."""
        self._path.unlink(missing_ok=True)

    @property
    def hits(self) -> int:
        """Calls of the store that met it."""
        return self._hits.stat().st_size if self._hits.exists() else 0


class StoreFaults:
    """Faults of prefill's store, and prefill's open objects. policy: for requests that lose KV."""

    def __init__(self, cluster: Cluster, folder: Path, policy: str) -> None:
        self.cluster, self.policy = cluster, policy
        self._folder = folder
        self._faults: list[Fault] = []
        self._numbers = itertools.count()

    def fault(self, name: str, times: int | None = None, **options: Any) -> Fault:
        """A fault by its name in `faulty_store`, not begun."""
        made = Fault(self._folder, next(self._numbers), name, times, options)
        self._faults.append(made)
        return made

    def end_all(self) -> None:
        """No faults any more."""
        while self._faults:
            self._faults.pop().end()

    def held(self) -> str:
        """Describes objects that prefill's processes have open in the store, "" for none."""
        for path in sorted(self._folder.glob("open-*")):
            for kind, count in json.loads(path.read_text(encoding="utf-8")).items():
                if count:
                    return f"{path.name}: {count} objects to {kind}"
        return ""

    def lost(self) -> float:
        """Requests that could not be loaded or saved, so far."""
        return metrics(self.cluster.ports["prefill"])["vllm:kvoffload_store_lost_requests_total"]

    def hit_tokens(self) -> float:
        """Tokens that came out of the store, so far."""
        return metrics(self.cluster.ports["prefill"])["vllm:kvoffload_store_hit_tokens_total"]


def joint(policy: str, **store: Any) -> Any:
    """Makes the `--kv-transfer-config` of a joint deployment out of prefill's own. store: the store's."""
    buffers = {"layerwise_num_shared_buffers": 1, "layerwise_independent_layers": [0]}
    extra = {"use_layerwise": True, **buffers, **store}

    def transfer(own: dict[str, Any]) -> dict[str, Any]:
        part = {"kv_connector": "AscendStoreConnector", "kv_role": own["kv_role"]}
        parts = [own, {**part, "kv_connector_extra_config": extra}]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": own["kv_role"],
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"connectors": parts},
        }

    return transfer


@contextmanager
def joint_cluster(
    cluster: Cluster,
    folder: Path,
    policy: str,
    *,
    product_fault: str = "",
    environment: Mapping[str, str] | None = None,
    **store: Any,
) -> Iterator[StoreFaults]:
    """For a while prefill is that of a joint deployment, warm. product_fault: Python that breaks it."""
    patch = PLANT.format(folder=str(folder))
    options = store or {"backend": "local", "local_dram_size_GB": POOL_GB}
    kind = Kind(patch + product_fault, joint(policy, **options), environment or {})
    faults = StoreFaults(cluster, folder, policy)
    with cluster.of_kind(prefill=kind):
        cluster.reference_engine, cluster.also_held = "decode", faults.held
        try:
            _warm_up(cluster)
            yield faults
        finally:
            faults.end_all()
            cluster.reference_engine, cluster.also_held = "prefill", str


def evict_before_use(scene: Scene, store: StoreFaults) -> list[Client]:
    """Requests whose prefix is found in the store, and gone before it is loaded; its room is other objects'.

    One through the proxy, one that prefill answers itself. Returns them once they have ended.
    """
    cluster, asked = store.cluster, []
    prompt = cluster.prompt(700)

    def ask(port: str, more: int) -> Client:
        return Client(cluster.ports[port], prompt + cluster.prompt(more), 8)

    for port in ("proxy", "prefill"):
        assert scene.other(ask(port, 20)).join(DEADLINE_S)
        before = store.hit_tokens()
        assert scene.other(ask(port, 30)).join(DEADLINE_S)
        assert store.hit_tokens() - before == 640, "the control: the store has the prefix"
        fault = store.fault("evicted", 1)
        fault.begin()
        asked.append(scene.add(BEFORE, ask(port, 40)).start())
        assert asked[-1].join(DEADLINE_S)
        assert fault.hits == 1
    return asked


def _warm_up(cluster: Cluster) -> None:
    clients = together(6, lambda n: cluster.client(100 + 90 * n, stream=bool(n % 2)))
    clients += together(2, lambda n: cluster.client(100, to=("prefill", "decode")[n]))
    after(0.2, clients[0].abort)
    for client in clients:
        assert client.join(DEADLINE_S)
    cluster.settle()
