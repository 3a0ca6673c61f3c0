"""The demo checkpoint builder: what it writes, when it writes, and that it never harms what it finds."""

from __future__ import annotations

import dataclasses
import json
import threading

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from vllm_kvoffload.demo import checkpoint, prompts, text, weights
from vllm_kvoffload.demo.checkpoint import (
    MARKER,
    MODELS,
    CheckpointSpec,
    build_checkpoint,
    model_config,
    spec_digest,
)

TINY = MODELS["glm-tiny"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tiny)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"layer_pattern": "SF"}, "layer_pattern"),
        ({"layer_pattern": ""}, "layer_pattern"),
        ({"layer_pattern": "FXS"}, "layer_pattern"),
        ({"model_type": "deepseek_v32"}, "layer_pattern"),
        ({"num_dense_layers": 0}, "num_dense_layers"),
        ({"num_dense_layers": 7}, "num_dense_layers"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 128}, "qk_rope_head_dim"),
        ({"num_mtp_layers": -1}, "num_mtp_layers"),
        ({"mtp_index_share": True}, "mtp_index_share"),
        (
            {
                "model_type": "deepseek_v32",
                "layer_pattern": "FF",
                "num_mtp_layers": 1,
                "mtp_index_share": True,
            },
            "mtp_index_share",
        ),
    ],
)
def test_impossible_specs_are_refused(change, name):
    with pytest.raises(ValueError, match=f"^{name}:"):
        CheckpointSpec(**change)


def test_config_has_the_keys_that_engines_need():
    config = model_config(MODELS["glm"])
    assert config["indexer_types"] == ["full", "full", "shared", "shared", "full", "shared"]
    assert "index_topk_pattern" not in config
    assert config["indexer_rope_interleave"] is True
    assert (config["scoring_func"], config["topk_method"]) == ("sigmoid", "noaux_tc")
    other = model_config(dataclasses.replace(MODELS["glm"], sharing_key="index_topk_pattern"))
    assert other["index_topk_pattern"] == "FFSSFS"
    assert "indexer_types" not in other
    assert model_config(MODELS["dsv32"])["indexer_rope_interleave"] is False
    assert not [key for key in model_config(MODELS["mla"]) if key.startswith("index")]


def test_checkpoint_is_complete_and_reused(tiny):
    names = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        MARKER,
    }
    assert {item.name for item in tiny.iterdir()} == names
    before = (tiny / "model.safetensors").stat().st_ino
    assert build_checkpoint(tiny, TINY) == tiny
    assert (tiny / "model.safetensors").stat().st_ino == before
    assert [item.name for item in tiny.parent.iterdir()] == [tiny.name]


def test_same_spec_same_bytes(tiny, tmp_path):
    again = build_checkpoint(tmp_path / "again", TINY)
    for item in tiny.iterdir():
        assert item.read_bytes() == (again / item.name).read_bytes(), item.name


def test_another_spec_replaces_ours(tmp_path):
    path = build_checkpoint(tmp_path / "model", TINY)
    other = dataclasses.replace(TINY, seed=1)
    old = (path / "model.safetensors").read_bytes()
    build_checkpoint(path, other)
    assert json.loads((path / MARKER).read_text())["digest"] == spec_digest(other)
    assert (path / "model.safetensors").read_bytes() != old
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_foreign_directories_and_files_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        with pytest.raises(FileExistsError, match=name):
            build_checkpoint(tmp_path / name, TINY)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("marker", ["", "[]", '{"digest": 3}', "\x00"])
def test_damaged_marker_means_rebuild(tmp_path, marker):
    path = tmp_path / "model"
    path.mkdir()
    (path / MARKER).write_text(marker)
    build_checkpoint(path, TINY)
    assert (path / "config.json").is_file()


def test_failed_build_leaves_nothing_and_keeps_the_old_one(tmp_path, monkeypatch):
    path = build_checkpoint(tmp_path / "model", TINY)

    def no_space(*_args):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint.text, "write_tokenizer", no_space)
    with pytest.raises(OSError, match="no space"):
        build_checkpoint(path, dataclasses.replace(TINY, seed=1))
    with pytest.raises(OSError, match="no space"):
        build_checkpoint(tmp_path / "new", TINY)
    assert [item.name for item in tmp_path.iterdir()] == ["model"]
    assert build_checkpoint(path, TINY) == path  # still whole: no rebuild, which would fail


def test_concurrent_builds_agree(tmp_path):
    results = []

    def build():
        results.append(build_checkpoint(tmp_path / "model", TINY))

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [tmp_path / "model"] * 3
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_too_large_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^vocab_size: "):
        build_checkpoint(tmp_path / "model", dataclasses.replace(TINY, vocab_size=100_000))


def test_weights_follow_names_not_order():
    few = weights.random_weights(TINY)
    more = weights.random_weights(dataclasses.replace(TINY, layer_pattern="FFSF"))
    extra = {name for name in more if name not in few}
    assert extra
    assert all("layers.3.self_attn.indexer" in name for name in extra)
    changed = {name for name, tensor in few.items() if not tensor.equal(more[name])}
    assert changed == {
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
    }  # blind to the layer's own indexer


