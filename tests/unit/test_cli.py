import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.unit.model_configs import deepseek_v3_2, glm_5_3
from vllm_kvoffload.cli import main as cli
from vllm_kvoffload.settings.values import GIB

runner = CliRunner()


@pytest.fixture
def config_file(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return str(tmp_path / "config.json")

    return write


def size(*options):
    return runner.invoke(cli.app, ["size", *map(str, options)])


def report(*options):
    result = size(*options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_report_of_glm(config_file):
    options = ("--device-gb", 40, "--dram-gb", 512, "--max-num-seqs", 32, "--max-model-len", 131072)
    out = report("--model", config_file(glm_5_3()), "--tokens", 10**6, *options)
    geometry, capacity = out["geometry"], out["capacity"]
    assert geometry["indexer_types"] == "FFFSSSF" + "SSSF" * 17 + "SSS"
    assert (geometry["full_layers"], geometry["shared_layers"], geometry["index_groups"]) == (21, 57, 21)
    assert geometry["main_components"] == {"nope": 1024, "rope": 128}
    assert geometry["main_bytes_per_token"] == 89856
    assert geometry["indexer_bytes_per_token"] == 5376
    assert geometry["summary"].endswith("(from indexer_types)")
    assert out["fixed_device_bytes"]["hot_pools"] == 32 * 4096 * 89856
    assert out["fixed_device_bytes"]["prefill_buffers"] == 0
    assert out["at_max_model_len"]["indexer_read_bytes_per_step"] == 5376 * 131072
    fixed = out["fixed_device_bytes"]["total"]
    assert [need["tokens"] for need in out["needed"]] == [131072, 10**6]
    assert out["needed"][0]["device_bytes"] == fixed + 1025 * 128 * 5376
    assert out["needed"][0]["dram_size_per_dp_GB"] == 11
    assert capacity["num_blocks"] == (40 * GIB - fixed) // (128 * 5376)
    assert capacity["limit"] == "device"
    assert capacity["baseline_blocks"] == 40 * GIB // (128 * (89856 + 5376))
    assert capacity["factor"] == pytest.approx(capacity["tokens"] / capacity["baseline_tokens"])


def test_published_read_figure(config_file):
    out = report("--model", config_file(glm_5_3()), "--layout", "fp8", "--max-model-len", 10**6)
    assert out["at_max_model_len"]["indexer_read_bytes_per_step"] == 2772 * 10**6
    assert out["geometry"]["main_row_bytes"] == 656
    assert out["capacity"] is None


def test_host_memory_limit_is_named(config_file):
    model = config_file(glm_5_3())
    options = ("--device-gb", 40, "--dram-gb", 64, "--max-model-len", 65536)
    assert report("--model", model, *options)["capacity"]["limit"] == "dram"
    text = size("--model", model, *options).stdout
    assert "host memory (dram_size_per_dp_GB)" in text


def test_text_report(config_file):
    result = size("--model", config_file(deepseek_v3_2()), "--device-gb", 80, "--layout", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].endswith(f"indexer types {'F' * 61} (from {RULE_DEFAULTS})")
    for part in ("kv 1152", "key 256", "tokens without offload", "tokens with offload", "limited by"):
        assert part in result.stdout
    assert "163,840 tokens need" in result.stdout  # the model's own limit
    assert "dram_size_per_dp_GB 11" in result.stdout


RULE_DEFAULTS = "index_topk_freq 1, index_skip_topk_offset 2"


def test_model_folder_and_options(config_file, tmp_path):
    config_file(glm_5_3())
    model = ("--model", tmp_path, "--max-model-len", 65536)
    assert report(*model)["geometry"]["mtp_layers"] == 0
    drafts = report(*model, "--num-speculative-tokens", 1, "--dtype", "float32", "--indexer-layout", "int8")
    assert drafts["geometry"]["mtp_layers"] == 1
    assert drafts["geometry"]["main_row_bytes"] == 2304
    assert drafts["geometry"]["indexer_row_bytes"] == 130
    aggregated = report(*model, "--aggregated", "--prefill-buffers", 3)
    assert aggregated["fixed_device_bytes"]["prefill_buffers"] == 3 * 65536 * 1152
    kept = report(*model, "--device-gb", 60, "--keep-device-kv-cache")
    assert kept["capacity"]["tokens"] < kept["capacity"]["baseline_tokens"]


def test_nested_config_gives_the_length(config_file):
    out = report("--model", config_file({"text_config": glm_5_3(max_position_embeddings=4096)}))
    assert out["at_max_model_len"]["tokens"] == 4096


def test_no_baseline_is_valid_json(config_file):
    small = glm_5_3(index_topk=16)
    options = ("--topk-buffer-size", 128, "--max-num-seqs", 1, "--max-model-len", 128, "--device-gb", 0.015)
    out = report("--model", config_file(small), *options)
    assert out["capacity"]["baseline_tokens"] == 0
    assert out["capacity"]["factor"] is None
    assert "nothing fits without offload" in size("--model", config_file(small), *options).stdout


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"model_type": "llama"}, (), ["index_topk=None", "no sparse attention indexer"]),
        (glm_5_3(), ("--topk-buffer-size", 6000), ["topk_buffer_size=6000", "set it to 4096 or 8192"]),
        (glm_5_3(), ("--num-speculative-tokens", 3), ["topk_buffer_size=4096", "set it to 8192"]),
        (glm_5_3(), ("--ways", 8), ["ways=8", "set it to 16"]),
        (glm_5_3(), ("--placement", "two"), ["placement='two'", "one_set, two_sets"]),
        (glm_5_3(), ("--dram-gb", 0), ["dram_size_per_dp_GB=0", "set it to 1"]),
        (glm_5_3(), ("--aggregated", "--prefill-buffers", 9), ["prefill_buffers=9", "set it to 8"]),
        (glm_5_3(), ("--max-model-len", 0), ["max_model_len=0", "--max-model-len 1"]),
        (glm_5_3(), ("--device-gb", 1), ["device_gb=1.0", "give --device-gb 27"]),
        (
            glm_5_3(),
            ("--device-gb", 80, "--dram-gb", 8),
            ["dram_size_per_dp_GB=8", "dram_size_per_dp_GB to 88"],
        ),
        (glm_5_3(max_position_embeddings=None), (), ["max_model_len=None", "give --max-model-len"]),
        ("{", (), ["config.json is not JSON", "model folder"]),
        ("[]", (), ["config.json is not a JSON object"]),
    ],
)
def test_errors_are_one_line_on_stderr(config_file, config, options, words):
    result = size("--model", config_file(config), *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("kvoffload size: ")
    assert all(word in result.stderr for word in words), result.stderr


def test_missing_model(tmp_path):
    result = size("--model", tmp_path / "absent")
    assert result.exit_code == 2
    assert "can't read absent" in result.stderr


def test_help_lists_the_commands():
    result = runner.invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert "size" in result.stdout


def test_demo_gets_its_arguments_untouched(monkeypatch):
    calls = []

    def demo_main(arguments):
        calls.append(list(arguments))
        return 3

    monkeypatch.setattr(cli.importlib, "import_module", lambda _name: SimpleNamespace(main=demo_main))
    monkeypatch.setattr(cli, "find_spec", lambda _name: object())
    monkeypatch.setattr(cli, "app", cli.typer.Typer())
    cli.app.callback()(cli._root)
    cli._add_demo()
    result = runner.invoke(cli.app, ["demo", "--help", "--seed", "1", "x"])
    assert calls == [["--help", "--seed", "1", "x"]]
    assert result.exit_code == 3


def test_demo_is_absent_without_its_module(monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda _name: None)
    monkeypatch.setattr(cli, "app", cli.typer.Typer())
    cli.app.callback()(cli._root)
    cli._add_demo()
    assert runner.invoke(cli.app, ["demo"]).exit_code != 0


def test_command_needs_no_torch_or_vllm(config_file):
    """`kvoffload size` has to run on a laptop: it must not import what is big, nor find it missing."""
    code = (
        "import sys; sys.modules.update(torch=None, vllm=None, transformers=None, numpy=None)\n"
        "from vllm_kvoffload.cli.main import app\n"
        f"app(['size', '--model', {config_file(glm_5_3())!r}, '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["geometry"]["full_layers"] == 21


def test_layer_buffers_of_prefill(config_file):
    model = config_file(glm_5_3())
    assert report("--model", model)["layer_buffers"] is None
    buffers = report("--model", model, "--shared-buffers", 3, "--device-gb", 40)["layer_buffers"]
    assert buffers["slots"][:2] == [[0], list(range(1, 78, 3))]
    assert (buffers["caches"], buffers["buffers"]) == (99, 8)
    assert buffers["device_bytes_per_token"] == 4 * 1152 + 4 * 256
    assert buffers["factor"] == pytest.approx((78 * 1152 + 21 * 256) / 5632)
    assert buffers["tokens"] == 40 * GIB // (5632 * 128) * 128
    shown = size("--model", model, "--shared-buffers", 2, "--independent-layers", "0,-1").stdout
    assert "0, 77" in shown
    assert "shared buffer 1" in shown
    refused = size("--model", model, "--shared-buffers", 2, "--independent-layers", "78")
    assert refused.exit_code == 2
    assert "there is no layer 78" in refused.output
