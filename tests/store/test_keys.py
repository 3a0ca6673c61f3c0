"""Keys: any differing fact gives another key, and no key breaks MemCache's limits."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvoffload.store.keys import MAX_KEY_CHARS, KeySpace

SPACE = KeySpace(
    model="org/Some-Model-3.2",
    revision="abc",
    dtype="bfloat16",
    block_size=128,
    layout_digest="0123",
    shard="0of1",
    hash_probe="ff",
)
HASH = bytes(range(32))


def test_a_key_can_be_read_by_people() -> None:
    assert SPACE.key(HASH).startswith("Some-Model-3_2.")
    assert SPACE.key(HASH).endswith(f".0of1.{HASH.hex()}")


@pytest.mark.parametrize("name", [field.name for field in fields(KeySpace)])
def test_every_fact_is_in_the_key(name: str) -> None:
    value: object = 64 if name == "block_size" else "1of2" if name == "shard" else "other"
    other = replace(SPACE, **{name: value})
    assert other.key(HASH) != SPACE.key(HASH)
    assert other.partial("r", 0, 5) != SPACE.partial("r", 0, 5)
    # Drift must be found, hence the same manifest; but for what keeps caches apart on purpose.
    assert (other.manifest_key == SPACE.manifest_key) == (name not in ("model", "namespace"))


def test_models_of_one_name_in_different_places_differ() -> None:
    here, there = (replace(SPACE, model=f"/{place}/model") for place in "ab")
    assert here.key(HASH) != there.key(HASH)
    assert here.manifest_key != there.manifest_key


@given(
    model=st.text(max_size=300),
    request=st.text(min_size=1, max_size=300),
    block_hash=st.binary(min_size=1, max_size=64),
    index=st.integers(0, 2**40),
)
def test_keys_fit_whatever_the_names(model: str, request: str, block_hash: bytes, index: int) -> None:
    space = replace(SPACE, model=model)
    full = (space.key(block_hash), space.key(block_hash, "g" * 16))
    for key in (*full, space.partial(request, index, index), space.manifest_key):
        assert 0 < len(key) <= MAX_KEY_CHARS
        assert key.isascii()
        assert key.isprintable()
        assert " " not in key


@given(st.lists(st.tuples(st.text(max_size=80), st.integers(0, 300), st.integers(0, 300)), unique=True))
def test_partial_keys_differ(parts: list[tuple[str, int, int]]) -> None:
    assert len({SPACE.partial(*part) for part in parts}) == len(parts)


def test_a_generation_has_keys_of_its_own() -> None:
    """What was stored before a reset is not found after it."""
    generations = ["", "1", "2", "a" * 16]
    keys = {SPACE.key(HASH, generation) for generation in generations}
    assert len(keys) == len(generations)
    assert all(key.startswith(SPACE.prefix) and key.endswith(HASH.hex()) for key in keys)


@pytest.mark.parametrize("generation", ["a" * 17, "a.b", "a b", "\u0661"])
def test_odd_generations_are_refused(generation: str) -> None:
    with pytest.raises(ValueError, match="expected up to 16 letters and digits"):
        SPACE.key(HASH, generation)


@pytest.mark.parametrize("block_hash", [b"", bytes(65)])
def test_odd_hashes_are_refused(block_hash: bytes) -> None:
    with pytest.raises(ValueError, match="expected 1 to 64"):
        SPACE.key(block_hash)


@pytest.mark.parametrize("change", [{"block_size": 0}, {"shard": "a.b"}, {"shard": ""}])
def test_odd_facts_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        replace(SPACE, **change)  # type: ignore[arg-type]
