"""Hostile peers that send to ports not meant for them. All traffic stays on this machine.

Each function of `CONTROL`, `HTTP` and `PARAMETERS` sends one kind of thing, ends within seconds, and raises
nothing when the other side hangs up.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.faults.fault_client import completion, new_prompt
from vllm_kvoffload.connectors.sfa_remote_d2h import wire
from vllm_kvoffload.demo.processes import session_and_descendants
from vllm_kvoffload.demo.server import HOST, free_port

PATIENCE_S = 3.0
HUGE_BYTES = 64 << 20


# --------------------------------------------------------------------------------------------------- TCP


def connect(port: int) -> socket.socket:
    made = socket.create_connection((HOST, port), timeout=PATIENCE_S)
    made.settimeout(PATIENCE_S)
    return made


def send_raw(port: int, *parts: bytes) -> bytes:
    """Sends bytes, and returns the first of the answer; b"" for none."""
    with contextlib.suppress(OSError), connect(port) as link:
        for part in parts:
            link.sendall(part)
        return link.recv(4096)
    return b""


def raw_garbage(port: int, rng: random.Random, times: int = 20) -> None:
    """Random bytes, half of them after a ZMTP greeting."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for number in range(times):
        begin = greeting if number % 2 else b""
        with contextlib.suppress(OSError), connect(port) as link:
            link.sendall(begin + rng.randbytes(rng.choice((1, 9, 64, 700, 20_000))))


class Idlers:
    """Connections that say nothing, or half of something, until they are closed."""

    def __init__(self, ports: list[int], each: int) -> None:
        self._links: list[socket.socket] = []
        for port in ports:
            for number in range(each):
                with contextlib.suppress(OSError):
                    link = connect(port)
                    self._links.append(link)
                    if number % 2:
                        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9")

    def close(self) -> None:
        for link in self._links:
            link.close()


def listening(pid: int) -> list[int]:
    """TCP ports on which a server's processes listen, by process and then by descriptor."""
    ports: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    found = []
    for process in session_and_descendants(pid):
        folder = Path(f"/proc/{process.pid}/fd")
        for descriptor in sorted(folder.iterdir(), key=lambda path: int(path.name)):
            with contextlib.suppress(OSError):
                found.append(ports.get(os.readlink(descriptor), 0))
    return [port for port in found if port]


# --------------------------------------------------------------------------------------- the control port


def a_hello(secret: str, **changes: Any) -> wire.Hello:
    """Well-formed, of an engine that doesn't exist. secret: used where the protocol has one."""
    values: dict[str, Any] = {
        "session": "stranger",
        "engine_id": "stranger",
        "tp_size": 1,
        "tp_rank": 0,
        "digest": "0" * 64,
        "num_blocks": 10,
        "layers": (wire.LayerLayout(0, ((4096, 64, 64),), ((8192, 64, 64),)),),
        "metadata": b"\x00" * 200,
        "lease_s": 5.0,
        "secret": secret,
        "facts": {"dtype": "float32"},
        **changes,
    }
    names = {field.name for field in msgspec.structs.fields(wire.Hello)}
    return wire.Hello(**{name: value for name, value in values.items() if name in names})


def learn_hello(prefill_port: int) -> wire.Hello | None:
    """A prefill server's introduction, sent to any endpoint that it is directed to, within its limits."""
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    try:
        link = context.socket(zmq.ROUTER)
        port = link.bind_to_random_port(f"tcp://{HOST}")
        params = {**_SENDS, "remote_host": HOST, "remote_port": port}
        arguments = (prefill_port, params, random.Random(prefill_port))
        threading.Thread(target=send_params, args=arguments, daemon=True).start()
        end = time.monotonic() + 5
        while link.poll(max(0, int(1000 * (end - time.monotonic())))):
            with contextlib.suppress(wire.WireError):
                message = wire.decode_to_decode(link.recv_multipart()[-1])
                if isinstance(message, wire.Hello):
                    return message
        return None
    finally:
        context.destroy()


