"""The completions interface over HTTP, for clients that already speak it: one model, requests batched as they come.

    pip install -e ".[serve]"
    python scripts/serve.py -m demo --port 8000

POST /v1/completions, GET /v1/models, GET /health. See scripts/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from serving.answer import Answer, Piece
from serving.asked import Asked, Bounds, RefusedError, read, read_json
from serving.engine import Engine, Event, FullError, Job
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import minigpt
from minigpt import LanguageModel, MiniGPTError
from minigpt.checks import integer

CONNECTIONS = 512  # more get 503 from uvicorn
SLOW = 30.0  # seconds that a client may take to send its body, or to read on after its time is up


def as_json(content: object) -> bytes:
    """ASCII: also of lone surrogates, which a request may hold."""
    return json.dumps(content, separators=(",", ":")).encode()


def reply(content: object, status: int = 200, **headers: str) -> Response:
    return Response(as_json(content), status, {name.replace("_", "-"): value for name, value in headers.items()},
                    "application/json")  # fmt: skip


class Service:
    """The three endpoints over one engine."""

    def __init__(self, engine: Engine, name: str, bounds: Bounds) -> None:
        self.engine, self.name, self.bounds, self.started = engine, name, bounds, int(time.time())

    async def health(self, _: Request) -> Response:
        state = self.engine.state()
        return reply(state, 200 if state["status"] == "ok" else 503)

    async def models(self, request: Request) -> Response:
        """The list of the one model, or the model by its name."""
        one = {"id": self.name, "object": "model", "created": self.started, "owned_by": "minigpt"}
        wanted = request.path_params.get("name")
        if wanted not in (None, self.name):
            raise RefusedError("the model does not exist", "model", 404, "model_not_found")
        return reply(one if wanted else {"object": "list", "data": [one]})

    async def completions(self, request: Request) -> Response:
        arrived = time.monotonic()
        data = read_json(await self._body(request))
        asked = await run_in_threadpool(read, data, self.engine.lm, self.name, self.bounds)
        answer = Answer(asked, self.name, self.engine.lm.limits.tokenizer)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def deliver(at: int, event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed, and so is the connection
                loop.call_soon_threadsafe(events.put_nowait, (at, event))

        tasks = list(zip(asked.prompts, asked.params, strict=True))
        job = Job(tasks, asked.scored, arrived + asked.seconds, deliver)
        if answer.pending:
            try:
                self.engine.submit(job)
            except FullError:
                raise RefusedError("too many requests wait: try again soon", status=429, code="queue_full") from None
        pieces = self._pieces(answer, events)
        if asked.stream:
            return Events(self._events(answer, asked, pieces), self.engine, job)
        return await self._whole(request, answer, pieces, job)

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # Which no page in a browser can send to another site without asking first.
            raise RefusedError("the content type must be application/json", status=415)
        body, size = bytearray(), self.bounds.body
        chunks = request.stream()
        try:
            while chunk := await asyncio.wait_for(anext(chunks, b""), SLOW):
                body += chunk
                if len(body) > size:
                    raise RefusedError(f"the body has more than {size} bytes", status=413, code="too_large")
        except asyncio.TimeoutError:
            raise RefusedError("the body did not come in time", status=408) from None
        return bytes(body)

    async def _pieces(self, answer: Answer, events: asyncio.Queue[tuple[int, Event]]) -> AsyncIterator[Piece]:
        """The pieces of the answer, as they come. Raises RefusedError where a sample fails."""
        for piece in answer.opening():
            yield piece
        while answer.pending:
            for piece in answer.take(*await events.get()):
                yield piece

    async def _whole(self, request: Request, answer: Answer, pieces: AsyncIterator[Piece], job: Job) -> Response:
        async def collect() -> Response:
            return reply(answer.whole([piece async for piece in pieces]))

        async def gone() -> Response:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            return Response(status_code=400)  # that nobody reads

        ways = [asyncio.ensure_future(way()) for way in (collect, gone)]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            return next(way for way in ways if way in done).result()
        finally:
            for way in ways:
                way.cancel()
            self.engine.drop(job)

    async def _events(self, answer: Answer, asked: Asked, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        """The answer as server-sent events; a failure is the last one."""
        more = {"usage": None} if asked.usage else {}
        try:
            async for piece in pieces:
                yield event(answer.chunk(piece, **more))
        except RefusedError as error:
            yield event(error.body)
            return
        if asked.usage:
            yield event(answer.chunk(usage=answer.usage))
        yield b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    return b"data: " + as_json(content) + b"\n\n"


class Events(StreamingResponse):
    """A stream whose job ends with it, however it ends."""

    def __init__(self, content: AsyncIterator[bytes], engine: Engine, job: Job) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # no proxy may hold events back
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self.engine, self.job = engine, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = max(0.0, self.job.deadline - time.monotonic()) + SLOW
        try:
            with suppress(asyncio.TimeoutError):  # a client that does not read: uvicorn closes the connection
                await asyncio.wait_for(super().__call__(scope, receive, send), left)
        finally:
            self.engine.drop(self.job)


class Key:
    """Lets only requests with the key through, and anybody ask for /health."""

    def __init__(self, app: ASGIApp, key: bytes) -> None:
        self.app, self.header = app, b"Bearer " + key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "http" and scope["path"] != "/health" and not hmac.compare_digest(given, self.header):
            error = RefusedError("give the API key as `Authorization: Bearer KEY`", None, 401, "invalid_api_key")
            return await (await refused(None, error))(scope, receive, send)
        await self.app(scope, receive, send)


async def refused(_: Request | None, error: Exception) -> Response:
    """The interface's body for any error."""
    if isinstance(error, RefusedError):
        headers = {"retry_after": "1"} if error.status == 429 else {}
        headers |= {"www_authenticate": "Bearer"} if error.status == 401 else {}
        return reply(error.body, error.status, **headers)
    if isinstance(error, HTTPException):
        body = RefusedError(error.detail, status=error.status_code).body
        return Response(as_json(body), error.status_code, error.headers, "application/json")
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)  # that nobody reads
    return reply(RefusedError("the server failed: its log says why", status=500).body, 500)


