"""The reference itself: transformers loads every demo model, and the models notice what they must notice."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from tests.golden.hf_reference import (
    clear_prompt,
    compare_logprobs,
    consecutive_overlap,
    greedy,
    load_reference,
    run_reference,
)
from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint
from vllm_kvoffload.demo.prompts import token_prompt
from vllm_kvoffload.demo.text import RESERVED

TINY = MODELS["glm-tiny"]
LENGTH = 400


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="module")
def model(directory):
    return load_reference(directory)


@pytest.fixture(scope="module")
def token_ids(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return token_prompt(lambda sample: tokenizer(sample).input_ids, LENGTH)


@pytest.fixture(scope="module")
def base(model, token_ids):
    return run_reference(model, token_ids, chunk=128, record=True)


@pytest.fixture
def own_configs(monkeypatch):
    """Without the config classes that vLLM registers with transformers once it has loaded such a model."""
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    monkeypatch.setattr(mapping, "_extra_content", {})


@pytest.mark.usefixtures("own_configs")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_loads_without_a_missing_or_spare_weight(name, tmp_path):
    spec = MODELS[name]
    path = build_checkpoint(tmp_path / name, spec)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    # Hugging Face's models have no MTP layers; what is left over must be of these and nothing else.
    mtp = tuple(f"model.layers.{spec.num_layers + n}." for n in range(spec.num_mtp_layers))
    spare = [key for key in info["unexpected_keys"] if not key.startswith(mtp or "-")]
    assert not any((info["missing_keys"], info["mismatched_keys"], spare))
    assert bool(info["unexpected_keys"]) == bool(mtp)


def test_dsv32_scores_follow_the_documented_formula(tmp_path, token_ids):
    path = build_checkpoint(tmp_path / "model", MODELS["dsv32-tiny"])
    run = run_reference(load_reference(path), token_ids, record=True)
    assert sorted(run.indexers) == [0, 1, 2]


def test_reference_does_not_depend_on_the_auto_classes(tmp_path, monkeypatch):
    path = build_checkpoint(tmp_path / "model", MODELS["dsv32-tiny"])
    extra = transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content
    monkeypatch.setitem(extra, "deepseek_v32", transformers.DeepseekV3Config)  # what vLLM does
    assert isinstance(transformers.AutoConfig.from_pretrained(path), transformers.DeepseekV3Config)
    assert isinstance(load_reference(path), transformers.DeepseekV32ForCausalLM)


def test_chunks_do_not_matter(model, token_ids, base):
    whole = run_reference(model, token_ids, chunk=None)
    assert compare_logprobs(whole.logprobs, base.logprobs).within(1e-4)
    assert torch.equal(base.prompt_logprobs(), base.logprobs[range(LENGTH - 1), token_ids[1:]])


def test_selection_is_causal_and_has_the_right_size(base):
    for record in base.indexers.values():
        sizes = record.selected.sum(1)
        assert torch.equal(sizes, torch.arange(1, LENGTH + 1).clamp(max=TINY.index_topk))
        assert not record.selected.triu(1).any()
        assert record.margin[: TINY.index_topk].isinf().all()
        assert record.margin[TINY.index_topk :].isfinite().all()


def test_consecutive_choices_overlap_yet_move(base):
    for layer, record in base.indexers.items():
        overlap = consecutive_overlap(record, LENGTH // 2)
        assert 0.7 < overlap < 0.96, layer
        first, last = record.selected[LENGTH // 2], record.selected[-1]
        assert int((first & last).sum()) < 0.8 * TINY.index_topk, layer
    first, second = base.indexers.values()
    assert int((first.selected[-1] & second.selected[-1]).sum()) < 0.6 * TINY.index_topk


@pytest.mark.parametrize(
    "change",
    [
        {"index_topk": TINY.index_topk // 2},
        {"index_topk": TINY.index_topk - 1},
        {"indexer_types": ["full", "shared", "shared", "shared"]},
    ],
    ids=["half the top-k", "one less", "another sharing pattern"],
)
def test_wrong_selection_is_noticed(directory, token_ids, base, change):
    wrong = run_reference(load_reference(directory, **change), token_ids, chunk=128)
    assert compare_logprobs(wrong.prompt_logprobs(), base.prompt_logprobs()).maximum > 1e-2


@pytest.mark.parametrize("layer", range(TINY.num_layers))
def test_one_wrong_row_is_noticed(model, token_ids, base, layer):
    owner = max(index for index in base.indexers if index <= layer)
    rows = base.indexers[owner].selected[-1].nonzero()[::8, 0].tolist()
    _, right = greedy(model, token_ids, 2)
    differences = []
    for row in rows:

        def corrupt(cache, _step, row=row):
            keys = cache.layers[layer].keys
            keys[0, 0, row] = keys[0, 0, (row + LENGTH // 2) % LENGTH].clone()

        _, wrong = greedy(model, token_ids, 2, before_step=corrupt)
        differences.append(compare_logprobs(wrong[1:], right[1:]).maximum)
    differences.sort()
    assert differences[len(differences) // 2] > 1e-2, differences


def test_greedy_text_varies_with_the_prompt_and_has_no_control_tokens(model, token_ids):
    first, rows = greedy(model, token_ids, 32)
    second, _ = greedy(model, token_ids[50:], 32)
    assert min(len(set(first)), len(set(second))) > 16
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 16
    assert float(rows[:, :RESERVED].exp().max()) < 1e-4
    entropy = -(rows.exp() * rows).sum(1).mean()
    assert 2.0 < float(entropy) < 6.5


def test_clear_prompt_is_clear(model, token_ids):
    candidates = [token_ids[start : start + 200] for start in range(0, 200, 25)]
    run = clear_prompt(model, candidates, margin=1e-5)
    assert run.token_ids in candidates
    assert run.minimal_margin() >= 1e-5
    with pytest.raises(ValueError, match=r"^margin: "):
        clear_prompt(model, candidates[:2], margin=1.0)


def test_greedy_equals_teacher_forcing(model, token_ids):
    chosen, rows = greedy(model, token_ids[:100], 6, chunk=64)
    forced = run_reference(model, token_ids[:100] + chosen[:-1]).logprobs[99:]
    assert compare_logprobs(rows, forced).within(1e-4)
    assert forced.argmax(1).tolist() == chosen


def test_unknown_override_and_shapes_are_refused(directory, base):
    with pytest.raises(ValueError, match="no_such_key"):
        load_reference(directory, no_such_key=1)
    with pytest.raises(ValueError, match="shapes differ"):
        compare_logprobs(base.logprobs, base.logprobs[:-1])
    broken = base.logprobs.clone()
    broken[3, 5] = float("nan")
    assert not compare_logprobs(broken, base.logprobs).within(1e9)
