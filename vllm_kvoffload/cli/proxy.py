"""`kvoffload proxy`: options of the proxy in front of prefill and decode engines."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from vllm_kvoffload.proxy.settings import (
    Deadlines,
    ProxyLimits,
    ProxySettings,
    SettingsError,
    addresses,
    proxy_settings,
)
from vllm_kvoffload.proxy.tls import EngineTls, Tls

KEY_VARIABLE = "KVOFFLOAD_PROXY_API_KEY"
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
    "head": "a client's request line and headers",
}
LIMIT_HELP = {
    "head_bytes": "bytes of a request line and its headers",
    "head_fields": "headers of a request",
    "uri_bytes": "bytes of a request's target",
    "connections": "connections of clients",
}


class Parser(argparse.ArgumentParser):
    """Prints errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. Fix: see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """Defines the flags of vLLM-Ascend's layerwise proxy, and ours."""
    made = Parser(
        prog="kvoffload proxy",
        description="OpenAI-compatible proxy in front of prefill and decode engines.",
        epilog=f"The admin token is taken from {TOKEN_VARIABLE}; without it there is no /admin."
        f" {KEY_VARIABLE} is an API key like --api-key, which other users of the machine can't see.",
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
    made.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        help="clients must send one of these as a bearer token to /v1; repeatable",
    )
    _add_tls(made)
    limits = made.add_argument_group("limits", "on the resources that clients may use")
    for name, what in LIMIT_HELP.items():
        default = getattr(ProxyLimits, name)
        flag = f"--max-{name.replace('_', '-')}"
        limits.add_argument(flag, type=int, default=default, help=f"{what} (default: {default})")
    group = made.add_argument_group("deadlines", "in seconds")
    for name, what in DEADLINE_HELP.items():
        flag = f"--{name.replace('_', '-')}-timeout"
        default = getattr(Deadlines, name)
        group.add_argument(flag, type=float, default=default, help=f"of {what} (default: {default:g})")
    return made


def _add_tls(made: argparse.ArgumentParser) -> None:
    clients = made.add_argument_group("TLS to clients", "and to decode engines that post; flags as vLLM's")
    clients.add_argument("--ssl-keyfile", help="PEM file of the private key (default: in --ssl-certfile)")
    clients.add_argument("--ssl-certfile", help="PEM file of the certificate and its chain; turns TLS on")
    clients.add_argument("--ssl-ca-certs", help="PEM file of the authorities of clients' certificates")
    clients.add_argument(
        "--ssl-cert-reqs",
        type=int,
        default=0,
        help="0: clients need no certificate, 1: they may show one, 2: they must (default: %(default)s)",
    )
    engines = made.add_argument_group("TLS to engines")
    engines.add_argument(
        "--engine-scheme", choices=("http", "https"), default="http", help="(default: %(default)s)"
    )
    engines.add_argument("--engine-ca-certs", help="PEM file of trusted authorities (default: the system's)")
    engines.add_argument(
        "--engine-certfile", help="PEM file of the proxy's own certificate, for engines that require one"
    )
    engines.add_argument("--engine-keyfile", help="PEM file of its key")


def _tls(given: argparse.Namespace) -> Tls | None:
    if given.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(given, name):
                raise SettingsError(f"--{name.replace('_', '-')}: needs --ssl-certfile, which turns TLS on")
        return None
    return Tls(given.ssl_certfile, given.ssl_keyfile, given.ssl_ca_certs, given.ssl_cert_reqs)


def _engine_tls(given: argparse.Namespace) -> EngineTls | None:
    made = EngineTls(given.engine_ca_certs, given.engine_certfile, given.engine_keyfile)
    if given.engine_scheme == "https":
        return made
    if made != EngineTls():
        raise SettingsError(
            "--engine-ca-certs, --engine-certfile, --engine-keyfile: need --engine-scheme https"
        )
    return None


def _api_keys(given: argparse.Namespace) -> tuple[str, ...]:
    key = os.environ.get(KEY_VARIABLE)
    return (*given.api_key, key) if key else tuple(given.api_key)


def settings_of(arguments: Sequence[str]) -> ProxySettings:
    """Returns validated settings. Raises ``SettingsError``; ``SystemExit`` for argparse errors and --help."""
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
        limits=ProxyLimits(**{name: getattr(given, f"max_{name}") for name in LIMIT_HELP}),
        tls=_tls(given),
        engine_tls=_engine_tls(given),
        api_keys=_api_keys(given),
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
