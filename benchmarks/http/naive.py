"""A naive relay: python -m benchmarks.http.naive --port P --upstream URL (FastAPI and httpx)."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse


def build(upstream: str) -> FastAPI:
    """An application that passes completions on to ``upstream``."""
    app = FastAPI()
    limits = httpx.Limits(max_connections=100000, max_keepalive_connections=100000)
    client = httpx.AsyncClient(base_url=upstream, timeout=None, limits=limits)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        if not body.get("stream"):
            answer = await client.post("/v1/completions", json=body)
            return Response(answer.content, answer.status_code, media_type="application/json")

        async def relay() -> AsyncIterator[bytes]:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for part in answer.aiter_bytes():
                    yield part

        return StreamingResponse(relay(), media_type="text/event-stream")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True)
    arguments = parser.parse_args()
    app = build(arguments.upstream)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
