"""`kvoffload conf` and `kvoffload meta`: MemCache's configuration files and its MetaService.

The store package's dependencies (numpy) are imported only by the command that runs.
"""

from __future__ import annotations

import os
import shlex
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_kvoffload.settings.errors import ConfigError

if TYPE_CHECKING:
    from vllm_kvoffload.store.memcache_conf import Endpoint

READY_S = 30.0
POLL_S = 0.05

Host = Annotated[str, typer.Option(help="Address of the MetaService's machine, as all nodes reach it.")]
Port = Annotated[int, typer.Option(help="Port of the MetaService.")]
StoreHost = Annotated[str | None, typer.Option(help="Address of the config store. Default: --meta-host.")]
StorePort = Annotated[int, typer.Option(help="Port of the config store, which the MetaService runs too.")]
MetricsPort = Annotated[int, typer.Option(help="Port of its metrics (HTTP), on the loopback interface.")]
Lease = Annotated[int, typer.Option(help="MemCache's own leases, milliseconds.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warn or error.")]


def add_to(app: typer.Typer) -> None:
    """Registers both commands."""
    app.command("conf")(conf)
    app.command("meta")(meta)


@contextmanager
def _errors(command: str) -> Iterator[None]:
    """Prints expected errors as one line and exits with code 2."""
    try:
        yield
    except (ConfigError, OSError) as error:
        typer.echo(f"kvoffload {command}: {error}", err=True)
        raise typer.Exit(2) from error


