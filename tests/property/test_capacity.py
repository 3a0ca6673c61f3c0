"""The one capacity formula: exact, tight, monotone, and never over a budget."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from vllm_kvoffload.geometry import Component, KVGeometry
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.values import GIB
from vllm_kvoffload.sparse.capacity import CapacityError, CapacityInputs, plan_capacity, required_budget

TYPES_5_3 = tuple("full" if i in {0, 1, 2, *range(6, 78, 4)} else "shared" for i in range(78))


def geometry(*, types=TYPES_5_3, main=1152, indexer=256, drafts=0, mtp=0, topk=2048):
    return KVGeometry(
        model_type="test",
        indexer_types=types,
        types_source="test",
        index_topk=topk,
        main_components=(Component("kv", main),),
        indexer_components=(Component("key", indexer),),
        num_speculative_tokens=drafts,
        num_mtp_layers=mtp,
    )


def inputs(**changes):
    values = {
        "geometry": geometry(),
        "block_size": 128,
        "device_bytes": 40 * GIB,
        "dram_bytes": 512 * GIB,
        "max_num_seqs": 32,
        "max_model_len": 131072,
        "topk_buffer_size": 4096,
    }
    return CapacityInputs(**{**values, **changes})


@st.composite
def geometries(draw):
    types = ["full", *draw(st.lists(st.sampled_from(["full", "shared"]), max_size=20))]
    drafts = draw(st.integers(0, 3))
    mtp = draw(st.integers(1, 2)) if drafts else 0
    main, indexer = draw(st.integers(1, 2304)), draw(st.integers(1, 512))
    topk = draw(st.integers(1, 64))
    return geometry(types=tuple(types), main=main, indexer=indexer, drafts=drafts, mtp=mtp, topk=topk)


@st.composite
def cases(draw):
    """Inputs on both sides of what fits: budgets near the need of some number of tokens."""
    ways = draw(st.sampled_from([16, 32]))
    case = CapacityInputs(
        geometry=draw(geometries()),
        block_size=draw(st.sampled_from([1, 16, 64, 128])),
        device_bytes=0,
        dram_bytes=0,
        max_num_seqs=draw(st.integers(1, 64)),
        max_model_len=draw(st.integers(1, 5000)),
        topk_buffer_size=ways << draw(st.integers(4, 8)),
        ways=ways,
        prefill_buffers=draw(st.sampled_from([0, 2, 3, 8])),
        keep_device=draw(st.booleans()),
    )
    tokens = st.integers(-200, 20000).map(lambda more: max(case.max_model_len + more, 0))
    bytes_off = st.integers(-300, 300)
    device = required_budget(case, draw(tokens)).device_bytes + draw(bytes_off)
    dram = required_budget(case, draw(tokens)).dram_bytes + draw(bytes_off)
    return replace(case, device_bytes=max(device, 0), dram_bytes=max(dram, 0))


def plan_or_none(case):
    try:
        return plan_capacity(case)
    except CapacityError:
        return None


@given(cases())
def test_within_budgets_and_tight(case):
    plan = plan_or_none(case)
    if plan is None:
        need = required_budget(case, case.max_model_len)
        assert need.device_bytes > case.device_bytes or need.dram_bytes > case.dram_bytes
        return
    assert plan.device_bytes <= case.device_bytes
    assert plan.host_bytes <= case.dram_bytes
    assert plan.num_blocks >= -(-case.max_model_len // case.block_size) + 1
    more_device = plan.device_bytes + plan.device_bytes_per_block
    more_host = plan.host_bytes + plan.host_bytes_per_block
    assert more_device > case.device_bytes or more_host > case.dram_bytes
    binding = more_device > case.device_bytes if plan.limit == "device" else more_host > case.dram_bytes
    assert binding


@given(cases())
def test_required_budget_is_exact(case):
    """A plan's exact budgets give the same plan; one byte less gives one block less, or an error."""
    plan = plan_or_none(case)
    assume(plan is not None)
    need = required_budget(case, plan.tokens)
    exact = replace(case, device_bytes=need.device_bytes, dram_bytes=need.dram_bytes)
    assert plan_capacity(exact).num_blocks == plan.num_blocks
    for less in (
        replace(exact, device_bytes=need.device_bytes - 1),
        replace(exact, dram_bytes=need.dram_bytes - 1),
    ):
        smaller = plan_or_none(less)
        assert smaller is None or smaller.num_blocks == plan.num_blocks - 1


@given(
    cases(),
    st.sampled_from(["device_bytes", "dram_bytes", "max_num_seqs", "prefill_buffers", "topk_buffer_size"]),
    st.integers(1, 10**7),
)
def test_monotone(case, field, step):
    """More budget never means fewer blocks; more rows, slots or buffers never mean more."""
    more = step if field.endswith("_bytes") else case.ways * step if field == "topk_buffer_size" else step % 9
    before, after = plan_or_none(case), plan_or_none(replace(case, **{field: getattr(case, field) + more}))
    blocks = [plan.num_blocks if plan else 0 for plan in (before, after)]
    assert blocks == (sorted(blocks) if field.endswith("_bytes") else sorted(blocks, reverse=True))


