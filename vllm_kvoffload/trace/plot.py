"""Hit ratio against pool size, as a PNG: one panel per trace, one line per policy. Needs matplotlib."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_kvoffload.trace.simulator import Result

EXTRA = "plots"
COLUMNS = 3
# Solid lines: the product's policies; dashed: references. Markers as well, because 13 colours look alike.
MARKERS = "osv^Dx+"
COLOURS = "tab20"


class MissingMatplotlib(Exception):
    """matplotlib is not installed."""


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws all results into a PNG file. Raises MissingMatplotlib, OSError; ValueError without results."""
    if not results:
        raise ValueError("no results to plot")
    try:
        # Uses the Figure's own canvas, because pyplot would look for a display and keep the figure.
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingMatplotlib(
            f"matplotlib is not installed: pip install '.[{EXTRA}]' where this repository is"
        ) from error
    colours = importlib.import_module("matplotlib").colormaps[COLOURS]
    traces = list(dict.fromkeys(result.trace for result in results))
    columns = min(COLUMNS, len(traces))
    rows = math.ceil(len(traces) / columns)
    figure = figure_module.Figure(figsize=(5 * columns, 3.8 * rows + 1.2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, trace in zip(axes, traces, strict=False):
        _panel(axis, trace, [result for result in results if result.trace == trace], colours)
    for axis in axes[len(traces) :]:
        axis.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, format="png", dpi=120)


def _panel(axis: Any, trace: str, results: Sequence[Result], colours: Any) -> None:
    pools = sorted({result.slots for result in results if result.slots})
    for number, policy in enumerate(dict.fromkeys(result.policy for result in results)):
        own = sorted((r for r in results if r.policy == policy), key=lambda result: result.slots)
        if own[0].slots:
            style = "-" if "/" in policy else "--"
            look = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, "color": colours(number % 20)}
            sizes = [result.slots for result in own]
            axis.plot(sizes, [result.hit_percent for result in own], style, label=policy, **look)
        else:
            axis.axhline(own[0].hit_percent, color="grey", linestyle=":", label=policy)
    axis.set_title(trace)
    axis.set_xlabel("slots of a request")
    axis.set_ylabel("hits, % of distinct old ids")
    if pools:
        axis.set_xscale("log", base=2)
        axis.set_xticks(pools, [f"{slots // 1024}K" if slots % 1024 == 0 else str(slots) for slots in pools])
    axis.grid(alpha=0.3)
