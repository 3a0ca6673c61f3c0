import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_kvoffload.cli import main as cli
from vllm_kvoffload.trace import TraceHeader, TraceReader, TraceWriter

runner = CliRunner()


def trace(*arguments):
    return runner.invoke(cli.app, ["trace", *map(str, arguments)])


def ok(*arguments):
    result = trace(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.kvtrace"
    ok(
        "generate",
        "--out",
        path,
        "--context",
        400,
        "--steps",
        12,
        "--requests",
        2,
        "--topk",
        16,
        "--query-len",
        2,
    )
    return path


def test_generate_one_and_info(small):
    report = json.loads(ok("info", small, "--json").stdout)
    assert report["state"] == "complete"
    assert (report["model_name"], report["source"], report["index_topk"]) == (
        "synthetic small",
        "synthetic",
        16,
    )
    assert (report["recorded_steps"], report["requests"], report["query_tokens"]) == (12, 2, 48)
    assert report["ids"] == 48 * 16
    assert report["dropped_steps"] == 0
    text = ok("info", small).stdout
    assert "bytes per id" in text
    assert "complete" in text


def test_info_of_what_a_killed_engine_left(small):
    data = small.read_bytes()
    small.write_bytes(data[:-40])
    text = json.loads(ok("info", small, "--json").stdout)["state"]
    assert "not closed" in text
    assert "readable up to byte" in text


def test_generate_part_of_the_suite(tmp_path):
    lines = ok("generate", "--suite", tmp_path / "new" / "suite", "--only", "short").stdout
    assert "short.kvtrace" in lines
    (path,) = (tmp_path / "new" / "suite").iterdir()
    steps = list(TraceReader(path))
    assert len(steps) == 256
    again = trace("generate", "--suite", path.parent, "--only", "short")
    assert again.exit_code == 2
    assert "exists already" in again.output


def test_simulate_and_plot(small, tmp_path):
    results = tmp_path / "results.json"
    out = ok("simulate", small.parent, "--pool", 32, "--pool", 64, "--out", results).stdout
    for name in ("small", "rrip/16", "belady", "previous", "fifo_cann"):
        assert name in out
    found = {(r["policy"], r["slots"]): r for r in json.loads(results.read_text())}
    assert found["lru", 32]["steps"] == 24
    assert found["belady", 32]["misses"] <= found["lru", 32]["misses"] <= found["fifo_full", 32]["old_ids"]
    assert found["lru", 64]["hit_percent"] > found["lru", 32]["hit_percent"]
    ok("plot", results, "--png", tmp_path / "plot.png")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 10_000


def test_simulate_chosen_policies_as_json(small):
    out = ok(
        "simulate", small, "--pool", 32, "--policy", "rrip/16", "--policy", "lru", "--warm-up", 4, "--json"
    )
    rows = json.loads(out.stdout)
    assert [(row["policy"], row["steps"]) for row in rows] == [("rrip/16", 16), ("lru", 16)]


def test_simulate_a_part(tmp_path):
    path = tmp_path / "t.kvtrace"
    with TraceWriter(path, TraceHeader("m", 1, 2, 16)) as writer:
        for group in (0, 1):
            for step in range(3 + group):
                ids, lens = np.array([[1], [2]], np.int32), np.full(2, 10 + step, np.int32)
                writer.write(group, step, ids, np.array([0, 1, 2], np.int32), lens, ["a", "b"])

    def steps(*options):
        out = ok("simulate", path, "--pool", 16, "--policy", "lru", "--json", *options).stdout
        return json.loads(out)[0]["steps"]

    assert steps() == 14
    assert steps("--group", 1) == 8
    assert steps("--requests", 1) == 7
    assert steps("--group", 0, "--requests", 1) == 3
    none = trace("simulate", path, "--group", 7)
    assert none.exit_code == 2
    assert "no step of these groups" in none.output


def test_simulate_says_when_steps_were_lost(tmp_path):
    with TraceWriter(tmp_path / "t.kvtrace", TraceHeader("m", 1, 1, 16)) as writer:
        for step, length in ((0, 10), (1, 11), (5, 15)):
            ids = np.array([[step]], np.int32)
            writer.write(0, step, ids, np.array([0, 1], np.int32), np.array([length], np.int32), ["a"])
    result = ok("simulate", tmp_path / "t.kvtrace", "--pool", 16, "--policy", "lru", "--json")
    assert json.loads(result.stdout)[0]["steps"] == 2
    assert "1 of 1 requests end early" in result.stderr


def test_plot_without_matplotlib_names_the_extra(small, tmp_path, monkeypatch):
    results = tmp_path / "results.json"
    ok("simulate", small, "--pool", 32, "--policy", "lru", "--out", results)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = trace("plot", results, "--png", tmp_path / "plot.png")
    assert result.exit_code == 2
    assert ".[plots]" in result.output
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "either --suite"),
        (["generate", "--out", "x", "--suite", "y"], "either --suite"),
        (["generate", "--suite", "s", "--only", "nope"], "the suite has no nope"),
        (["generate", "--out", "x", "--model", "gpt"], "no score model"),
        (["generate", "--out", "x", "--context", "5"], "raise --context"),
        (["info", "missing"], "can't read missing"),
        (["simulate", "missing"], "can't read missing"),
        (["simulate", "."], "has no *.kvtrace"),
        (["simulate", "missing", "--policy", "mru"], "no policy 'mru'"),
        (["plot", "missing", "--png", "x.png"], "missing"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = trace(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"trace": "x"}]', "text"])
def test_plot_of_other_files(tmp_path, content):
    (tmp_path / "r.json").write_text(content)
    result = trace("plot", tmp_path / "r.json", "--png", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "kvoffload trace" in result.output
