"""`kvoffload proxy`: options of the proxy in front of prefill and decode engines."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from vllm_kvoffload.proxy.settings import Deadlines, ProxySettings, SettingsError, addresses, proxy_settings

TOKEN_VARIABLE = "KVOFFLOAD_PROXY_ADMIN_TOKEN"
DEADLINE_HELP = {
    "connect": "a connection to an engine",
    "first_output": "a stream's first output: queueing, rendezvous and prefill",
    "idle": "the time between two parts of an answer",
    "answer": "a whole answer that isn't streamed",
    "prefill": "a prefill request",
    "request_body": "the time between two parts of a client's request",
    "client_stall": "a client that doesn't read its answer",
    "control": "/v1/models and /tokenize",
    "probe": "GET /health of an engine; two in a row take it out",
    "drain": "requests under way after SIGTERM",
}


class Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. Fix: see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The flags of vLLM-Ascend's layerwise proxy, and ours."""
    made = Parser(
        prog="kvoffload proxy",
        description="OpenAI-compatible proxy in front of prefill and decode engines.",
        epilog=f"The admin token is taken from {TOKEN_VARIABLE}; without it there is no /admin.",
    )
    made.add_argument("--host", default="localhost", help="address to listen on (default: %(default)s)")
    made.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    made.add_argument(
        "--advertise-host", help="address at which decode engines reach this proxy (default: --host)"
    )
    for role, port in (("prefiller", 8001), ("decoder", 8002)):
        made.add_argument(
            f"--{role}-hosts", nargs="+", default=["localhost"], help="one per engine (default: localhost)"
        )
        made.add_argument(
            f"--{role}-ports", nargs="+", type=int, default=[port], help=f"one per engine (default: {port})"
        )
    made.add_argument(
        "--max-retries", type=int, default=3, help="dispatches after a failure (default: %(default)s)"
    )
    made.add_argument(
        "--probe-interval",
        type=float,
        default=3.0,
        help="seconds between GET /health of engines; 0: never (default: %(default)g)",
    )
    made.add_argument(
        "--max-held-bytes",
        type=int,
        default=1 << 30,
        help="bytes of requests that are held at a time (default: %(default)s)",
    )
    made.add_argument(
        "--metaserver-port",
        type=int,
        help="a port of its own for the posts of decode engines (default: --port)",
    )
    made.add_argument("--admin-port", type=int, help="a port of their own for the /admin endpoints")
    group = made.add_argument_group("deadlines", "in seconds")
    for name, what in DEADLINE_HELP.items():
        flag = f"--{name.replace('_', '-')}-timeout"
        default = getattr(Deadlines, name)
        group.add_argument(flag, type=float, default=default, help=f"of {what} (default: {default:g})")
    return made


def settings_of(arguments: Sequence[str]) -> ProxySettings:
    """Checked settings. Raises ``SettingsError``; ``SystemExit`` for what argparse refuses and for --help."""
    given = parser().parse_args(arguments)
    deadlines = {name: getattr(given, f"{name}_timeout") for name in DEADLINE_HELP}
    for name, seconds in deadlines.items():
        if not seconds > 0:
            raise SettingsError(f"--{name.replace('_', '-')}-timeout: {seconds:g} must be above 0")
    return proxy_settings(
        host=given.host,
        port=given.port,
        prefillers=addresses(given.prefiller_hosts, given.prefiller_ports, "prefiller"),
        decoders=addresses(given.decoder_hosts, given.decoder_ports, "decoder"),
        advertise_host=given.advertise_host,
        deadlines=Deadlines(**deadlines),
        max_retries=given.max_retries,
        max_held_bytes=given.max_held_bytes,
        probe_interval=given.probe_interval,
        admin_token=os.environ.get(TOKEN_VARIABLE),
        admin_port=given.admin_port,
        metaserver_port=given.metaserver_port,
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the proxy until a signal."""
    made = parser()
    try:
        settings = settings_of(arguments)
    except SettingsError as error:
        made.exit(2, f"kvoffload proxy: {error}\n")
    try:
        from vllm_kvoffload.proxy.server import run
    except ModuleNotFoundError as error:
        made.exit(
            2,
            f"kvoffload proxy: {error}; install the extra: pip install '.[proxy]' where this repository is\n",
        )
    run(settings)
    return 0
