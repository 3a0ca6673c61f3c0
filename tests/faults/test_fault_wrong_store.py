"""The control: a store that hands out what it has evicted. The cells of the store must see it."""

from __future__ import annotations

import pytest

from tests.faults.fault_report import Report
from tests.faults.fault_scene import Scene
from tests.faults.fault_store import evict_before_use, joint_cluster

pytestmark = pytest.mark.faults_full

HANDS_OUT_WHAT_IS_GONE = """
from vllm_kvoffload.store.index import ObjectIndex
make_room, open_read = ObjectIndex._make_room, ObjectIndex.open_read
def remembering(self, count, size, spared):
    before = dict(self._ready)
    offsets = make_room(self, count, size, spared)
    gone = {key: object_ for key, object_ in before.items() if key not in self._ready}
    self.__dict__.setdefault("gone", {}).update(gone)
    return offsets
def stale(self, client, keys, now, lease_s):
    gone = self.__dict__.setdefault("gone", {})
    def instead(key):
        return self._grant(client, gone[key], now + lease_s, writing=False) if key in gone else None
    found = open_read(self, client, keys, now, lease_s)
    return [grant or instead(key) for key, grant in zip(keys, found)]
ObjectIndex._make_room, ObjectIndex.open_read = remembering, stale
"""


@pytest.fixture
def stale(cluster, tmp_path):
    with joint_cluster(cluster, tmp_path, "recompute", product_fault=HANDS_OUT_WHAT_IS_GONE) as faults:
        yield faults


def test_stale_bytes_are_seen(stale):
    scene = Scene(stale.cluster, "a store that hands out what is gone", report=Report())
    with pytest.raises(AssertionError, match="before rendezvous: 740 tokens, WRONG"), scene:
        evict_before_use(scene, stale)