@given(cases())
def test_keeping_the_device_cache_never_helps(case):
    off, on = (plan_or_none(replace(case, keep_device=keep)) for keep in (False, True))
    assert on is None or (off is not None and on.num_blocks <= off.num_blocks)


@given(cases())
def test_factor_stays_below_the_promise(case):
    """Hot pools and buffers only cost: the factor can't beat what the geometry allows, null blocks aside."""
    plan = plan_or_none(case)
    assume(plan is not None and plan.baseline_blocks > 1)
    assert plan.num_blocks < (plan.baseline_blocks + 1) * plan.asymptotic_factor
    assert plan.tokens == (plan.num_blocks - 1) * case.block_size


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(cases())
def test_the_named_fixes_work(case):
    """Whatever an error tells the user to set is accepted when they set it."""
    try:
        plan_capacity(case)
    except CapacityError as error:
        fixes = error.fix
    else:
        assume(False)
    need = required_budget(case, case.max_model_len)
    for fix in fixes.split(", or "):
        words = fix.split()
        if words[0] == "raise":
            fixed = replace(case, device_bytes=int(words[-4]))
        elif words[0] == "set":
            fixed = replace(case, dram_bytes=int(words[-1]) * GIB)
        else:
            fixed = replace(case, **{words[1].split(".")[-1]: int(words[-1])})
        # each fix cures the budget that the error is about; the other one may be too small as well
        other = "dram_bytes" if "kv-cache-memory" in fixes else "device_bytes"
        fixed = replace(fixed, **{other: max(getattr(fixed, other), getattr(need, other))})
        plan_capacity(fixed)


# ---------------------------------------------------------------------------------------- by hand, in numbers


def test_glm_by_hand():
    """GLM-5.3 in BF16, 40 GiB for KV: every term worked out from the layout, not by the code under test."""
    case = inputs()
    plan = plan_capacity(case)
    assert plan.hot_bytes == 32 * 4096 * 1152 * 78
    assert plan.residency_bytes == 21 * 32 * (4096 * 4 + 4096 + 256 + 4)
    assert plan.plan_bytes == 4 * (32 * 2048 * 3 + 32 + 32) + 48
    assert plan.staging_bytes == 0
    assert plan.indexer_bytes_per_block == plan.device_bytes_per_block == 128 * 256 * 21
    assert plan.host_bytes_per_block == 128 * 1152 * 78
    fixed = plan.hot_bytes + plan.residency_bytes + plan.plan_bytes
    assert plan.device_limited_blocks == (40 * GIB - fixed) // (128 * 256 * 21)
    assert plan.dram_limited_blocks == 512 * GIB // (128 * 1152 * 78)
    assert plan.num_blocks == plan.device_limited_blocks
    assert plan.limit == "device"
    assert plan.baseline_blocks == 40 * GIB // (128 * (1152 * 78 + 256 * 21))
    assert plan.asymptotic_factor == pytest.approx(1 + 1152 * 78 / (256 * 21))
    assert plan.factor == plan.tokens / plan.baseline_tokens
    assert 9 < plan.factor < plan.asymptotic_factor < 18


def test_terms_follow_their_keys():
    base = inputs()
    doubled = replace(base, max_num_seqs=64)
    assert doubled.hot_bytes == 2 * base.hot_bytes
    assert doubled.residency_bytes == 2 * base.residency_bytes
    assert replace(base, ways=32).residency_bytes == base.residency_bytes - 21 * 32 * 128
    drafts = replace(base, geometry=geometry(drafts=3, mtp=1))
    assert drafts.hot_bytes == 32 * 4096 * 1152 * 79
    assert drafts.residency_bytes == 22 * 32 * (4096 * 5 + 256 + 4)
    assert drafts.plan_bytes == 4 * (32 * 4 * 2048 * 3 + 32 * 4 + 32) + 48


