"""TLS to clients and to engines, with certificates made here."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.proxy.proxy_world import HOST, World, world
from tests.proxy.test_proxy_edge import run
from tests.proxy.test_proxy_process import process
from vllm_kvoffload.cli.proxy import KEY_VARIABLE, settings_of
from vllm_kvoffload.proxy.settings import SettingsError
from vllm_kvoffload.proxy.tls import EngineTls, Tls, TlsError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ca.pem``; ``one.pem`` with ``one.key``; that as ``locked.key`` with a password; ``bad.pem``."""
    folder = tmp_path_factory.mktemp("pems")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    new = ["req", "-x509", *key, "-days", "2", "-subj"]
    openssl(folder, *new, "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    names = "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost"
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", names, "-addext", "basicConstraints=CA:FALSE"]
    openssl(folder, *new, "/CN=one", *signed, "-keyout", "one.key", "-out", "one.pem")
    openssl(folder, *["ec", "-in", "one.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key"])
    (folder / "bad.pem").write_text("no certificate")
    return folder


def trusting(pems: Path, *, own: bool = False) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(pems / "ca.pem"))
    if own:
        made.load_cert_chain(pems / "one.pem", pems / "one.key")
    return made


def test_clients_and_decode_use_tls(pems: Path) -> None:
    """Streams too, over uvloop, whose TLS is its own. The stand-in decode engine trusts the authority."""

    async def scenario() -> None:
        w = World()
        flags = ["--ssl-certfile", str(pems / "one.pem"), "--ssl-keyfile", str(pems / "one.key")]
        env = {"SSL_CERT_FILE": str(pems / "ca.pem")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", str(pems / "ca.pem"))
            async with process(w, HOST, *flags, **env) as (_, plain):
                url = f"https://{HOST}:{plain.base_url.port}"
                async with httpx.AsyncClient(base_url=url, verify=trusting(pems), timeout=20) as client:
                    assert (await client.get("/health")).status_code == 200
                    answer = await client.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 2})
                    assert answer.json()["choices"][0]["text"] == " w3 w4"
                    sent = {"prompt": "a b c", "max_tokens": 500, "stream": True}
                    streamed = await client.post("/v1/completions", json=sent)
                    assert streamed.text.count("data: ") == 501
                    params = w.d.exchanges[0].body["kv_transfer_params"]
                    assert params["metaserver"].startswith(f"{url}/v1/metaserver")
                with pytest.raises(httpx.HTTPError):
                    await plain.get("/health")

    run(scenario)


def test_client_certificates(pems: Path) -> None:
    tls = Tls(str(pems / "one.pem"), str(pems / "one.key"), str(pems / "ca.pem"), 2)

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hi")
        writer.close()

    async def greeted(context: ssl.SSLContext) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
        try:
            return await reader.read()
        finally:
            writer.close()

    async def scenario() -> None:
        nonlocal port
        server = await asyncio.start_server(greet, HOST, 0, ssl=tls.context())
        port = server.sockets[0].getsockname()[1]
        assert await greeted(trusting(pems, own=True)) == b"hi"
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert await greeted(trusting(pems)) == b"", "without a certificate"
        server.close()

    port = 0
    run(scenario)


@pytest.mark.parametrize("trusted", [True, False])
def test_engines_use_tls(pems: Path, trusted: bool) -> None:
    """An engine whose certificate isn't trusted is one that can't be reached."""
    server_tls = Tls(str(pems / "one.pem"), str(pems / "one.key"), str(pems / "ca.pem"), 2).context()

    async def scenario() -> None:
        authority = str(pems / ("ca.pem" if trusted else "one.pem"))
        tls = EngineTls(authority, str(pems / "one.pem"), str(pems / "one.key"))
        async with world(engine_tls=tls, max_retries=0) as w:
            for engine in (w.p, w.d):
                await engine.die()
                engine._server = await asyncio.start_server(
                    engine._connection, HOST, engine.port, ssl=server_tls
                )
            answer = await w.complete(max_tokens=2)
            assert answer.status_code == (200 if trusted else 502), answer.text
            if not trusted:
                assert "certificate" in answer.json()["error"]["message"]

    run(scenario)


WRONG = [
    ("--ssl-keyfile k", "--ssl-certfile"),
    ("--ssl-cert-reqs 2", "--ssl-certfile"),
    ("--ssl-certfile none.pem", "none.pem.*No such file"),
    ("--ssl-certfile bad.pem", "bad.pem.*can't be used"),
    ("--ssl-certfile one.pem --ssl-keyfile ca.key", "its own private key"),
    ("--ssl-certfile one.pem --ssl-keyfile locked.key", "password"),
    ("--ssl-certfile one.pem --ssl-keyfile one.key --ssl-ca-certs bad.pem", "no certificates"),
    ("--ssl-certfile one.pem --ssl-keyfile one.key --ssl-cert-reqs 2", "needs --ssl-ca-certs"),
    ("--ssl-certfile one.pem --ssl-keyfile one.key --ssl-cert-reqs 7", "--ssl-cert-reqs: 7"),
    ("--engine-ca-certs ca.pem", "--engine-scheme https"),
    ("--engine-scheme https --engine-ca-certs bad.pem", "--engine-ca-certs.*no certificates"),
    ("--engine-scheme https --engine-keyfile one.key", "--engine-certfile"),
    ("--engine-scheme https --engine-certfile one.pem --engine-keyfile ca.key", "its own private key"),
    ("--api-key caf\u00e9", "printable"),
    ("--max-head-bytes 5", "--max-head-bytes"),
    ("--max-connections 0", "--max-connections"),
    ("--head-timeout 0", "above 0"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_what_can_not_work_is_said_in_one_line(
    pems: Path, flags: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pems)
    with pytest.raises(SettingsError, match=message) as found:
        settings_of(flags.split())
    assert "\n" not in str(found.value)


def test_keys_and_schemes_from_flags(pems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pems)
    monkeypatch.setenv(KEY_VARIABLE, "three")
    flags = "--api-key one two --api-key four --ssl-certfile one.pem --ssl-keyfile one.key"
    made = settings_of(flags.split())
    assert made.api_keys == ("one", "two", "four", "three")
    assert made.metaserver.startswith("https://localhost:8000/v1/metaserver")
    monkeypatch.delenv(KEY_VARIABLE)
    made = settings_of(["--engine-scheme", "https"])
    assert made.engine_tls == EngineTls()
    assert made.api_keys == ()
    with pytest.raises(TlsError):
        Tls("none.pem").context()


STRANGER = f"""
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
held = []
for _ in range(300):
    client = socket.create_connection(("{HOST}", int(sys.argv[1])))
    held.append(client)
print("held", flush=True)
sys.stdin.read()
"""


def test_more_connections_than_descriptors() -> None:
    """The server outlives EMFILE: with 300 idle strangers and 200 descriptors, and after them."""

    async def scenario() -> None:
        w = World()
        async with process(w, HOST, "--max-connections", "100", limit=200) as (running, client):
            port = client.base_url.port
            stranger = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", STRANGER, str(port)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert stranger.stdout is not None
            assert (await asyncio.wait_for(stranger.stdout.readline(), 20)) == b"held\n"
            answer = await client.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 2})
            assert answer.status_code == 200
            stranger.kill()
            await stranger.wait()
            assert (await client.get("/health")).status_code == 200
            running.terminate()
            log = (await asyncio.wait_for(running.communicate(), 10))[1].decode()
            assert "--max-connections 100" in log
            assert "Traceback" not in log

    run(scenario)
