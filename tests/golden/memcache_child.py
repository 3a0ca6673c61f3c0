"""Runs workloads on an engine whose store is the real MemCache, in a process that has its stand-ins.

    python memcache_child.py CHECKPOINT WORKLOAD...

Prints one line of JSON: for each workload the outcomes, and what the connector did.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def main(checkpoint: str, *workloads: str) -> None:
    import hostsim

    hostsim.activate()
    from engine import engine
    from store_lab import stats, transfer_config
    from workloads import WORKLOADS

    results = []
    with engine(Path(checkpoint), kv_transfer_config=transfer_config(1, [0], backend="memcache")) as running:
        for workload in workloads:
            outcomes = running.run(WORKLOADS[workload].jobs)
            results.append({"outcomes": [asdict(outcome) for outcome in outcomes], "stats": stats()})
    print(f"RESULTS {json.dumps(results)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
