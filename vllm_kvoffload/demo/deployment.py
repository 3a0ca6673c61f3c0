"""Servers of the demo that serve together: a single engine, or prefill, decode and the proxy.

`Deployment.stop` ends all of them, in any state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_kvoffload.demo.server import (
    Server,
    ServerError,
    ServerOptions,
    command_line,
    free_ports,
    proxy_command,
    transfer_options,
    with_store,
)

TAIL_LINES_OF_MANY = 12
"""Lines of each log shown for a failure that no single server caused."""


class Deployment:
    """Commands that are started together in order, and ended in reverse.

    Args:
        title: as in "Starting TITLE".
        commands: by name: the port and the command of a server. The last one takes the requests.
        measured: name of the engine whose /metrics the report shows.
        folder: for the logs, NAME.log.
        stores: name of the engine with a store, None without one.
    """

    def __init__(
        self,
        title: str,
        commands: Mapping[str, tuple[int, list[str]]],
        measured: str,
        folder: Path,
        stores: str | None = None,
    ) -> None:
        self.title = title
        self._commands, self._measured, self._folder, self._stores = commands, measured, folder, stores
        self._servers: dict[str, Server] = {}

    @property
    def port(self) -> int:
        """Port for requests."""
        return list(self._commands.values())[-1][0]

    @property
    def metrics_port(self) -> int:
        """Port of the /metrics shown in the report."""
        return self._commands[self._measured][0]

    @property
    def store_metrics_port(self) -> int | None:
        """Metrics port of the engine with a store, None without one."""
        return None if self._stores is None else self._commands[self._stores][0]

    @property
    def logs(self) -> list[Path]:
        """Logs of all servers."""
        return [server.log for server in self._servers.values()]

    def start(self) -> None:
        """Starts all servers; from the main thread, as `Server` requires."""
        for name, (port, command) in self._commands.items():
            self._servers[name] = Server(command, self._folder / f"{name}.log", port)

    def wait_ready(self, deadline_s: float, on_wait: Callable[[], None]) -> None:
        """Waits until all are ready. Raises ServerError after `deadline_s`, or when one of them ends."""
        end_s = time.monotonic() + deadline_s

        def wait() -> None:
            self.check_alive()
            on_wait()

        for name, server in self._servers.items():
            try:
                server.wait_ready(max(0.0, end_s - time.monotonic()), wait)
            except ServerError as error:
                raise ServerError(f"{self._named(name)}{error}") from error

    def check_alive(self) -> None:
        """Raises ServerError when a server has ended."""
        for name, server in self._servers.items():
            try:
                server.check_alive()
            except ServerError as error:
                raise ServerError(f"{self._named(name)}{error}") from error

    def stop(self, grace_s: float) -> list[str]:
        """Ends all servers, the last one first. Returns problems; see `Server.stop`."""
        found: list[str] = []
        try:
            for name, server in reversed(self._servers.items()):
                found += [f"{self._named(name)}{problem}" for problem in server.stop(grace_s)]
        finally:  # on an interrupt: no grace for the others
            for server in self._servers.values():
                server.stop(0.0)
        return found

    def tails(self) -> str:
        """Returns the ends of the logs: of the server that has ended, if any, else of all."""
        dead = [server for server in self._servers.values() if _has_ended(server)]
        shown = dead or list(self._servers.values())
        lines = {} if len(shown) == 1 else {"lines": TAIL_LINES_OF_MANY}
        return "\n".join(f"--- end of {server.log} ---\n{server.tail(**lines)}" for server in shown)

    def _named(self, name: str) -> str:
        return f"{name}: " if len(self._servers) > 1 else ""


def _has_ended(server: Server) -> bool:
    try:
        server.check_alive()
    except ServerError:
        return True
    return False


def alone(name: str, title: str, options: ServerOptions, folder: Path) -> Deployment:
    """One server that does prefill and decode."""
    return Deployment(title, {name: (options.port, command_line(options))}, name, folder)


def disaggregated(
    options: ServerOptions, offload: Mapping[str, Any], store: Mapping[str, Any] | None, folder: Path
) -> Deployment:
    """A prefill server, a decode server with offload, and the proxy.

    Args:
        options: of both servers; its `port` is the proxy's.
        store: of prefill, as for `with_store`; None for none.
    """
    prefill_port, decode_port, kv_port = free_ports(3)
    backend = "memfabric" if options.npu else "nixl"
    transfer = transfer_options("kv_producer", kv_port, backend)
    if store is not None:
        transfer = with_store(transfer, store)
    prefill = replace(options, port=prefill_port, transfer=transfer)
    decode = replace(
        options,
        port=decode_port,
        transfer=transfer_options("kv_consumer", kv_port, backend),
        offload=offload,
    )
    commands = {
        "prefill": (prefill_port, command_line(prefill)),
        "decode": (decode_port, command_line(decode)),
        "proxy": (options.port, proxy_command(options.port, [prefill_port], [decode_port])),
    }
    with_a_store = "" if store is None else " with a store"
    return Deployment(
        f"prefill{with_a_store}, decode with offload, and the proxy",
        commands,
        "decode",
        folder,
        stores=None if store is None else "prefill",
    )
