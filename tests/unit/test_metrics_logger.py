"""The class that vLLM loads to show our metrics beside its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.unit.stats_writer import Writer
from vllm_kvoffload.metrics import StatsChannel
from vllm_kvoffload.metrics import reader as reader_module
from vllm_kvoffload.metrics.fields import PREFILL

pytestmark = pytest.mark.timeout(120)

imports_vllm = pytest.mark.slow  # seconds by itself, and more on a busy machine


def vllm_config(
    instance_id: str, enabled: bool = True, tp: int = 1, additional: object = None, transfer: Any = None
) -> Any:
    """The part of a VllmConfig that the class reads."""
    return SimpleNamespace(
        kv_transfer_config=transfer,
        instance_id=instance_id,
        additional_config={"sparse_kv_offload_config": {"enabled": enabled}}
        if additional is None
        else additional,
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        model_config=SimpleNamespace(served_model_name="glm"),
    )


@pytest.fixture
def stat_logger(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("vllm")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    from vllm_kvoffload.metrics import stat_logger as module

    monkeypatch.setattr(module, "REGISTRY", CollectorRegistry(auto_describe=True))
    monkeypatch.setattr(module, "_registered", [])
    return module


@imports_vllm
def test_entry_point_names_a_class_that_vllm_takes(stat_logger: Any) -> None:
    tomllib = pytest.importorskip("tomllib")
    from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP
    from vllm.v1.metrics.loggers import StatLoggerBase

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][STAT_LOGGER_PLUGINS_GROUP].items()
    others = [
        key
        for group in ("vllm.general_plugins", "vllm.platform_plugins")
        for key in project["entry-points"][group]
    ]
    assert name not in others  # so VLLM_PLUGINS can leave it out alone
    loaded = metadata.EntryPoint(name, value, STAT_LOGGER_PLUGINS_GROUP).load()
    assert loaded is stat_logger.OffloadStatLogger
    assert issubclass(loaded, StatLoggerBase)


@imports_vllm
@pytest.mark.parametrize(
    "additional",
    [
        {"sparse_kv_offload_config": {"enabled": False}},
        {},
        {"sparse_kv_offload_config": {"enabld": True}},
        object(),
    ],
)
def test_without_offload_nothing_is_registered(
    stat_logger: Any, instance: str, additional: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_search", lambda *_: pytest.fail("looked into /proc"))
    logger = stat_logger.OffloadStatLogger(vllm_config(instance, additional=additional), engine_indexes=[0])
    logger.log_engine_initialized()
    logger.record(None, None, engine_idx=0)
    logger.log()
    assert generate_latest(stat_logger.REGISTRY) == b""


OPTIONS: dict[str, Any] = {
    "AscendStoreConnector": {"backend": "local", "use_layerwise": True},
    "SfaRemoteD2HConnector": {"transfer_backend": "nixl"},
}


def transfer(name: str, role: str, extra: object = None) -> Any:
    extra = extra or OPTIONS.get(name, {})
    return SimpleNamespace(kv_connector=name, kv_role=role, kv_port=14579, kv_connector_extra_config=extra)


def multi(role: str, *names: str) -> Any:
    return transfer(
        "MultiConnector",
        role,
        {
            "connectors": [
                {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": OPTIONS.get(name, {})}
                for name in names
            ]
        },
    )


@imports_vllm
@pytest.mark.parametrize(
    ("enabled", "connector", "parts"),
    [
        (True, None, {"offload"}),
        (False, transfer("SfaRemoteD2HConnector", "kv_producer"), {"prefill"}),
        (True, transfer("SfaRemoteD2HConnector", "kv_consumer"), {"offload", "decode"}),
        (False, transfer("AscendStoreConnector", "kv_producer"), {"store"}),
        (False, transfer("NixlConnector", "kv_both"), set()),
        (
            False,
            multi("kv_producer", "SfaRemoteD2HConnector", "AscendStoreConnector"),
            {"prefill", "store"},
        ),
        (False, multi("kv_both", "NixlConnector", "X"), set()),
        (False, transfer("MultiConnector", "kv_producer", {"connectors": 7}), set()),
    ],
)
def test_the_parts_that_count_follow_the_configuration(
    stat_logger: Any, enabled: bool, connector: Any, parts: set[str]
) -> None:
    config = vllm_config("x", enabled=enabled, transfer=connector)
    assert stat_logger.counting_parts(config) == parts


@imports_vllm
def test_a_prefill_engine_without_offload_has_its_series(stat_logger: Any, instance: str) -> None:
    channel = StatsChannel(PREFILL, instance, 0, 0)
    channel.publish({"open_transfers": 1})
    config = vllm_config(instance, enabled=False, transfer=transfer("SfaRemoteD2HConnector", "kv_producer"))
    stat_logger.OffloadStatLogger(config, engine_indexes=[0])
    text = generate_latest(stat_logger.REGISTRY).decode()
    assert 'vllm:kvoffload_open_transfers{engine="0",model_name="glm",rank="0"} 1.0' in text
    assert "hits" not in text


@imports_vllm
def test_multiprocess_mode_says_what_to_do(
    stat_logger: Any, instance: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "somewhere")
    stat_logger.OffloadStatLogger(vllm_config(instance), engine_indexes=[0]).log()
    assert generate_latest(stat_logger.REGISTRY) == b""
    assert "--api-server-count 1" in caplog.text


@imports_vllm
def test_vllms_manager_serves_all_engines_through_one_object(
    stat_logger: Any,
    start: Callable[..., Writer],
    instance: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.v1.metrics import loggers, prometheus

    class NoSeries(loggers.AggregateStatLoggerBase):
        """In place of vLLM's own series, which need a whole VllmConfig; it clears the registry as they do."""

        def __init__(self, *_: object) -> None:
            prometheus.unregister_vllm_metrics()  # type: ignore[no-untyped-call]

        def record(self, *_: object, **__: object) -> None: ...

        def log_engine_initialized(self) -> None: ...

    monkeypatch.setattr(loggers, "PrometheusStatLogger", NoSeries)
    monkeypatch.setattr(prometheus, "REGISTRY", stat_logger.REGISTRY)
    writers = [start(instance, dp, 0) for dp in range(2)]
    for generation in range(2):  # a second engine in the process takes the first one's place
        manager = loggers.StatLoggerManager(
            vllm_config(instance),
            engine_idxs=[0, 1],
            custom_stat_loggers=[stat_logger.OffloadStatLogger],
            enable_default_loggers=False,
        )
        manager.log_engine_initialized()  # type: ignore[no-untyped-call]
        for engine in range(2):
            manager.record(None, None, engine_idx=engine)
        manager.record_sleep_state(0, 0)
        manager.record_admission_rejection("max_num_queued_reqs")
        caplog.clear()
        manager.log()  # type: ignore[no-untyped-call]
        assert [record.getMessage()[:10] for record in caplog.records] == ["Engine 000", "Engine 001"]
        manager.log()  # type: ignore[no-untyped-call]  # nothing happened since
        assert len(caplog.records) == 2, generation
        text = generate_latest(stat_logger.REGISTRY).decode()
        assert text.count("vllm:kvoffload_hits_total{") == 2
    for writer in writers:
        writer.kill()
    manager.log()  # type: ignore[no-untyped-call]
    assert "hits_total{" not in generate_latest(stat_logger.REGISTRY).decode()
