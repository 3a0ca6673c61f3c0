"""Requests through a proxy and engines without faults."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.proxy.proxy_world import FAST, Exchange, decode, events, text_of, words, world
from vllm_kvoffload.proxy.app import Answer
from vllm_kvoffload.proxy.http_client import Client
from vllm_kvoffload.proxy.settings import Deadlines


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_stream_and_its_prefill_request() -> None:
    async def scenario() -> None:
        async with world() as w:
            found = await w.stream(max_tokens=3, min_tokens=2, stream_options={"include_usage": True})
            assert text_of(found) == words(3, 3)
            assert found[-1] == {"done": True}
            usage = found[-2]["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 2}, "prefill's, not decode's"
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 3)
            (d,), (p,) = w.d.exchanges, w.p.exchanges
            assert d.body["kv_transfer_params"] == {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "metaserver": f"{w.url}/v1/metaserver/{w.settings.metaserver_token}",
                "failures": f"{w.url}/v1/metaserver/{w.settings.metaserver_token}/failed",
            }
            assert p.headers["x-request-id"] == d.headers["x-request-id"]
            assert p.body["prompt"] == "a b c"
            assert (p.body["stream"], p.body["max_tokens"], p.body["min_tokens"]) == (False, 1, 1)
            assert "stream_options" not in p.body
            params = p.body["kv_transfer_params"]
            assert params["do_remote_decode"] is True
            assert params["remote_host"] == "10.0.0.1"
            assert params["request_id"] == d.external_id

    run(scenario())


def test_whole_answer_and_chat() -> None:
    async def scenario() -> None:
        async with world() as w:
            answer = await w.complete(max_tokens=5)
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == words(3, 5)
            assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
            chat = [{"role": "user", "content": "a b"}]
            tools = [{"type": "function", "function": {"name": "f"}}]
            found = await w.stream(
                "/v1/chat/completions", messages=chat, max_completion_tokens=9, max_tokens=2, tools=tools
            )
            assert text_of(found) == words(2, 2)
            assert w.p.exchanges[-1].body["max_completion_tokens"] == 1
            assert w.p.exchanges[-1].body["tools"] == tools, "they are part of the prompt"

    run(scenario())


def test_token_ids_and_headers() -> None:
    async def scenario() -> None:
        async with world() as w:
            answer = await w.client.post(
                "/v1/completions",
                json={"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 2},
                headers={"authorization": "Bearer k", "x-request-id": "mine", "cookie": "c"},
            )
            assert answer.json()["choices"][0]["text"] == words(4, 2)
            assert answer.headers["x-request-id"] == "mine"
            for exchange in (w.d.exchanges[0], w.p.exchanges[0]):
                assert exchange.headers["authorization"] == "Bearer k"
                assert "cookie" not in exchange.headers
                assert exchange.headers["x-request-id"] != "mine", "it must not be guessable"

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_more_prompts_than_the_engine_has_threads(stream: bool) -> None:
    async def scenario() -> None:
        patient = Deadlines(**{**vars(FAST), "answer": 25, "first_output": 25, "idle": 25, "prefill": 25})
        async with world(deadlines=patient) as w:
            prompts = ["x " * (i % 5 + 1) for i in range(40)]
            answer = await w.complete(
                prompt=prompts,
                max_tokens=2,
                n=2,
                seed=5,
                stream=stream,
                stream_options={"include_usage": True},
            )
            assert answer.status_code == 200, answer.text
            if stream:
                found = events(answer.text)
                assert found[-1] == {"done": True}
                texts = [text_of(found, i) for i in range(80)]
                assert len({event["id"] for event in found[:-1]}) == 1
                usage = found[-2]["usage"]
                assert found[-2]["choices"] == []
            else:
                choices = answer.json()["choices"]
                assert [c["index"] for c in choices] == list(range(80))
                texts, usage = [c["text"] for c in choices], answer.json()["usage"]
            assert texts == [words(len(p.split()), 2) for p in prompts for _ in range(2)]
            assert usage["completion_tokens"] == 160
            assert usage["prompt_tokens"] == sum(len(p.split()) for p in prompts), "each prompt once"
            assert usage["prompt_tokens_details"] == {
                "cached_tokens": sum(min(2, len(p.split())) for p in prompts)
            }
            assert sorted({e.body["seed"] for e in w.d.exchanges}) == [5, 6]
            assert all("n" not in e.body for e in w.d.exchanges)

    run(scenario())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kv_transfer_params": {"metaserver": "http://evil"}}, "kv_transfer_params"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"best_of": 3}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": "two"}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 2, "seed": "x"}, "seed"),
        ({"n": 2000}, "n"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "-1"}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1.0}, "truncate_prompt_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
    ],
)
def test_refused(body: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        async with world() as w:
            answer = await w.complete(**body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
            assert not w.d.exchanges

    run(scenario())


def test_small_endpoints() -> None:
    async def scenario() -> None:
        async with world() as w:
            assert (await w.client.get("/v1/models")).json() == {"data": [{"id": "m"}]}
            assert (await w.client.get("/health")).status_code == 200
            await w.stream(max_tokens=1)
            await w.settle()
            page = (await w.client.get("/metrics")).text
            assert (
                'kvoffload_proxy_requests_total{end="ok",endpoint="/v1/completions",status="200"} 1.0' in page
            )
            assert f'kvoffload_proxy_load_tokens{{instance="{w.d.address}",role="decode"}} 0.0' in page
            assert (await w.client.get("/nowhere")).status_code == 404
            assert (await w.client.get("/v1/completions")).status_code == 405
            assert (await w.client.get("/admin/instances")).status_code == 404, "no token, no admin"
            broken = await w.client.post("/v1/completions", content=b"{", headers=JSON)
            assert (broken.status_code, broken.json()["error"]["code"]) == (400, 400)

    run(scenario())


def test_admin() -> None:
    async def scenario() -> None:
        async with world(prefillers=1, decoders=2, admin_token="secret") as w:
            path, auth = "/admin/instances", {"authorization": "Bearer secret"}
            assert (await w.client.get(path)).status_code == 401
            assert (await w.client.get(path, headers={"authorization": "Bearer x"})).status_code == 401
            first = {"role": "decode", "host": "127.0.0.1", "port": w.d.port}
            drained = await w.client.post(f"{path}/drain", json=first, headers=auth)
            assert drained.json()["decode"][0]["draining"] is True
            for _ in range(4):
                await w.stream(max_tokens=1)
            assert not w.d.exchanges
            await w.client.post(f"{path}/add", json=first, headers=auth)
            for engine in w.decoders[1:]:
                body = {"role": "decode", "host": "127.0.0.1", "port": engine.port}
                removed = await w.client.post(f"{path}/remove", json=body, headers=auth)
                assert len(removed.json()["decode"]) == 1
            await w.stream(max_tokens=1)
            assert len(w.d.exchanges) == 1
            for bad in ({**first, "host": "0.0.0.0"}, {**first, "role": "x"}, {**first, "role": "prefill"}):
                assert (await w.client.post(f"{path}/add", json=bad, headers=auth)).status_code == 400
            gone = {**first, "port": 1}
            assert (await w.client.post(f"{path}/remove", json=gone, headers=auth)).status_code == 404

    run(scenario())


def test_metaserver_knows_its_requests() -> None:
    async def scenario() -> None:
        async with world() as w:

            async def poster(exchange: Any) -> None:
                assert await exchange.post(request_id="cmpl-other-0") == 404
                assert await exchange.post(remote_port="x") == 400
                assert await exchange.post(remote_port=0) == 400
                assert await exchange.post(do_remote_prefill=True) == 400
                assert not w.p.exchanges
                await exchange.rendezvous()
                assert await exchange.post() == 200, "a repeated post"
                await exchange.start_stream()
                await exchange.word(0, "length")
                await exchange.end_stream(1)

            w.d.behaviours.append(poster)
            assert text_of(await w.stream(max_tokens=1)) == words(3, 1)
            await w.settle()
            assert len(w.p.exchanges) == 1, "one prefill however often decode posts"
            path = w.settings.metaserver.removeprefix(w.url)
            late = {"request_id": w.d.exchanges[0].external_id, "failure": "read", "error": "late"}
            for at in (path, f"{path}/failed"):
                assert (await w.client.post(at, json=late)).status_code == 404
                assert (await w.client.post(at, content=b"{")).status_code == 400
                assert (await w.client.post(at, content=b"[" * 5000)).status_code == 400
            assert (await w.client.post(path, json=[1])).status_code == 404
            assert (await w.client.post(f"{path}/failed", json=[1])).status_code == 400

    run(scenario())


def test_the_answers_id_opens_nothing() -> None:
    """Posts need the path's token, which only engines are told."""

    async def scenario() -> None:
        async with world() as w:

            async def attacked(exchange: Exchange) -> None:
                message = {
                    "request_id": exchange.external_id,
                    "failure": "read",
                    "error": "x",
                    "remote_engine_id": "e",
                    "remote_host": "127.0.0.1",
                    "remote_port": 9,
                    "remote_cached_tokens": 0,
                }
                token, found = w.settings.metaserver_token, []
                for path in (
                    "",
                    "/",
                    "/x",
                    f"/{token}x",
                    f"/{token}/",
                    f"/{token[:-1]}",
                    f"/{token}/x",
                    "/\u2603",
                ):
                    found.append((await w.client.post(f"/v1/metaserver{path}", json=message)).status_code)
                found.append((await w.client.get(f"/v1/metaserver/{token}")).status_code)
                assert found == [404] * 9
                assert not w.p.exchanges
                for host in ("*", "0.0.0.0", "a..b", "10.0.0.1:1/x y"):
                    assert await exchange.post(remote_host=host) == 400
                await decode(exchange)

            w.d.behaviours.append(attacked)
            assert (await w.complete(max_tokens=2)).json()["choices"][0]["text"] == words(3, 2)

    run(scenario())


