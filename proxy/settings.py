"""Start-up settings of the proxy: addresses, deadlines, limits. No I/O."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from vllm_kvoffload.hostnames import HostError, canonical_host
from vllm_kvoffload.proxy.tls import EngineTls, Tls, TlsError

METASERVER = "/v1/metaserver"
PROBE_JITTER = 1.2  # longest time between two probes, in intervals
WILDCARDS = frozenset({"", "0.0.0.0", "::", "0:0:0:0:0:0:0:0", "*"})


class SettingsError(ValueError):
    """An invalid setting; names it and the remedy."""


@dataclass(frozen=True, order=True)
class Address:
    """An engine's address. ``host`` is a name, an IPv4 or a bare IPv6 address."""

    host: str
    port: int
    # ``host:port`` for URLs and Host headers, IPv6 in brackets. Built once: every request uses it.
    authority: str = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        authority = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        object.__setattr__(self, "authority", authority)
        object.__setattr__(self, "_hash", hash((self.host, self.port)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return self.authority


def is_wildcard(host: str) -> bool:
    """Whether ``host`` means "every interface", which other hosts cannot connect to."""
    bare = host.strip("[]")
    if bare in WILDCARDS:
        return True
    try:
        return ipaddress.ip_address(bare).is_unspecified
    except ValueError:
        return False


def check_host(host: str, flag: str) -> str:
    """Returns ``host`` without brackets. Raises ``SettingsError`` if it is neither a name nor an address."""
    try:
        canonical_host(host, scope=True)
    except HostError as error:
        raise SettingsError(f"{flag}: {error}; give a name or an address without scheme or port") from error
    return host.strip("[]")


def check_port(port: int, flag: str) -> int:
    """Raises ``SettingsError`` for a port outside 1 to 65535."""
    if not 1 <= port <= 65535:
        raise SettingsError(f"{flag}: {port} is no port; expected 1 to 65535")
    return port


def addresses(hosts: Sequence[str], ports: Sequence[int], role: str) -> tuple[Address, ...]:
    """Returns one address per pair. ``role`` is ``prefiller`` or ``decoder``, as in the flags.

    Raises ``SettingsError`` for lists of unequal length, duplicates and unusable addresses.
    """
    hosts_flag, ports_flag = f"--{role}-hosts", f"--{role}-ports"
    if len(hosts) != len(ports):
        raise SettingsError(
            f"{hosts_flag} has {len(hosts)} and {ports_flag} {len(ports)} values; give as many of each"
        )
    found: list[Address] = []
    for host, port in zip(hosts, ports, strict=True):
        if is_wildcard(host):
            raise SettingsError(f"{hosts_flag}: {host!r} can't be called; give the engine's own address")
        address = Address(check_host(host, hosts_flag), check_port(port, ports_flag))
        if address in found:
            raise SettingsError(f"{hosts_flag}: {address} is given twice")
        found.append(address)
    return tuple(found)


@dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds. Every wait of the proxy has one of them."""

    connect: float = 5.0
    first_output: float = 600.0  # decode's answer or first streamed event: queueing, rendezvous and prefill
    idle: float = 300.0  # between two parts of an answer
    answer: float = 3600.0  # a complete unstreamed answer
    prefill: float = 600.0
    request_body: float = 60.0  # between two parts of the client's request
    client_stall: float = 120.0  # a client that does not read
    control: float = 5.0  # /v1/models, /tokenize
    probe: float = 3.0  # GET /health of an engine
    drain: float = 600.0
    head: float = 20.0  # a client's request head, from its first byte or from the connection


@dataclass(frozen=True)
class ProxyLimits:
    """ProxyLimits on a client's requests and connections. Raises ``SettingsError`` for invalid values."""

    head_bytes: int = 64 << 10  # request line and header fields
    head_fields: int = 200
    uri_bytes: int = 8 << 10
    connections: int = 4096  # per port

    def __post_init__(self) -> None:
        least = {"head_bytes": 1024, "head_fields": 16, "uri_bytes": 64, "connections": 1}
        for one in fields(self):
            value = getattr(self, one.name)
            if value < least[one.name]:
                flag = f"--max-{one.name.replace('_', '-')}"
                raise SettingsError(f"{flag}: {value} is less than {least[one.name]}")


@dataclass(frozen=True)
class ProxySettings:
    """All settings of a proxy. Create with :func:`proxy_settings`, which validates them."""

    host: str
    port: int
    advertise: Address
    prefillers: tuple[Address, ...]
    decoders: tuple[Address, ...]
    deadlines: Deadlines = Deadlines()
    max_retries: int = 3
    max_recomputes: int = 8
    max_sub_requests: int = 1024
    max_body_bytes: int = 64 << 20
    max_request_bytes: int = 256 << 20  # memory of one request: its values, and its sub-requests' bodies
    max_held_bytes: int = 1 << 30  # memory of all requests
    max_answer_bytes: int = 256 << 20  # an unstreamed answer, including all sub-requests
    probe_interval: float = 3.0
    admin_token: str | None = None
    admin_port: int | None = None
    limits: ProxyLimits = ProxyLimits()
    tls: Tls | None = None
    engine_tls: EngineTls | None = None
    api_keys: tuple[str, ...] = ()
    metaserver_port: int | None = None
    # Required to post for a request: clients see the request's id, so it alone must not be enough.
    metaserver_token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def scheme(self) -> str:
        """URL scheme of all ports."""
        return "https" if self.tls is not None else "http"

    @property
    def metaserver_origin(self) -> str:
        """Origin of the URL that decode engines post to."""
        if self.metaserver_port is None:
            return f"{self.scheme}://{self.advertise.authority}"
        return f"{self.scheme}://{Address(self.advertise.host, self.metaserver_port).authority}"

    @property
    def metaserver(self) -> str:
        """The URL that decode engines post to. It contains the token: keep it out of logs."""
        return f"{self.metaserver_origin}{METASERVER}/{self.metaserver_token}"

    @property
    def failures(self) -> str:
        """The URL for decode engines' failure notices."""
        return f"{self.metaserver}/failed"

    @property
    def probe_again(self) -> float:
        """Seconds until a failed probe is repeated."""
        return min(0.5, self.probe_interval)


def advertised(host: str, port: int, advertise_host: str | None) -> Address:
    """Returns the address given to decode engines. Raises ``SettingsError`` for a wildcard."""
    flag = "--host" if advertise_host is None else "--advertise-host"
    chosen = host if advertise_host is None else advertise_host
    if is_wildcard(chosen):
        raise SettingsError(
            f"{flag}: decode engines call the proxy back at this address, and {chosen!r} is none; "
            "set --advertise-host to an address of this machine that they reach"
        )
    return Address(check_host(chosen, flag), port)


def check_side_ports(port: int, admin_port: int | None, metaserver_port: int | None) -> None:
    """Raises ``SettingsError`` unless all ports are valid and distinct."""
    if admin_port is not None and check_port(admin_port, "--admin-port") == port:
        raise SettingsError("--admin-port: must differ from --port; without it, /admin is on --port")
    if metaserver_port is None:
        return
    if check_port(metaserver_port, "--metaserver-port") in (port, admin_port):
        raise SettingsError("--metaserver-port: must differ from --port and --admin-port")


def check_security(tls: Tls | None, engine_tls: EngineTls | None, api_keys: Sequence[str]) -> None:
    """Reads the certificates. Raises ``SettingsError``."""
    for key in api_keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise SettingsError("--api-key: a key is one word of printable ASCII characters")
    try:
        for given in (tls, engine_tls):
            if given is not None:
                given.context()
    except TlsError as error:
        raise SettingsError(str(error)) from error


def proxy_settings(
    *,
    host: str,
    port: int,
    prefillers: tuple[Address, ...],
    decoders: tuple[Address, ...],
    advertise_host: str | None = None,
    deadlines: Deadlines | None = None,
    max_retries: int = 3,
    max_held_bytes: int = 1 << 30,
    probe_interval: float = 3.0,
    admin_token: str | None = None,
    admin_port: int | None = None,
    metaserver_port: int | None = None,
    limits: ProxyLimits | None = None,
    tls: Tls | None = None,
    engine_tls: EngineTls | None = None,
    api_keys: tuple[str, ...] = (),
) -> ProxySettings:
    """Creates validated settings. Raises ``SettingsError``."""
    check_port(port, "--port")
    if not is_wildcard(host):
        host = check_host(host, "--host")
    advertise = advertised(host, port, advertise_host)
    clash = {advertise, Address(host, port)} & ({*prefillers, *decoders})
    if clash:
        raise SettingsError(f"{clash.pop()} is the proxy's own address; an engine can't listen there too")
    shared = set(prefillers) & set(decoders)
    if shared:
        raise SettingsError(f"{shared.pop()} is given as prefiller and as decoder")
    if max_retries < 0:
        raise SettingsError(f"--max-retries: {max_retries} is negative")
    if max_held_bytes < 1 << 20:
        raise SettingsError(f"--max-held-bytes: {max_held_bytes} is less than a megabyte")
    if admin_port is not None and not admin_token:
        raise SettingsError("--admin-port: needs a token in KVOFFLOAD_PROXY_ADMIN_TOKEN")
    check_side_ports(port, admin_port, metaserver_port)
    check_security(tls, engine_tls, api_keys)
    return ProxySettings(
        host=host,
        port=port,
        advertise=advertise,
        prefillers=prefillers,
        decoders=decoders,
        deadlines=deadlines or Deadlines(),
        max_retries=max_retries,
        max_held_bytes=max_held_bytes,
        probe_interval=probe_interval,
        admin_token=admin_token or None,
        admin_port=admin_port,
        limits=limits or ProxyLimits(),
        tls=tls,
        engine_tls=engine_tls,
        api_keys=api_keys,
        metaserver_port=metaserver_port,
    )
