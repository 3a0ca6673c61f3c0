"""`kvoffload proxy` as a process: flags, IPv6, its admin port, SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.proxy.proxy_world import Exchange, World, decode, free_port, words
from vllm_kvoffload.cli.proxy import TOKEN_VARIABLE, settings_of
from vllm_kvoffload.proxy.settings import Deadlines, SettingsError

COMMAND = [sys.executable, "-m", "vllm_kvoffload.cli.main", "proxy"]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            return True
    except OSError:
        return False


@contextlib.asynccontextmanager
async def process(
    w: World, host: str, *more: str, limit: int | None = None, **env: str
) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """The proxy in front of the engines of ``w``. ``limit``: of its descriptors."""
    port = free_port()
    flags = ["--host", host, "--port", str(port), "--probe-interval", "0"]
    flags += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(w.p.port)]
    flags += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(w.d.port)]
    for engine in (w.p, w.d):
        await engine.start()

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    running = await asyncio.create_subprocess_exec(
        *(*COMMAND, *flags, *more),
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=limited,
    )
    try:
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            for _ in range(200):
                try:
                    await client.get("/health")
                except httpx.ConnectError:
                    await asyncio.sleep(0.1)
                except httpx.HTTPError:  # it listens, and wants TLS
                    break
                else:
                    break
            yield running, client
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()
        for engine in (w.p, w.d):
            await engine.die()


def test_sigterm_drains() -> None:
    async def scenario() -> None:
        w = World()
        gate = asyncio.Event()

        async def gated(exchange: Exchange) -> None:
            await gate.wait()
            await decode(exchange)

        w.d.behaviours.append(gated)
        async with process(w, "127.0.0.1") as (running, client):
            body = {"prompt": "a b c", "max_tokens": 2}
            under_way = asyncio.create_task(client.post("/v1/completions", json=body))
            while not w.d.exchanges:
                await asyncio.sleep(0.02)
            running.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            assert (await client.post("/v1/completions", json=body)).status_code == 503
            gate.set()
            assert (await under_way).json()["choices"][0]["text"] == words(3, 2)
            log = (await asyncio.wait_for(running.communicate(), 10))[1].decode()
            assert running.returncode == 0, log
            assert "POST /v1/completions 200 ok" in log

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6_and_the_admin_port() -> None:
    async def scenario() -> None:
        w, admin = World(), free_port()
        more = ("--admin-port", str(admin))
        async with process(w, "::1", *more, **{TOKEN_VARIABLE: "t"}) as (running, client):
            answer = await client.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 2})
            assert answer.json()["choices"][0]["text"] == words(3, 2)
            assert "[::1]" in w.d.exchanges[0].body["kv_transfer_params"]["metaserver"]
            assert (await client.get("/admin/instances")).status_code == 404, "it has its own port"
            auth = {"authorization": "Bearer t"}
            listed = await client.get(f"http://[::1]:{admin}/admin/instances", headers=auth)
            assert listed.json()["decode"][0]["port"] == w.d.port
            assert (await client.get(f"http://[::1]:{admin}/admin/instances")).status_code == 401
            running.send_signal(signal.SIGTERM)
            await asyncio.wait_for(running.communicate(), 10)
            assert running.returncode == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_flags_as_vllm_ascend_has_them() -> None:
    made = settings_of(
        [
            "--host",
            "10.0.0.9",
            "--port",
            "9000",
            "--prefiller-hosts",
            "10.0.0.1",
            "10.0.0.2",
            "--prefiller-ports",
            "8100",
            "8100",
            "--decoder-hosts",
            "10.0.0.3",
            "--decoder-ports",
            "8200",
            "--idle-timeout",
            "7",
        ]
    )
    assert [str(a) for a in made.prefillers] == ["10.0.0.1:8100", "10.0.0.2:8100"]
    assert made.metaserver_origin == "http://10.0.0.9:9000"
    assert made.deadlines == Deadlines(idle=7)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--host 0.0.0.0", "--advertise-host"),
        ("--prefiller-hosts a b", "as many"),
        ("--idle-timeout 0", "above 0"),
        ("--max-retries -1", "negative"),
        ("--admin-port 9", TOKEN_VARIABLE),
        ("--port 0", "no port"),
    ],
)
def test_flags_that_can_not_work(flags: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(SettingsError, match=message):
        settings_of(flags.split())


@pytest.mark.parametrize(
    ("flags", "said"), [(("--host", "::"), "--advertise-host"), (("--bogus",), "arguments: --bogus. Fix: ")]
)
def test_the_command_says_what_is_wrong(flags: tuple[str, ...], said: str) -> None:
    ended = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "Traceback" not in ended.stderr