def test_staging_is_whole_blocks_of_one_layer():
    assert inputs(prefill_buffers=3, max_model_len=1000).staging_bytes == 3 * 1024 * 1152
    assert inputs(prefill_buffers=3, max_model_len=1024).staging_bytes == 3 * 1024 * 1152
    plan = plan_capacity(inputs(prefill_buffers=2))
    assert plan.staging_bytes == 2 * 131072 * 1152
    per_block = 128 * 256 * 21
    without = plan_capacity(inputs())
    assert without.num_blocks - plan.num_blocks in {2 * 131072 * 1152 // per_block + more for more in (0, 1)}


def test_keep_device_puts_both_caches_on_the_device():
    plan = plan_capacity(inputs(keep_device=True))
    assert plan.device_bytes_per_block == plan.indexer_bytes_per_block + plan.host_bytes_per_block
    assert plan.num_blocks < plan.baseline_blocks


def test_host_memory_can_be_the_limit():
    plan = plan_capacity(inputs(dram_bytes=64 * GIB))
    assert plan.limit == "dram"
    assert plan.num_blocks == plan.dram_limited_blocks == 64 * GIB // (128 * 1152 * 78)


def test_logical_bytes_give_vllm_the_same_blocks():
    plan = plan_capacity(inputs())
    page_bytes = 128 * (78 * 1152 + 21 * 256)
    assert plan.logical_bytes // page_bytes == plan.num_blocks
    assert (plan.logical_bytes - 1) // page_bytes == plan.num_blocks - 1


def test_null_block_counts():
    case = inputs(max_model_len=128)
    need = required_budget(case, 128)
    assert need.dram_bytes == 2 * 128 * 1152 * 78
    plan = plan_capacity(replace(case, device_bytes=need.device_bytes, dram_bytes=need.dram_bytes))
    assert (plan.num_blocks, plan.tokens) == (2, 128)


def test_gib_of_a_budget_rounds_up():
    need = required_budget(inputs(), 10**6)
    assert (need.dram_gib - 1) * GIB < need.dram_bytes <= need.dram_gib * GIB


def test_no_baseline_at_all():
    case = inputs(max_model_len=128, max_num_seqs=1, topk_buffer_size=16, geometry=geometry(topk=16))
    plan = plan_capacity(replace(case, device_bytes=required_budget(case, 128).device_bytes))
    assert plan.baseline_tokens == 0
    assert plan.factor == float("inf")


def test_device_error_names_every_key_that_helps():
    with pytest.raises(CapacityError) as caught:
        plan_capacity(inputs(device_bytes=12 * GIB, topk_buffer_size=8192))
    text = str(caught.value)
    assert isinstance(caught.value, ConfigError)
    assert text.startswith(f"kv_cache_memory_bytes={12 * GIB}: one request of max_model_len 131072 needs ")
    for part in (
        "topk_buffer_size 8192 * max_num_seqs 32",
        "--kv-cache-memory-bytes",
        "lower sparse_kv_offload_config.topk_buffer_size to 4096",
        "lower max_num_seqs to 16",
    ):
        assert part in text
    assert "lower max_model_len" not in text  # the hot pools alone are too big
    assert "\n" not in text


def test_a_smaller_hot_pool_is_only_offered_if_it_holds_a_step():
    """7 GiB would hold pools of 2048 slots, but a step with a draft needs 2 * 2048."""
    for drafts, offered in ((0, True), (1, False)):
        with pytest.raises(CapacityError) as caught:
            plan_capacity(inputs(geometry=geometry(drafts=drafts), device_bytes=7 * GIB))
        assert ("lower sparse_kv_offload_config.topk_buffer_size to 2048" in str(caught.value)) == offered


def test_dram_error_names_the_key():
    with pytest.raises(CapacityError) as caught:
        plan_capacity(inputs(dram_bytes=8 * GIB))
    need = required_budget(inputs(), 131072).dram_bytes
    key = "sparse_kv_offload_config.dram_size_per_dp_GB"
    assert str(caught.value) == (
        f"{key}=8: one request of max_model_len 131072 needs {need} bytes of host memory. "
        f"Fix: set {key} to 11, or lower max_model_len to 95360"
    )


@pytest.mark.parametrize("key", ["block_size", "max_num_seqs", "max_model_len", "topk_buffer_size", "ways"])
def test_senseless_inputs(key):
    with pytest.raises(CapacityError, match=f"{key}=0: must be at least 1"):
        plan_capacity(inputs(**{key: 0}))


def test_ragged_sets():
    with pytest.raises(CapacityError, match="topk_buffer_size=4100: must be divisible by ways 16"):
        plan_capacity(inputs(topk_buffer_size=4100))


# ---------------------------------------------------------------------------------- against what is allocated


@pytest.mark.parametrize(
    ("ways", "drafts", "placement"), [(16, 0, "one_set"), (32, 3, "one_set"), (16, 0, "two_sets")]
)
def test_metadata_terms_are_what_the_ops_allocate(ways, drafts, placement):
    pytest.importorskip("torch")
    ops = pytest.importorskip("vllm_kvoffload.ops")
    model = geometry(drafts=drafts, mtp=1 if drafts else 0)
    case = inputs(geometry=model, max_num_seqs=3, topk_buffer_size=8192, ways=ways)
    case = replace(case, placement=placement)
    residency = ops.Residency.allocate(3, 8192, ways, placement=placement)
    assert case.residency_bytes == len(model.groups) * residency.nbytes
    assert case.plan_bytes == ops.PlanOut(3 * (1 + drafts), 3, 2048, 1 + drafts).nbytes