def test_bfloat16_keeps_router_bias_in_float32():
    import torch

    state = weights.random_weights(dataclasses.replace(TINY, dtype="bfloat16"))
    kinds = {name.endswith("e_score_correction_bias"): tensor.dtype for name, tensor in state.items()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


def test_text_is_long_and_varied():
    content = text.load_text()
    assert len(content) > 40_000
    blocks = prompts.paragraphs()
    assert len(blocks) == len(set(blocks)) > 60
    words = content.lower().split()
    assert len(set(words)) > 1500
    windows = [" ".join(words[start : start + 8]) for start in range(len(words) - 8)]
    assert len(set(windows)) > 0.99 * len(windows)


@pytest.mark.parametrize(
    "sample",
    [
        "plain text",
        "  spaces\n\n\tand tabs ",
        "\u00fcml\u00e4ut \u4e2d\u6587 \U0001f600",
        "".join(map(chr, range(256))),
    ],
)
def test_every_text_survives_the_tokenizer(tokenizer, sample):
    ids = tokenizer(sample).input_ids
    assert tokenizer.decode(ids) == sample
    assert min(ids) >= text.RESERVED


def test_tokenizer_fits_the_model(tokenizer):
    assert len(tokenizer) == TINY.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (
        text.PAD_ID,
        text.EOS_ID,
        text.BOS_ID,
    )
    assert tokenizer.convert_tokens_to_ids("<|end|>") == text.END_ID
    assert all(tokenizer.decode([i]) for i in range(TINY.vocab_size))
    assert len(tokenizer(text.load_text()).input_ids) > 8000


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = "<|begin|><|system|>\nBe brief.<|end|>\n<|user|>\nWhy?<|end|>\n<|assistant|>\n"
    assert rendered == expected
    ids = tokenizer(rendered).input_ids
    assert ids[0] == text.BOS_ID
    assert ids.count(text.END_ID) == 2
    with pytest.raises(Exception, match="unsupported role"):
        tokenizer.apply_chat_template([{"role": "robot", "content": ""}], tokenize=False)


def _words(sample):
    return [hash(word) & 0xFFFF for word in sample.split()]


def test_prompts_have_the_length_asked_for():
    long = prompts.token_prompt(_words, 20_000, seed=3)
    assert len(long) == 20_000
    assert long[:500] == prompts.token_prompt(_words, 500, seed=3)
    assert long[:50] != prompts.token_prompt(_words, 50, seed=4)
    with pytest.raises(ValueError, match=r"^tokens:"):
        prompts.token_prompt(_words, 0)


def test_prompts_share_exactly_their_prefix():
    group = prompts.prompts_with_prefix(_words, 3, 200, 300, seed=1)
    assert [len(prompt) for prompt in group] == [300] * 3
    assert all(prompt[:200] == group[0][:200] for prompt in group)
    assert len({tuple(prompt[200:]) for prompt in group}) == 3
    with pytest.raises(ValueError, match=r"^prefix_tokens:"):
        prompts.prompts_with_prefix(_words, 1, 300, 300)


def test_chat_asks_about_the_text():
    system, user = prompts.chat(1, 1000)
    assert (system["role"], user["role"]) == ("system", "user")
    assert user["content"].endswith(prompts.QUESTIONS[1])
    assert 1000 < len(user["content"]) < 1200


def test_mean_direction_is_invisible_to_the_logits():
    state = weights.random_weights(TINY)
    embedding, norm = (
        np.asarray(state[name].double()) for name in ("model.embed_tokens.weight", "model.norm.weight")
    )
    mean = np.sign(embedding.mean(0)) * norm
    head = np.asarray(state["lm_head.weight"].double())
    assert np.abs(head[text.RESERVED :] @ mean).max() < 1e-4
    assert (head[: text.RESERVED] @ mean < -1).all()


def test_mtp_layers_come_on_top():
    plain, spec = TINY, dataclasses.replace(TINY, num_mtp_layers=2)
    few, more = weights.random_weights(plain), weights.random_weights(spec)
    extra = {name.split(".")[2] for name in more if name not in few}
    assert extra == {"4", "5"}
    parts = {name.removeprefix("model.layers.5.") for name in more if name.startswith("model.layers.5.")}
    layer = {name.removeprefix("model.layers.1.") for name in few if name.startswith("model.layers.1.")}
    own = {"enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head"}
    assert parts == layer | {f"{part}.weight" for part in own}
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.o_proj.weight"):
        assert few[name].shape == more[name].shape
    assert few["model.layers.0.self_attn.o_proj.weight"].equal(more["model.layers.0.self_attn.o_proj.weight"])
    assert (
        more["model.layers.1.self_attn.o_proj.weight"].std()
        < 0.5 * few["model.layers.1.self_attn.o_proj.weight"].std()
    )


def test_config_tells_of_mtp_layers():
    assert model_config(TINY)["num_nextn_predict_layers"] == 0
    assert "index_share_for_mtp_iteration" not in model_config(TINY)
    glm, deepseek = model_config(MODELS["glm-tiny-mtp"]), model_config(MODELS["dsv32-tiny-mtp"])
    assert (glm["num_nextn_predict_layers"], glm["index_share_for_mtp_iteration"]) == (1, True)
    assert deepseek["num_nextn_predict_layers"] == 1
    assert "index_share_for_mtp_iteration" not in deepseek
    assert len(glm["indexer_types"]) == glm["num_hidden_layers"] == 4