def false_hellos(true: wire.Hello, rng: random.Random, secret: str) -> Iterator[bytes]:
    """A true introduction under other names, spoiled where a parser may trip."""
    replace = msgspec.structs.replace
    if "secret" in {field.name for field in msgspec.structs.fields(wire.Hello)}:
        true = replace(true, secret=secret)
    for number in range(40):
        metadata = bytearray(true.metadata)
        for _ in range(1 + number // 10):
            metadata[rng.randrange(len(metadata))] = rng.choice((0, 0x7F, 0xFF))
        if number % 5 == 4:
            del metadata[rng.randrange(len(metadata)) :]
        yield wire.encode(replace(true, session=f"stranger-{number}", metadata=bytes(metadata)))
    for layers in (true.layers[:1], true.layers * 2, (*true.layers[1:], true.layers[0]), ()):
        yield wire.encode(replace(true, session=f"stranger-{len(layers)}", layers=layers))


def hostile_frames(rng: random.Random, secret: str = "", true: wire.Hello | None = None) -> Iterator[bytes]:
    """Frames that decode must refuse, or get over. true: how a prefill server introduces itself."""
    if true is not None:
        yield from false_hellos(true, rng, secret)
    version = bytes([wire.VERSION])
    pack = msgspec.msgpack.encode
    yield from (b"", version, bytes([wire.VERSION + 1]) + b"\x90", version + b"\x91" * 100_000)
    for _ in range(40):
        yield rng.randbytes(rng.choice((1, 10, 300)))
        yield version + rng.randbytes(rng.choice((1, 10, 300)))
    for number in (-1, 2**31, 2**62, 2**63, 2**64 - 1):
        chunk = [0, [number & (2**64 - 1)], 1]
        yield version + pack(["publish", "stranger", 1, "r", b"p" * 16, 1, number, [chunk], True])
        yield version + pack(["publish", "stranger", number, "r", b"p" * 16, number, 0, [[number, [1], number]], False])  # fmt: skip # noqa: E501
        yield version + pack(["finished", "stranger", number])
        yield version + pack(["beat_ack", "stranger", [number] * 50])
        yield version + pack(["closed", "stranger", number, "because\r\nline two", True])
    whole = wire.encode(a_hello(secret))
    for _ in range(60):
        spoiled = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            spoiled[rng.randrange(1, len(spoiled))] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        yield bytes(spoiled)
    for changes in HELLO_CHANGES:
        with contextlib.suppress(msgspec.MsgspecError, OverflowError):
            yield wire.encode(a_hello(secret, **changes))


HELLO_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"metadata": b""},
    {"metadata": b"\xff" * 300},
    {"metadata": b"nixl" + bytes(range(256)) * 40},
    {"tp_size": 0},
    {"tp_size": -1},
    {"tp_rank": 2**40},
    {"num_blocks": 2**63 - 1},
    {"layers": ()},
    {"layers": (wire.LayerLayout(0, ((2**63 - 1, 1, 1),), ()),) * 50},
    {"layers": (wire.LayerLayout(-5, ((-1, -1, -1),), ()),)},
    {"lease_s": float("nan")},
    {"lease_s": float("inf")},
    {"lease_s": -1.0},
    {"session": ""},
    {"session": "s" * 100_000},
    {"engine_id": "\x00\r\n\u2028 injected line"},
)


def frames(port: int, rng: random.Random, secret: str = "", true: wire.Hello | None = None) -> None:
    """Hostile frames over ZMQ, each under the name that it claims."""
    made = list(hostile_frames(rng, secret, true))
    rng.shuffle(made)
    _send_zmq(port, [(_claimed(frame), [frame]) for frame in made])
    _send_zmq(port, [(b"parts", parts) for parts in ([b"", made[0]], made[1:4], [b"x"] * 30)])


def flood(port: int, rng: random.Random) -> None:
    """Thousands of small frames as fast as they go out."""
    _send_zmq(port, [(b"flood", [bytes([wire.VERSION]) + rng.randbytes(20)]) for _ in range(5000)])


def huge(port: int, rng: random.Random) -> None:
    """A few frames far beyond any message of the protocol."""
    begins = [bytes([wire.VERSION]), b"", rng.randbytes(10)]
    _send_zmq(port, [(b"huge-%d" % n, [begin + bytes(HUGE_BYTES)]) for n, begin in enumerate(begins)])