MB = 1 << 20
JSON = {"content-type": "application/json"}


def test_bodies_that_are_not_declared_as_json_are_refused_as_by_vllm() -> None:
    async def scenario() -> None:
        async with world() as w:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/jsonl"}):
                    answer = await w.client.post(path, content=b'{"prompt": "a"}', headers=headers)
                    assert answer.status_code == 400
                    assert "application/json" in answer.json()["error"]["message"]
            assert not w.d.exchanges
            headers = {"content-type": "Application/JSON; charset=utf-8"}
            answer = await w.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
            assert answer.status_code == 200

    run(scenario())


def test_requests_without_kv_are_forwarded_to_one_decode_engine() -> None:
    async def scenario() -> None:
        async with world() as w:
            answer = await w.client.post("/tokenize", json={"prompt": "a b"})
            assert answer.status_code == 200
            assert len(answer.json()["tokens"]) == 2
            assert (await w.client.get("/tokenize")).status_code == 405
            for method, path in (
                ("GET", "/load"),
                ("POST", "/reset_prefix_cache"),
                ("POST", "/v1/embeddings"),
            ):
                assert (await w.client.request(method, path, json={})).status_code == 404, "not on the list"
            long = await w.client.post("/tokenize", json={"prompt": "x" * (5 * MB)})
            assert long.status_code == 413
            w.d.tokenizes = False
            assert (await w.client.post("/tokenize", json={"prompt": "a"})).status_code == 404
            await w.settle()
            assert w.app.core.held.used == 0

    run(scenario())


