"""Runs workloads on engines whose store is the real MemCache, in a process that has its stand-ins.

    python -m tests.golden.memcache_child PLANS

PLANS: JSON, by name: checkpoint, shared buffers, independent layers, workloads. Each plan has an engine and,
in the store, a namespace of its own. Prints a line of JSON for each: its name, the KV blocks, and for each
workload the outcomes and what the connector did.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path


def main(plans: str) -> None:
    from tests import hostsim

    hostsim.activate()
    from tests.golden.engine import engine
    from tests.golden.store_lab import stats, transfer_config
    from tests.golden.workloads import WORKLOADS

    for name, (checkpoint, shared, independent, workloads) in json.loads(plans).items():
        transfer = transfer_config(shared, independent, backend="memcache", namespace=name)
        results = []
        with engine(Path(checkpoint), kv_transfer_config=transfer) as running:
            for workload in workloads:
                outcomes = running.run(WORKLOADS[workload].jobs)
                results.append({"outcomes": [asdict(outcome) for outcome in outcomes], "stats": stats()})
            line = {"name": name, "num_blocks": running.num_blocks, "results": results}
        print(f"RESULTS {json.dumps(line)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
