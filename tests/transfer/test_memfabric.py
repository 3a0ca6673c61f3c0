"""The MemFabric engine against a stand-in with the published signatures; the library itself needs an NPU."""

from __future__ import annotations

import ctypes
import sys
import threading

import numpy as np
import pytest

from vllm_kvoffload.transfer import ReadStatus, Region, Spans, TransferError, TransferUnavailableError
from vllm_kvoffload.transfer.memfabric import MemfabricEngine, transfer_timeout_ms


class FakeEngine:
    """In one process, so that a read is a memmove."""

    ports = iter(range(40000, 41000))

    def __init__(self):
        self.registered = []
        self.gate = threading.Event()
        self.gate.set()
        self.code = 0

    def initialize(self, store, host, role, device, store_server_role):
        assert (store, role, store_server_role) == (f"tcp://{host}", role, "Prefill")
        assert role in ("Prefill", "Decode")
        assert device == 0
        self.port = next(self.ports)
        return self.code

    def get_rpc_port(self):
        return self.port

    def register_memory(self, address, nbytes):
        self.registered.append((address, nbytes))
        return 0

    def batch_transfer_sync_read(self, session, local, peer, lengths):
        assert session.startswith("10.0.0.1:")
        self.gate.wait(10)
        for target, source, count in zip(local, peer, lengths, strict=True):
            ctypes.memmove(target, source, count)
        return self.code


class FakeLibrary:
    TransferEngine = FakeEngine

    @staticmethod
    def set_log_level(level):
        assert level == 2

    @staticmethod
    def set_conf_store_tls(enabled, text):
        assert (enabled, text) == (False, "")


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.delenv("ASCEND_TRANSFER_TIMEOUT", raising=False)
    engines = [
        MemfabricEngine(role=role, host="10.0.0.1", device_id=0, module=FakeLibrary)
        for role in ("prefill", "decode")
    ]
    yield engines
    for engine in engines:
        engine.close()


def test_bytes_arrive(pair):
    prefill, decode = pair
    source = np.arange(64, dtype=np.uint8)
    target = np.zeros(64, dtype=np.uint8)
    prefill.register([Region(source.ctypes.data, 64, "npu")])
    decode.register([Region(target.ctypes.data, 64)])
    assert prefill._engine.registered == [(source.ctypes.data, 64)]
    assert decode._engine.registered == []
    peer = decode.add_peer(prefill.local_metadata())
    decode._engine.gate.clear()
    handle = decode.read(peer, Spans.of([(target.ctypes.data + 8, source.ctypes.data + 16, 24)]))
    assert decode.poll(handle) is ReadStatus.PENDING
    decode._engine.gate.set()
    assert decode.wait(handle, 10) is ReadStatus.DONE
    assert np.array_equal(target[8:32], source[16:40])
    decode._engine.code = 5
    handle = decode.read(peer, Spans.of([(target.ctypes.data, source.ctypes.data, 1)]))
    assert decode.wait(handle, 10) is ReadStatus.FAILED
    assert handle.reason == "batch_transfer_sync_read returned 5"


def test_cancelling_waits_for_what_runs(pair):
    prefill, decode = pair
    data = np.zeros(64, dtype=np.uint8)
    prefill.register([Region(data.ctypes.data, 32)])
    decode.register([Region(data.ctypes.data + 32, 32)])
    peer = decode.add_peer(prefill.local_metadata())
    decode._engine.gate.clear()
    spans = Spans.of([(data.ctypes.data + 32, data.ctypes.data, 8)])
    running, queued = decode.read(peer, spans), decode.read(peer, spans)
    while not running.result.running():
        pass
    for handle in (running, queued):
        decode.cancel(handle)
    assert decode.poll(running) is ReadStatus.PENDING
    assert decode.poll(queued) is ReadStatus.FAILED
    decode._engine.gate.set()
    assert decode.wait(running, 10) is ReadStatus.DONE


def test_unregistered_memory_is_refused(pair):
    prefill, decode = pair
    peer = decode.add_peer(prefill.local_metadata())
    with pytest.raises(TransferError, match="not registered"):
        decode.read(peer, Spans.of([(1, 1, 1)]))


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", None)
    with pytest.raises(TransferUnavailableError, match=r"memfabric_hybrid.*install MemFabric Hybrid 1\.2"):
        MemfabricEngine(role="decode", host="10.0.0.1", device_id=0)


@pytest.mark.parametrize("place", ["library", "engine's module"])
@pytest.mark.parametrize("protocol", ["sdma", "device_rdma", "device_urma"])
def test_the_protocol_of_reads(protocol, place, monkeypatch):
    """The library's default is not passed; 1.2.0 has the names in the engine's own module only."""
    given = {}

    class Chosen(FakeEngine):
        def initialize(self, store, host, role, device, store_server_role, **options):
            given.update(options)
            return super().initialize(store, host, role, device, store_server_role)

    kinds = type("TransDataOpType", (), {"DEVICE_RDMA": 2, "DEVICE_URMA": 4, "SDMA": 1})
    members = {"TransferEngine": Chosen}
    if place == "library":
        members["TransDataOpType"] = kinds
    else:
        monkeypatch.setitem(sys.modules, "_pymf_transfer", type("M", (), {"TransDataOpType": kinds}))
    options = {"role": "decode", "host": "10.0.0.1", "device_id": 0, "module": type("M", (), members)}
    MemfabricEngine(**options, protocol=protocol).close()
    expected = {"sdma": {}, "device_rdma": {"data_op_type": 2}, "device_urma": {"data_op_type": 4}}
    assert given == expected[protocol]
    monkeypatch.delitem(sys.modules, "_pymf_transfer", raising=False)
    members.pop("TransDataOpType", None)
    if protocol != "sdma":
        with pytest.raises(TransferUnavailableError, match=f"no memfabric_transfer_protocol {protocol}"):
            MemfabricEngine(**{**options, "module": type("M", (), members)}, protocol=protocol)


def test_an_older_library_is_named():
    class Old(FakeEngine):
        def initialize(self, store, host, role, device):  # noqa: ARG002
            return 0

    with pytest.raises(TransferUnavailableError, match=r"release 1\.2"):
        MemfabricEngine(
            role="decode", host="10.0.0.1", device_id=0, module=type("M", (), {"TransferEngine": Old})
        )


def test_a_failed_start_says_what_to_check():
    class Broken(FakeEngine):
        def __init__(self):
            super().__init__()
            self.code = -3

    with pytest.raises(TransferUnavailableError, match="returned -3; check the NPU driver"):
        MemfabricEngine(
            role="prefill", host="10.0.0.1", device_id=0, module=type("M", (), {"TransferEngine": Broken})
        )


def test_timeout():
    assert transfer_timeout_ms({}) == int(4.096 * 2**20 * 7 // 1000 + 3000)
    assert transfer_timeout_ms({"ASCEND_TRANSFER_TIMEOUT": "17"}) == 17