def conf(
    *,
    out: Annotated[Path | None, typer.Option(help="Folder for the two files.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Instead: a folder whose two files are checked against each other.")
    ] = None,
    meta_host: Host = "127.0.0.1",
    meta_port: Port = 5000,
    config_store_host: StoreHost = None,
    config_store_port: StorePort = 6000,
    metrics_port: MetricsPort = 8000,
    nodes: Annotated[int, typer.Option(help="Machines whose engines share the store.")] = 1,
    services_per_node: Annotated[
        int, typer.Option(help="Engine processes of a machine: one per NPU that prefills.")
    ] = 1,
    world_size: Annotated[
        int, typer.Option(help="Most engine processes ever; 0: as many as there are now.")
    ] = 0,
    protocol: Annotated[
        str,
        typer.Option(help="device_sdma (A3, HCCS), device_rdma (A2 and others, RoCE), host_shm or host_tcp."),
    ] = "device_sdma",
    dram_size: Annotated[
        str, typer.Option(help="Host memory that each engine process contributes.")
    ] = "10GB",
    lease_ttl_ms: Lease = 30000,
    log_level: LogLevel = "error",
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write mmc-meta.conf and mmc-local.conf for a cluster, or check such files."""
    from vllm_kvoffload.store import memcache_conf as files

    with _errors("conf"):
        if (out is None) == (check is None):
            rule = "give either a folder to write to or one to check"
            raise ConfigError("out", out and str(out), rule, "use --out FOLDER or --check FOLDER")
        if check is not None:
            local = files.check_pair(
                check / files.META_FILE, check / files.LOCAL_FILE, nodes * services_per_node
            )
            typer.echo(f"{files.META_FILE} and {files.LOCAL_FILE} fit: {local.protocol}, {local.meta.url}")
            return
        assert out is not None
        cluster = files.Cluster(
            meta=files.Endpoint(meta_host, meta_port),
            config_store=files.Endpoint(config_store_host or meta_host, config_store_port),
            metrics=files.Endpoint("127.0.0.1", metrics_port),
            nodes=nodes,
            services_per_node=services_per_node,
            world_size=world_size,
            protocol=protocol,
            dram_size=dram_size,
            lease_ttl_ms=lease_ttl_ms,
            log_level=log_level,
        )
        _write(files.render(cluster), out, force=force)
    for variable, name in ((files.META_VARIABLE, files.META_FILE), (files.LOCAL_VARIABLE, files.LOCAL_FILE)):
        typer.echo(f"export {variable}={shlex.quote(str((out / name).absolute()))}")
    typer.echo("export PYTHONHASHSEED=0")


def _write(files: dict[str, str], folder: Path, *, force: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        rule = f"{' and '.join(there)} exist there"
        raise ConfigError("out", str(folder), rule, "choose another folder, or replace them with --force")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def meta(
    *,
    config: Annotated[
        Path | None,
        typer.Option(help="mmc-meta.conf. Default: $MMC_META_CONFIG_PATH; without either: by the options."),
    ] = None,
    meta_host: Host = "127.0.0.1",
    meta_port: Port = 5000,
    config_store_host: StoreHost = None,
    config_store_port: StorePort = 6000,
    metrics_port: MetricsPort = 8000,
    lease_ttl_ms: Lease = 30000,
    log_level: LogLevel = "error",
) -> None:
    """Run MemCache's MetaService until a signal."""
    from vllm_kvoffload.store import memcache_conf as files

    with _errors("meta"), ExitStack() as stack:
        given = config or (
            Path(os.environ[files.META_VARIABLE]) if os.environ.get(files.META_VARIABLE) else None
        )
        if given is None:
            cluster = files.Cluster(
                meta=files.Endpoint(meta_host, meta_port),
                config_store=files.Endpoint(config_store_host or meta_host, config_store_port),
                metrics=files.Endpoint("127.0.0.1", metrics_port),
                lease_ttl_ms=lease_ttl_ms,
                log_level=log_level,
            )
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvoffload-meta-"))
            given = Path(folder) / files.META_FILE
            given.write_text(files.render(cluster)[files.META_FILE], encoding="utf-8")
        raise typer.Exit(_serve(given))


def _serve(path: Path) -> int:
    from vllm_kvoffload.store import memcache_conf as files

    service, store = files.read_meta(path)
    for key, endpoint in (("meta_port", service), ("config_store_port", store)):
        _require_free(key, endpoint)
    metrics = files.read_conf(files.META_VARIABLE, path).get("ock.mmc.meta_service.metrics_url", "")
    library = _load()
    os.environ[files.META_VARIABLE] = str(path)
    stop = threading.Event()
    threading.Thread(target=_announce, args=(service, store, metrics, stop), daemon=True).start()
    started = time.monotonic()
    library.MetaService.main()
    stop.set()
    if time.monotonic() - started < READY_S:
        typer.echo(
            "kvoffload meta: the MetaService ended at once; is another one running on this machine? There "
            "can be one per machine (its lock file is in /tmp)",
            err=True,
        )
        return 1
    return 0


def _announce(service: Endpoint, store: Endpoint, metrics: str, stop: threading.Event) -> None:
    deadline = time.monotonic() + READY_S
    while not stop.wait(POLL_S) and time.monotonic() < deadline:
        try:
            for endpoint in (service, store):
                socket.create_connection((endpoint.host, endpoint.port), timeout=1.0).close()
        except Exception:  # any error: it is not ready
            continue
        typer.echo(f"MetaService ready at {service.url}, config store {store.url}, metrics {metrics}")
        return


def _require_free(key: str, endpoint: Endpoint) -> None:
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((endpoint.host, endpoint.port))
        except (OSError, UnicodeError, ValueError) as error:  # ValueError: not a host name
            why = getattr(error, "strerror", None) or error
            rule = f"{endpoint.url} can't be listened at on this machine: {why}"
            fix = "stop the process there, choose another port, or run this on the machine of that address"
            raise ConfigError(key, endpoint.port, rule, fix) from error


def _load() -> Any:
    try:
        return import_module("memcache_hybrid")
    except (ImportError, OSError) as error:
        fix = "install the extra: pip install '.[store]' where this repository is"
        raise ConfigError("memcache_hybrid", None, f"can't be imported: {error}", fix) from error