def test_streams_tell_relays_not_to_hold_tokens_back() -> None:
    async def scenario() -> None:
        async with (
            world() as w,
            w.client.stream(
                "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 1}
            ) as answer,
        ):
            await answer.aread()
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-accel-buffering"] == "no"

    run(scenario())


@pytest.mark.parametrize(
    ("raw", "status", "why"),
    [
        (b'{"n": 128, "prompt": "' + b"x" * (4 * MB) + b'"}', 413, "128 choices"),
        (
            b'{"prompt": [' + b",".join([b'"a"'] * 1000) + b'], "user": "' + b"x" * MB + b'"}',
            413,
            "1000 choices",
        ),
        (b'{"prompt": "a", "x": [' + b"{}," * (2 * MB) + b"1]}", 413, "for all requests"),
        (b'{"prompt": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "nested"),
        (b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "nested"),
        (b'{"prompt": "' + b"x" * (9 * MB) + b'"}', 413, "for all requests"),
    ],
)
def test_a_request_costs_no_more_than_its_budget(raw: bytes, status: int, why: str) -> None:
    async def scenario() -> None:
        async with world(max_held_bytes=8 * MB) as w:
            answer = await w.client.post("/v1/completions", content=raw, headers=JSON)
            assert answer.status_code == status, answer.text
            assert why in answer.json()["error"]["message"]
            assert not w.d.exchanges
            assert w.app.core.held.used == 0
            assert (await w.complete(prompt="y " * MB, max_tokens=1)).status_code == 200
            await w.settle()
            assert w.app.core.held.used == 0

    run(scenario())


def test_sub_requests_are_sent_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many choices a large request has, a few of its bodies exist at a time."""
    monkeypatch.setattr("vllm_kvoffload.proxy.dispatch.WINDOW", 3 * MB)
    open_now, most = 0, 0
    request = Client.request

    async def counted(self: Client, *arguments: Any, body: bytes = b"", **more: Any) -> Any:
        nonlocal open_now, most
        open_now += len(body)
        most = max(most, open_now)
        try:
            return await request(self, *arguments, body=body, **more)
        finally:
            open_now -= len(body)

    monkeypatch.setattr(Client, "request", counted)

    async def scenario() -> None:
        async with world() as w:
            prompt = "ab " * (MB // 3)
            answer = await w.complete(prompt=prompt, n=12, max_tokens=1, stream=True)
            assert answer.status_code == 200
            assert {text_of(events(answer.text), i) for i in range(12)} == {words(MB // 3, 1)}
            assert MB < most <= 3.1 * MB

    run(scenario())


@pytest.mark.parametrize("keeps_up", [True, False])
def test_later_pieces_wake_no_task(keeps_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that keeps up gets them at once, another one all the same."""
    pushed: list[bool] = []
    push = Answer.push

    def counted(self: Answer, data: bytes) -> bool:
        pushed.append(keeps_up and push(self, data))
        return pushed[-1]

    async def slowly(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.rendezvous()
        for index in range(8):
            await exchange.word(index, "length" if index == 7 else None)
            await asyncio.sleep(0.02)
        await exchange.end_stream(8)

    async def scenario() -> None:
        async with world() as w:
            w.d.behaviours.append(slowly)
            found = await w.stream(max_tokens=8, stream_options={"include_usage": True})
            assert text_of(found) == words(3, 8)
            assert found[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
            assert found[-1] == {"done": True}
            assert sum(pushed) >= (4 if keeps_up else 0)
            assert len(pushed) >= 4

    monkeypatch.setattr(Answer, "push", counted)
    run(scenario())