def application(
    load: Callable[[], LanguageModel],
    name: str,
    *,
    batch_size: int = 8,
    waiting: int = 64,
    bounds: Bounds | None = None,
    key: bytes | None = None,
    origins: Sequence[str] = (),
) -> Starlette:
    """The ASGI application.

    load: gives the model, in the thread that will use it; what it raises is raised here. name: the model's, for
    clients. waiting: requests in the queue. origins: for CORS.
    """
    engine = Engine(load, batch_size, waiting)
    service = Service(engine, name, bounds or Bounds())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(engine.end)

    routes = [
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.models),
        Route("/health", service.health),
    ]
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    middleware = [*([cors] if origins else []), *([Middleware(Key, key=key)] if key else [])]
    handlers: dict[Any, Any] = dict.fromkeys((RefusedError, HTTPException, ClientDisconnect, Exception), refused)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="gpt2", help="as in minigpt [gpt2]")
    parser.add_argument("--name", help="the model's name for clients [that of --model, of a folder the last part]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, help="CPU threads [all CPUs that it may use]")
    parser.add_argument("--offline", action="store_true", help="never use the network to find the model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1: this machine only]")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one [8000]")
    parser.add_argument("--api-key-file", type=Path, help="a file with the key that clients must give")
    parser.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help="let pages of this origin use it")
    parser.add_argument("--batch-size", type=int, default=8, help="rows at a time [8]")
    parser.add_argument("--waiting", type=int, default=64, help="requests in the queue; more get 429 [64]")
    parser.add_argument("--max-tokens", type=int, default=Bounds.tokens, help="the most for one sample [4096]")
    parser.add_argument("--max-rows", type=int, default=Bounds.rows, help="prompts times n of one request [128]")
    parser.add_argument("--max-seconds", type=float, default=Bounds.seconds, help="of one request, its wait too [120]")
    parser.add_argument("--max-body", type=int, default=Bounds.body, help="bytes of one request [1000000]")
    return parser


def build(args: argparse.Namespace) -> Starlette:
    """The application that the arguments describe. Raises MiniGPTError, ValueError or OSError."""
    for name in ("batch_size", "waiting", "max_tokens", "max_rows", "max_body", "threads"):
        if getattr(args, name) is not None:
            integer(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    key = args.api_key_file.read_bytes().strip() if args.api_key_file else None
    if key == b"":
        raise ValueError(f"{args.api_key_file} holds no key")
    torch.set_num_threads(args.threads or minigpt.usable_cpus())
    load = partial(minigpt.load, args.model, device=args.device, dtype=args.dtype, offline=args.offline)
    folder = Path(args.model)
    name = args.name or (folder.resolve().name if folder.is_dir() else args.model)
    bounds = Bounds(args.max_tokens, args.max_rows, args.max_seconds, args.max_body)
    options = {"batch_size": args.batch_size, "waiting": args.waiting, "origins": args.cors}
    return application(load, name, bounds=bounds, key=key, **options)


def main() -> int:
    args = parser().parse_args()
    try:
        app = build(args)
    except (MiniGPTError, ValueError, OSError) as error:
        print("serve: error:", error, file=sys.stderr)
        return 1 if isinstance(error, (MiniGPTError, OSError)) else 2
    if args.host not in ("127.0.0.1", "localhost", "::1") and not args.api_key_file:
        print("serve: whoever can reach this address may use it: see --api-key-file", file=sys.stderr)
    uvicorn.run(
        app,
        host=args.host,
        port=args.port,
        ws="none",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=int(args.max_seconds + SLOW) + 5,
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before or after the server, which ends on it by itself
        sys.exit(130)
