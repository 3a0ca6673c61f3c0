"""Posts to the metaserver."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tests.connectors.meta_server import meta_server

pytest.importorskip("aiohttp")

from vllm_kvoffload.connectors.sfa_remote_d2h import rendezvous as module
from vllm_kvoffload.connectors.sfa_remote_d2h.rendezvous import Rendezvous, RendezvousError, check_url
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.hosts import HostError, HostList, canonical_host


@pytest.fixture
def server():
    with meta_server() as made:
        yield made


@pytest.fixture
def rendezvous():
    made = Rendezvous(deadline_s=8.0)
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name == "kvoffload-rendezvous"]


def answers(rendezvous, count=1, seconds=10.0):
    got, end = [], time.monotonic() + seconds
    while len(got) < count:
        assert time.monotonic() < end
        got += rendezvous.take_answers()
        time.sleep(0.01)
    return got


def test_the_body_arrives_and_the_answer_comes_back(server, rendezvous):
    rendezvous.post("r", server.url, {"request_id": "cmpl-1", "remote_port": 5})
    assert answers(rendezvous) == [("r", "")]
    assert server.bodies == [{"request_id": "cmpl-1", "remote_port": 5}]
    assert not rendezvous.take_answers()
    assert not rendezvous.num_posts


def test_a_hundred_posts_wait_at_once(server, rendezvous):
    """The proxy answers when prefill is through; with a pool of threads most would not even be sent."""
    server.gate.clear()
    for number in range(100):
        rendezvous.post(f"r{number}", server.url, {"request_id": str(number)})
    end = time.monotonic() + 10
    while len(server.bodies) < 100:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not rendezvous.take_answers()
    server.gate.set()
    assert {error for _, error in answers(rendezvous, 100)} == {""}


@pytest.mark.parametrize("status", [404, 502, 302])
def test_a_refusal_is_an_error_and_not_repeated(server, rendezvous, status):
    server.status = status
    rendezvous.post("r", server.url, {})
    assert answers(rendezvous) == [("r", f"the metaserver answered {status}")]
    assert len(server.bodies) == 1


def test_a_broken_connection_is_tried_again(server, rendezvous):
    server.dropped = 2
    rendezvous.post("r", server.url, {})
    assert answers(rendezvous) == [("r", "")]
    assert len(server.bodies) == 1


def test_nobody_there(rendezvous):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous.post("r", f"http://127.0.0.1:{port}/v1/metaserver", {})
    ((_, error),) = answers(rendezvous)
    assert "can't be reached" in error


def test_a_deadline(server):
    server.gate.clear()
    rendezvous = Rendezvous(deadline_s=0.3)
    rendezvous.post("r", server.url, {})
    assert answers(rendezvous) == [("r", "the metaserver did not answer within 0.3 s")]
    rendezvous.close()


def test_a_cancelled_post_is_forgotten(server, rendezvous):
    server.gate.clear()
    rendezvous.post("r", server.url, {})
    rendezvous.cancel("r")
    rendezvous.cancel("r")
    server.gate.set()
    time.sleep(0.3)
    assert not rendezvous.take_answers()
    assert not rendezvous.num_posts


def test_an_answer_without_end_is_not_read(server, rendezvous):
    server.endless = True
    rendezvous.post("r", server.url, {})
    assert answers(rendezvous) == [("r", "")]
    assert server.cut_off.wait(10)


def test_connections_are_bounded(server, rendezvous, monkeypatch):
    """Excess posts wait for their turn, and a host that never answers leaves room for others."""
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 4)
    server.gate.clear()
    for number in range(10):
        rendezvous.post(f"r{number}", server.url, {})
    wait_until(lambda: len(server.bodies) == 2)
    with meta_server() as other:
        rendezvous.post("other", other.url, {})
        assert answers(rendezvous) == [("other", "")]
    assert len(server.bodies) == 2
    server.gate.set()
    assert {error for _, error in answers(rendezvous, 10)} == {""}


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_notice_is_posted_and_nothing_is_told_about_it(server, rendezvous):
    server.dropped = 1
    assert rendezvous.notify(server.url, {"request_id": "cmpl-1"})
    wait_until(lambda: server.bodies == [{"request_id": "cmpl-1"}])
    assert not rendezvous.take_answers()


def test_notices_are_bounded(server, rendezvous, monkeypatch):
    """A proxy that does not answer holds a few of them, and no request."""
    monkeypatch.setattr(module, "MAX_NOTICES", 3)
    monkeypatch.setattr(module, "NOTICE_S", 0.5)
    server.gate.clear()
    assert [rendezvous.notify(server.url, {}) for _ in range(5)] == [True] * 3 + [False] * 2
    wait_until(lambda: rendezvous.notify(server.url, {}))


def test_what_leaves_the_loop_does_not_end_it(server, rendezvous):
    """A BaseException of any task ends `run_forever`; other posts go on."""
    server.gate.clear()
    rendezvous.post("r", server.url, {})
    wait_until(lambda: server.bodies)

    def leave():
        raise SystemExit

    rendezvous._loop.call_soon_threadsafe(leave)
    server.gate.set()
    assert answers(rendezvous) == [("r", "")]
    rendezvous.post("s", server.url, {})
    assert answers(rendezvous) == [("s", "")]


def test_names_that_are_not_found_keep_no_others_waiting(server, rendezvous, monkeypatch):
    """Looking one up takes a thread for seconds; a known name has threads of its own."""
    stuck = threading.Event()
    look_up = socket.getaddrinfo

    def slow(host, *args, **kwargs):
        if str(host).endswith(".invalid"):
            assert stuck.wait(20)
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    url = server.url.replace("127.0.0.1", "localhost")
    rendezvous.post("first", url, {})
    assert answers(rendezvous) == [("first", "")]
    for number in range(40):
        rendezvous.post(f"bad-{number}", f"http://n{number}.invalid:1/", {})
    monkeypatch.setattr(rendezvous._session.connector, "_use_dns_cache", False)
    rendezvous._session.connector.clear_dns_cache()
    rendezvous.post("good", url, {})
    assert answers(rendezvous, seconds=5) == [("good", "")]
    stuck.set()
    assert all("can't be reached" in error for _, error in answers(rendezvous, 40))


# ---------------------------------------------------------------------------------------- hosts and addresses

NO_HOSTS = [
    "*", "", " ", "a b", "a/b", "a:1", "a..b", ".a", "-a", "a-", "a" * 64, "a." * 127 + "a", "\u2603", "a\0",
    "a\n", "eth0:1", "fe80::1%eth0", "[::1", "::1]", "[127.0.0.1]", "[localhost]", "0.0.0.0", "::",
    "224.0.0.1", "ff02::1", "127.1", "2130706433", "0x7f.1", "0x7f000001", "a.1", "u@a", "\udcff", None, 5,
    True, [], {}, b"localhost",
]  # fmt: skip


@pytest.mark.parametrize("host", NO_HOSTS, ids=lambda host: ascii(host)[:20])
def test_what_is_no_host(host):
    with pytest.raises(HostError, match=r"^[ -~]*$"):
        canonical_host(host)
    with pytest.raises(ConfigError):
        HostList.parse("hosts", [host, "a"])


@pytest.mark.parametrize(
    ("host", "written"),
    [
        ("Proxy.Example.", "proxy.example"), ("decode_1", "decode_1"), ("[::1]", "::1"), ("0:0::1", "::1"),
        ("::ffff:10.0.0.9", "10.0.0.9"), ("10.0.0.9", "10.0.0.9"), ("xn--n3h", "xn--n3h"),
    ],
)  # fmt: skip
def test_one_host_is_written_in_one_way(host, written):
    assert canonical_host(host) == written


def test_listed_hosts():
    listed = HostList.parse("hosts", ["Node1.example", "10.0.0.0/8", "2001:db8::/32", "192.0.2.7"])
    for host in ("node1.EXAMPLE", "10.1.2.3", "::ffff:10.1.2.3", "[2001:db8::5]", "192.0.2.7"):
        assert listed.check(host)
    for host in ("node2.example", "11.1.2.3", "2001:db9::5", "192.0.2.8", "localhost", "127.0.0.1"):
        with pytest.raises(HostError, match="is not in hosts: set that option"):
            listed.check(host)
    assert HostList.parse("hosts", ["*"]).check("any.example") == "any.example"
    with pytest.raises(HostError):
        HostList.parse("hosts", ["*"]).check("*")


def test_by_default_the_engine_talks_to_whom_it_was_told_of():
    told = HostList.default("hosts", ["192.0.2.7", None, "no host", "node1"])
    for host in ("localhost", "127.0.0.2", "::1", "192.0.2.7", "node1"):
        assert told.check(host)
    with pytest.raises(HostError):
        told.check("192.0.2.8")


LOCAL = HostList.default("hosts", ())


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("http://127.0.0.1:9000/v1/metaserver", "http://127.0.0.1:9000/v1/metaserver"),
        ("HTTPS://[::1]:9/a?b=c", "https://[::1]:9/a?b=c"),
        ("http://LocalHost", "http://localhost/"),
    ],
)
def test_addresses_that_are_used(url, used):
    assert check_url(url, LOCAL) == used


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1", "http://]::1[/", "http://[x]/", "http://localhost:0/", "http://localhost:65536/",
        "http://localhost:x/", "http://localhost:-1/", "http://user:password@localhost/", "http://localhost\\@evil/",
        "http://localhost/#a", "http://localhost/a b", "http://localhost/\r\nX: y", "http://localhost\0/",
        "http://localhost/\u2603", "http://\u2603/", "http://localhost/\udcff", "http://evil/", "http://a..b/",
        f"http://{'a' * 64}/", "http://127.1/", "http://*/", "http:///x", "//localhost/", "localhost", "",
        "ftp://localhost/", "file:///etc/passwd", f"http://localhost/{'a' * 5000}", None, 5, True, [], {}, b"http://",
    ],
    ids=lambda url: ascii(url)[:30],
)  # fmt: skip
def test_addresses_that_are_not_used(url):
    with pytest.raises(RendezvousError, match=r"^[ -~]{1,500}$"):
        check_url(url, LOCAL)