def _claimed(frame: bytes) -> bytes:
    """The session that a frame comes from, if it says so: decode looks whether it is the connection's."""
    try:
        name = wire.decode_to_decode(frame).session.encode()
    except (wire.WireError, UnicodeError):
        name = b""
    return name if 0 < len(name) < 256 else b"stranger"


def _send_zmq(port: int, messages: list[tuple[bytes, list[bytes]]]) -> None:
    """Sends frames, each from the connection of its name."""
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 200)
    links: dict[bytes, zmq.Socket[bytes]] = {}
    try:
        for name, parts in messages:
            link = links.get(name)
            if link is None:
                link = links[name] = context.socket(zmq.DEALER)
                link.setsockopt(zmq.IDENTITY, name)
                link.setsockopt(zmq.SNDTIMEO, int(1000 * PATIENCE_S))
                link.setsockopt(zmq.SNDHWM, 10_000)
                link.connect(f"tcp://{HOST}:{port}")
            with contextlib.suppress(zmq.ZMQError):
                link.send_multipart(parts)
        time.sleep(0.5)
    finally:
        context.destroy()


def learn_secret(decode_port: int) -> str:
    """The secret of decode's start, as a proxy learns it: from a rendezvous. "" where there is none."""
    told: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer((HOST, 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://{HOST}:{server.server_address[1]}/v1/metaserver/x"
    params = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": url}
    try:
        send_params(decode_port, params, random.Random(len(told)))
    finally:
        server.shutdown()
        server.server_close()
    return str(told[0].get("remote_secret", "")) if told else ""


# ---------------------------------------------------------------------------------------------------- HTTP


def http_garbage(port: int, rng: random.Random) -> None:
    """Heads and bodies that a server should answer with a status of 4xx, or hang up on."""
    host = b"Host: x\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\n" + host
    deep = b'{"prompt":' + b"[" * 50_000
    wrong: list[tuple[bytes, ...]] = [
        (rng.randbytes(500),),
        (b"GET / HTTP/1.1\r\n" + host + b"A: " + b"x" * (4 << 20),),
        (b"GET / HTTP/1.1\r\n" + host + b"".join(b"h%d: 1\r\n" % n for n in range(20_000)) + b"\r\n",),
        (b"GET /" + b"u" * (2 << 20) + b" HTTP/1.1\r\n" + host + b"\r\n",),
        (post + b"Content-Length: -1\r\n\r\n",),
        (post + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",),
        (post + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",),
        (post + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",),
        (post + b"Content-Length: %d\r\n\r\n" % len(deep), deep),
        (post + b"Content-Length: 3\r\n\r\n\xff\xfe\x00",),
        (post + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n", b"{}"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
        (b"GET /v1/metaserver HTTP/1.1\r\n" + host + b"\r\n",),
        (b"POST /v1/metaserver HTTP/1.1\r\n" + host + b"Content-Length: 2\r\n\r\n{}",),
        (b"POST /v1/metaserver/guess HTTP/1.1\r\n" + host + b"Content-Length: 2\r\n\r\n{}",),
        (b"POST /admin/instances/add HTTP/1.1\r\n" + host + b"Content-Length: 2\r\n\r\n{}",),
    ]
    for parts in wrong:
        send_raw(port, *parts)


def http_bodies(port: int, rng: random.Random) -> list[int]:
    """Requests that are well-formed JSON and nothing else; their statuses."""
    good = completion(new_prompt(20, rng.randrange(1000)), 2)
    changes: list[dict[str, Any]] = [
        {"prompt": None},
        {"prompt": [2**63]},
        {"prompt": [-1]},
        {"prompt": [[]]},
        {"prompt": []},
        {"prompt": "x" * 300_000},
        {"max_tokens": -5},
        {"max_tokens": 2**70},
        {"n": 10**9},
        {"temperature": "hot"},
        {"stop": ["recomputed"]},
        {"logit_bias": {"a": "b"}},
        {"kv_transfer_params": {"do_remote_prefill": True, "metaserver": "http://[::1"}},
        {"kv_transfer_params": {"do_remote_decode": True, "remote_host": "*"}},
        {"kv_transfer_params": [1, 2]},
        {"stream_options": 7},
        {"cache_salt": ""},
    ]
    return [post(port, {**good, **change}) for change in changes]


def post(port: int, body: Any, timeout_s: float = 60.0) -> int:
    """Status of a completion, 0 for no answer, -1 for none within the time."""
    link = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return link.getresponse().status
    except TimeoutError:
        return -1
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        link.close()


# ---------------------------------------------------------------------------------------- kv_transfer_params


def send_params(port: int, params: Any, rng: random.Random, timeout_s: float = 60.0) -> int:
    """A request straight to an engine; its status as `post` has it."""
    body = completion(new_prompt(rng.choice((5, 200, 500)), rng.randrange(1 << 30)), 2)
    return post(port, {**body, "kv_transfer_params": params}, timeout_s)


_PULLS = {"do_remote_decode": False, "do_remote_prefill": True}
_SENDS = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "request_id": "cmpl-stranger-0",
    "remote_engine_id": "stranger",
    "remote_tp_size": 1,
    "remote_pcp_size": 1,
    "remote_dcp_size": 1,
    "remote_cached_tokens": 0,
    "remote_secret": "00",
    "remote_layout": "00",
}
BAD_URLS = (
    "http://[::1",
    "http://a..b/v1/metaserver/x",
    f"http://{'a' * 64}.b/v1/metaserver/x",
    "http://\u2603/v1/metaserver/x",
    "http://127.0.0.1:99999/x",
    "http://127.0.0.1:1/v1/metaserver/x",
    "http://127.0.0.1\x00/x",
    "http://user:word@127.0.0.1:1/x",
    "file:///dev/null",
    "http://",
    "",
    "x" * 100_000,
)
BAD_HOSTS = (
    "*",
    "decode_1:20150/x y",
    "a..b",
    "a" * 64,
    "\u2603",
    "127.0.0.1\x00",
    "[::1",
    "",
    "127.0.0.1;tcp://*",
    "no-such-host.invalid",
)
ODD = (None, True, -1, 0, 2**31, 2**63, 1.5, float("1e308"), "x", [], {}, ["127.0.0.1"], "9" * 5000)


def for_decode() -> list[Any]:
    """kv_transfer_params that decode must refuse by name, or end within its deadlines."""
    metaservers = [{**_PULLS, "metaserver": url} for url in (*BAD_URLS, *ODD)]
    failures = [{**metaservers[5], "failures": url} for url in (*BAD_URLS[:4], *ODD[:4])]
    flags = [{**metaservers[5], "do_remote_prefill": value} for value in ODD]
    return [_PULLS, *metaservers, *failures, *flags, {"do_remote_decode": True, **_PULLS}]


def for_prefill(port: int) -> list[Any]:
    """The same for prefill. port: on 127.0.0.1, with no listener."""
    good = {**_SENDS, "remote_host": HOST, "remote_port": port}
    made = [{**good, "remote_host": host} for host in (*BAD_HOSTS, *ODD)]
    for name in sorted(good.keys() - {"remote_host", "do_remote_prefill", "do_remote_decode"}):
        made += [{**good, name: value} for value in _odd_for(name)]
    return [*made, {"do_remote_decode": True}, good]


def _odd_for(name: str) -> tuple[Any, ...]:
    """Odd values for a field: a few of ODD that differ from field to field."""
    begin = sum(map(ord, name)) % len(ODD)
    return tuple(ODD[(begin + 3 * n) % len(ODD)] for n in range(4))


def parameters(prefill_port: int, decode_port: int, rng: random.Random, count: int) -> dict[int, int]:
    """Sends some of them side by side, 8 at a time; how often each status was answered."""
    made = [(decode_port, params) for params in for_decode()]
    made += [(prefill_port, params) for params in for_prefill(free_port())]
    chosen = rng.sample(made, min(count, len(made)))
    statuses: dict[int, int] = {}
    lock = threading.Lock()

    def run(mine: list[tuple[int, Any]], own: random.Random) -> None:
        for port, params in mine:
            status = send_params(port, params, own)
            with lock:
                statuses[status] = statuses.get(status, 0) + 1

    threads = [
        threading.Thread(target=run, args=(chosen[n::8], random.Random(rng.random())), daemon=True)
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return statuses


CONTROL: dict[str, Callable[[int, random.Random], None]] = {
    "garbage": raw_garbage,
    "frames": frames,
    "flood": flood,
    "huge": huge,
}
