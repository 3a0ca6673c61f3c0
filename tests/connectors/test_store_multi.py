"""Store and remote decode in one prefill engine: how the two coordinate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_kvoffload.connectors.ascend_store.connector import AscendStoreConnector, _agree_over_ranks
from vllm_kvoffload.connectors.multi import KVOffloadMultiConnector, multi_connector
from vllm_kvoffload.connectors.sfa_remote_d2h.connector import SfaRemoteD2HConnector


class Prefill:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def listen(self, on_news):
        self.heard.append(on_news)


class Remote(SfaRemoteD2HConnector):
    """Of a prefill engine, without sockets."""

    def __init__(self) -> None:
        self._joint, self.connector_worker, self._compute = {}, None, None
        self._config = SimpleNamespace(producer=True, limits=SimpleNamespace(lease_s=15))

    def register_kv_caches(self, _caches):
        self.connector_worker = Prefill()

    @property
    def readers(self):
        return self.connector_worker


class Store(AscendStoreConnector):
    def __init__(self, shares: bool) -> None:
        self._plan = SimpleNamespace(has_reuse=shares)
        self.guards: list[tuple[object, float]] = []
        gates = SimpleNamespace(notify=lambda: None)
        pipeline = SimpleNamespace(gates=gates, use_guard=lambda *args: self.guards.append(args))
        self._worker = SimpleNamespace(pipeline=pipeline)

    def register_kv_caches(self, _caches):
        pass


def joined(*parts) -> KVOffloadMultiConnector:
    made = KVOffloadMultiConnector.__new__(KVOffloadMultiConnector)
    made._connectors = list(parts)
    made._stores = [part for part in parts if isinstance(part, Store)]
    made._remotes = [part for part in parts if isinstance(part, Remote)]
    made.register_kv_caches({})
    return made


@pytest.mark.parametrize("shares", [True, False])
def test_decode_never_gets_what_the_store_loses(shares):
    """With and without shared memory; only the wait for reads before overwriting depends on it."""
    remote, store = Remote(), Store(shares)
    joined(remote, store)
    ((guard, reads_s),) = store.guards
    assert guard is remote.connector_worker
    assert (reads_s > 15, len(remote.connector_worker.heard)) == (shares, int(shares))
    assert remote._joint == {"last_layer_at_end": True, **({"progress": True} if shares else {})}


def test_remote_decode_comes_first_whatever_the_configuration_says(monkeypatch):
    remote, store = Remote(), Store(True)

    def init(self, *_configuration):
        self._connectors = [store, remote]

    monkeypatch.setattr(multi_connector.MultiConnector, "__init__", init)
    made = KVOffloadMultiConnector(None, None, None)  # type: ignore[arg-type]
    assert made._connectors == [remote, store]
    assert (made._stores, made._remotes) == ([store], [remote])


def test_the_store_ends_a_step_before_its_last_layer_is_published(monkeypatch):
    """At the end of a step the store moves layers that did not run, and may lose requests."""
    ended: list[str] = []
    for part in (Remote, Store):
        monkeypatch.setattr(part, "wait_for_save", lambda self: ended.append(type(self).__name__))
    joined(Remote(), Store(True)).wait_for_save()
    assert ended == ["Store", "Remote"]


@pytest.mark.parametrize("with_store", [True, False])
def test_no_transfer_is_complete_before_the_step_is_known_to_be_right(with_store):
    remote = Remote()
    joined(remote, *([Store(True)] if with_store else []))
    assert remote._joint.get("last_layer_at_end", False) is with_store


def test_what_is_wrong_on_one_rank_is_wrong(monkeypatch):
    from vllm_kvoffload.connectors.ascend_store import connector

    told = [{"r": ("load", True), "s": ("save", False)}, {"r": ("save", False)}]
    monkeypatch.setattr(connector, "get_tp_group", lambda: SimpleNamespace(world_size=2, cpu_group=None))

    def gather(into, _mine, group):  # noqa: ARG001
        into[:] = told

    monkeypatch.setattr(connector.torch.distributed, "all_gather_object", gather)
    assert _agree_over_ranks({}) == {"r": ("load", True), "s": ("save", False)}


@pytest.mark.parametrize(
    ("said", "done"),
    [((True, True), True), ((True, False), False), ((False, True), False), ((None, True), False), ((), True)],
)
def test_a_reset_is_one_of_all_parts(said, done):
    """Also of those behind one that fails; a part that knows no reset was not reset."""
    asked = []

    def part(answer):
        return SimpleNamespace(reset_cache=lambda: asked.append(answer) or answer)

    assert joined_for_reset([part(answer) for answer in said]).reset_cache() is done
    assert asked == list(said)


def test_a_part_that_cannot_be_reset_ends_nothing():
    def broken():
        raise RuntimeError("no")

    parts = [SimpleNamespace(reset_cache=broken), SimpleNamespace(reset_cache=lambda: True)]
    assert joined_for_reset(parts).reset_cache() is False


def joined_for_reset(parts) -> KVOffloadMultiConnector:
    made = KVOffloadMultiConnector.__new__(KVOffloadMultiConnector)
    made._connectors = parts
    return made
