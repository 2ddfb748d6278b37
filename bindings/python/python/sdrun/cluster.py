"""sdrun on a Ray cluster: a replica for each GPU, and one endpoint with the HTTP API of `sdrun serve`.

    serve run sdrun.cluster:app program=/opt/sdrun/sdrun gpus=1 most=8 options="--models /models --loras /loras"

Each `Worker` is a replica of Ray Serve that keeps a `sdrun serve` process beside it. The `Front` takes requests. A request that draws goes
to a worker that drew with the same model and adapters before, if there is one (Serve's model multiplexing). Serve starts and ends workers
as the queue grows and shrinks, up to `most`. If a worker is lost, the front sends the request to another one: with the same seed, so that it
draws the same picture.

It needs the packages `ray[serve]` and `aiohttp`, and the release of sdrun on each node.
"""

import asyncio
import contextlib
import hmac
import json
import os
import random
import re
import secrets
import shlex
import subprocess
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import aiohttp
import ray
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve

#: How often a request is sent to another worker after one was lost.
ATTEMPTS = 4
#: How many jobs the front remembers.
MOST_JOBS = 200
#: Limit for all their pictures together, in bytes.
MOST_BYTES = 256 << 20
#: Requests that draw and answer with the pictures.
DRAWS = {"sdapi/v1/txt2img", "sdapi/v1/img2img", "v1/images/generations", "v1/images/edits"}
#: Settings that hold for every worker.
SHARED = {"sdapi/v1/options", "api/library/refresh", "sdapi/v1/refresh-checkpoints", "sdapi/v1/unload-checkpoint"}
#: Requests about the picture that is being drawn.
RUNNING = {"sdapi/v1/progress", "internal/progress", "sdapi/v1/interrupt", "sdapi/v1/skip"}
#: Headers of one connection, which are not passed on.
OWN_HEADERS = {"host", "connection", "content-length", "transfer-encoding", "authorization", "accept-encoding", "keep-alive"}
#: Final states of a job.
LAST = {"done", "failed", "cancelled"}
LORA = re.compile(r"<lora:([^:>]+)")


class Lost(Exception):
    """A worker's server is gone."""


@dataclass
class Order:
    """A request on its way to a worker."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    #: The shared settings so far, in order: method, path, body.
    shared: list[tuple[str, str, bytes]] = field(default_factory=list)


@serve.deployment(max_ongoing_requests=8, health_check_period_s=2, graceful_shutdown_timeout_s=30)
class Worker:
    """A `sdrun serve` process, which sees the GPUs that Ray gives to this replica."""

    def __init__(self, program: str, options: list[str], key: str):
        self.program, self.options, self.key = program, options, key
        self.headers = {"Authorization": f"Bearer {key}"}
        self.session = None
        self.start()

    def start(self):
        """Starts the process and waits until it is ready."""
        host = ray.util.get_node_ip_address()
        # It ends with this process, whatever ends that.
        command = [self.program, "serve", "--listen", f"{host}:0", "--parent-pid", str(os.getpid()), *self.options]
        environment = {**os.environ, "SDRUN_API_KEY": self.key}
        self.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        words = []
        for line in self.child.stderr:
            words.append(line.strip())
            if found := re.search(r"ready: (http://\S+)", line):
                self.address = found[1]
                break
        else:
            raise RuntimeError(f"{shlex.join(command)} ended: {' '.join(words[-3:])}")
        # Its log becomes this replica's.
        log = self.child.stderr
        threading.Thread(target=lambda: [print(line, end="") for line in log], daemon=True).start()
        # How many of the shared settings this process has.
        self.seen = 0

    def check_health(self):
        """Starts the process again if it has ended. Serve replaces the replica if that fails."""
        if self.child.poll() is not None:
            self.start()

    def __del__(self):
        if (child := getattr(self, "child", None)) is not None:
            child.terminate()

    @serve.multiplexed(max_num_models_per_replica=4)
    async def holds(self, model: str) -> str:
        """Tells Serve that this replica holds the model, so that it routes further requests for it here."""
        return model

    async def send(self, method: str, path: str, query: str, headers: dict[str, str], body: bytes):
        """Sends a request to the process. Returns status, headers and body."""
        if self.session is None:
            self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        url = f"{self.address}/{path}" + (f"?{query}" if query else "")
        try:
            async with self.session.request(method, url, headers={**headers, **self.headers}, data=body) as answer:
                return answer.status, _kept(answer.headers), await answer.read()
        except aiohttp.ClientError as error:
            raise Lost(str(error)) from error

    async def catch_up(self, order: Order):
        """Applies the shared settings that this process does not have yet."""
        self.check_health()
        for method, path, body in order.shared[self.seen :]:
            await self.send(method, path, "", {"Content-Type": "application/json"}, body)
        self.seen = max(self.seen, len(order.shared))

    async def ask(self, order: Order):
        """Answers a request that does not draw."""
        await self.catch_up(order)
        return await self.send(order.method, order.path, order.query, order.headers, order.body)

    async def draw(self, order: Order):
        """Yields `("at", address)` and `("answer", status, headers, body)`. For a job, the answer comes at once; `("picture", headers, body)`
        and `("end", body)` follow when it is done."""
        await self.holds(serve.get_multiplexed_model_id())
        await self.catch_up(order)
        yield "at", self.address
        status, headers, body = await self.send(order.method, order.path, order.query, order.headers, order.body)
        yield "answer", status, headers, body
        if order.path == "api/jobs" and status < 300:
            job = f"api/jobs/{json.loads(body)['id']}"
            try:
                async with self.session.get(f"{self.address}/{job}/events", headers=self.headers) as events:
                    async for _ in events.content:
                        pass
            except aiohttp.ClientError as error:
                raise Lost(str(error)) from error
            status, _, body = await self.send("GET", job, "", {}, b"")
            if status != 200:
                raise Lost(f"the job is gone: {status}")
            for number in range(len(json.loads(body)["pictures"])):
                yield "picture", *(await self.send("GET", f"{job}/pictures/{number}", "", {}, b""))[1:]
            yield "end", body


@dataclass
class Job:
    """A job of the front. Workers have their own ids for it, one for each attempt."""

    id: str
    address: str = ""
    own_id: str = ""
    answer: tuple | None = None
    #: Its pictures and its last state, when it is done. Its worker may be gone then.
    pictures: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    end: bytes | None = None
    ended: bool = False
    #: Whether a client stopped it. A worker that is being ended stops its jobs, too.
    cancelled: bool = False
    #: Set after each attempt begins, and at the end.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self):
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def translated(self, body: bytes, own_id: str | None = None) -> bytes:
        """With the front's id in place of the worker's."""
        own_id = own_id or self.own_id
        return body.replace(own_id.encode(), self.id.encode()) if own_id else body


def _kept(headers) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if name.lower() not in OWN_HEADERS}


def _response(status: int, headers: dict[str, str], body: bytes) -> Response:
    headers = {name: value for name, value in headers.items() if name != "content-encoding"}
    return Response(body, status_code=status, headers=headers)


def _fault(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}, "message": message}, status_code=status)


def _lost(error) -> tuple[int, dict[str, str], bytes]:
    fault = _fault(503, "unavailable", f"the workers that drew this were lost, or none is left: {error}")
    return 503, {"content-type": "application/json"}, fault.body


async def _persist(attempt):
    """What `attempt` returns, the first time that no worker is lost; the answer of a lost one if that happens every time."""
    for number in range(ATTEMPTS):
        try:
            return await attempt()
        except Exception as error:  # noqa: BLE001  Serve and Ray have many.
            if number + 1 == ATTEMPTS:
                return _lost(error)
            await asyncio.sleep(number)


def _fields(order: Order) -> dict:
    """The request's JSON object; empty if it is none, which the worker refuses."""
    with contextlib.suppress(ValueError):
        fields = json.loads(order.body)
        if isinstance(fields, dict):
            return fields
    return {}


def _with_seed(order: Order) -> bytes:
    """The body with a seed, so that a second attempt draws the same picture."""
    fields = _fields(order)
    if not fields or fields.get("seed") not in (None, -1):
        return order.body
    return json.dumps({**fields, "seed": random.getrandbits(32)}).encode()


def _model(order: Order) -> str:
    """The model and the adapters that a worker needs for this request."""
    fields = _fields(order)
    settings = fields.get("override_settings") or {}
    set_before = [json.loads(body).get("sd_model_checkpoint") for _, path, body in order.shared if path == "sdapi/v1/options"]
    model = fields.get("model") or settings.get("sd_model_checkpoint") or next((it for it in reversed(set_before) if it), "")
    loras = [lora.get("name") for lora in fields.get("loras") or [] if isinstance(lora, dict)]
    loras += LORA.findall(str(fields.get("prompt", "")))
    return "|".join([str(model) or "the default model", *sorted(map(str, loras))])


# Serve copies the application and what it uses when the class is decorated, so helpers come before.
api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@serve.deployment(num_replicas=1, max_ongoing_requests=10_000)
@serve.ingress(api)
class Front:
    """Takes requests, and remembers where jobs are."""

    def __init__(self, workers, key: str, client_key: str | None):
        self.workers = workers
        self.headers = {"Authorization": f"Bearer {key}"}
        self.client_key = client_key
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self.running: dict[object, str] = {}
        self.shared: list[tuple[str, str, bytes]] = []
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    @api.api_route("/{path:path}", methods=["GET", "POST", "HEAD", "OPTIONS"])
    async def any(self, path: str, request: Request):
        if not self._may(request):
            return _fault(401, "unauthenticated", "the key is missing or wrong")
        order = Order(
            request.method, path, request.url.query, _kept(request.headers), await request.body(), list(self.shared)
        )
        if path == "api/jobs" and request.method == "POST":
            return await self._begin(order)
        if path == "api/jobs":
            return JSONResponse({"jobs": [json.loads(await self._show(job)) for job in reversed(self.jobs.values())]})
        if path.startswith("api/jobs/"):
            return await self._job(order, *path.removeprefix("api/jobs/").partition("/")[::2])
        if path in RUNNING and self.running:
            return await self._running(order)
        if path in DRAWS and request.method == "POST":
            return _response(*await self._draw(order))
        answer = await self._ask(order)
        if path in SHARED and request.method == "POST" and answer[0] < 300:
            self.shared.append((order.method, path, order.body))
        return _response(*answer)

    def _may(self, request: Request) -> bool:
        if self.client_key is None:
            return True
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.client_key}".encode())

    async def _ask(self, order: Order):
        async def attempt():
            return await self.workers.ask.remote(order)

        return await _persist(attempt)

    async def _draw(self, order: Order):
        """The answer of a request that draws."""
        order.body = _with_seed(order)

        async def attempt():
            this = object()
            try:
                async for kind, *values in self._items(order):
                    if kind == "at":
                        self.running[this] = values[0]
                    else:
                        return values
                raise Lost("the worker gave no answer")
            finally:
                self.running.pop(this, None)

        return await _persist(attempt)

    def _items(self, order: Order):
        return self.workers.options(stream=True, multiplexed_model_id=_model(order)).draw.remote(order)

    async def _begin(self, order: Order):
        job = Job(f"{secrets.randbits(64):016x}")
        order.body = _with_seed(order)
        task = asyncio.create_task(self._follow(job, order))
        while job.answer is None and not job.ended:
            await job.changed.wait()
        status, headers, body = job.answer or _lost("no worker took the job")
        if status < 300:
            self.jobs[job.id] = job
            job.task = task
            while len(self.jobs) > MOST_JOBS or self._bytes() > MOST_BYTES and len(self.jobs) > 1:
                self.jobs.popitem(last=False)
        return _response(status, headers, job.translated(body))

    def _bytes(self) -> int:
        return sum(len(body) for job in self.jobs.values() for _, body in job.pictures)

    async def _follow(self, job: Job, order: Order):
        """Runs a job to its end, on another worker if one is lost."""

        async def attempt():
            address, job.pictures = "", []
            async for kind, *values in self._items(order):
                if kind == "at":
                    address = values[0]
                elif kind == "answer":
                    job.answer = values
                    if values[0] < 300:
                        job.address, job.own_id = address, json.loads(values[2])["id"]
                    job.tell()
                elif kind == "picture":
                    job.pictures.append(values)
                elif json.loads(values[0])["state"] == "cancelled" and not job.cancelled:
                    raise Lost("the worker is being ended")
                else:
                    job.end = values[0]

        lost = await _persist(attempt)
        job.answer = job.answer or lost
        job.ended = True
        job.tell()

    async def _show(self, job: Job) -> bytes:
        """What is known about a job."""
        while job.end is None:
            changed, own_id, body = job.changed, job.own_id, None
            with contextlib.suppress(aiohttp.ClientError):
                async with self.session.get(f"{job.address}/api/jobs/{own_id}", headers=self.headers) as answer:
                    if answer.status == 200:
                        body = await answer.read()
            if job.ended and job.end is None:
                # No worker is left that could do it.
                error = {"code": "unavailable", "message": "every worker that drew this was lost"}
                return job.translated(json.dumps({**json.loads(job.answer[2]), "state": "failed", "error": error}).encode())
            if body is None:
                # The worker is gone, and another one takes the job soon.
                return job.translated(job.answer[2])
            if json.loads(body)["state"] not in LAST:
                return job.translated(body, own_id)
            # A final state counts only once its pictures have arrived here.
            await changed.wait()
        return job.translated(job.end)

    async def _job(self, order: Order, number: str, rest: str):
        job = self.jobs.get(number)
        if job is None:
            return _fault(404, "not_found", f"there is no job {number!r}, or not any more")
        if rest == "":
            return Response(await self._show(job), media_type="application/json")
        if rest == "events":
            return StreamingResponse(self._events(job), media_type="text/event-stream")
        job.cancelled |= rest == "cancel"
        picture = re.fullmatch(r"pictures/(\d+)", rest)
        if picture and job.end is not None and int(picture[1]) < len(job.pictures):
            return _response(200, *job.pictures[int(picture[1])])
        url = f"{job.address}/api/jobs/{job.own_id}/{rest}"
        try:
            async with self.session.request(order.method, url, headers=self.headers, data=order.body) as answer:
                headers, body = _kept(answer.headers), await answer.read()
        except aiohttp.ClientError as error:
            return _response(*_lost(error))
        if headers.get("content-type", "").startswith("application/json"):
            body = job.translated(body)
        return _response(answer.status, headers, body)

    async def _events(self, job: Job):
        """The job's events, from one worker after the other if some are lost. The last one comes from here."""
        while not job.ended:
            changed, own_id = job.changed, job.own_id
            with contextlib.suppress(aiohttp.ClientError):
                url = f"{job.address}/api/jobs/{own_id}/events"
                async with self.session.get(url, headers=self.headers) as events:
                    async for line in events.content:
                        # The last line of a worker that is killed may be a part of one.
                        if line.startswith(b"data:") and line.endswith(b"\n"):
                            if json.loads(line[5:])["state"] in LAST:
                                break
                            yield b"event: job\n" + job.translated(line, own_id) + b"\n"
            if not job.ended:
                await changed.wait()
        yield b"event: job\ndata: " + await self._show(job) + b"\n\n"

    async def _running(self, order: Order):
        """Asks the workers that draw; all of them to stop, and one of them how far it is."""
        answer = _lost("it has just ended")
        for address in list(self.running.values()):
            with contextlib.suppress(aiohttp.ClientError):
                url = f"{address}/{order.path}?{order.query}"
                headers = {**order.headers, **self.headers}
                async with self.session.request(order.method, url, headers=headers, data=order.body) as got:
                    answer = (got.status, _kept(got.headers), await got.read())
                if "progress" in order.path:
                    break
        return _response(*answer)


def app(arguments: dict[str, str]) -> serve.Application:
    """The application. Arguments: `program` (the path of sdrun on each node; `sdrun`), `options` of `sdrun serve`, `gpus` and `cpus` of
    each worker (1 each; `gpus=0` draws on the CPU), `least` and `most` workers (1 and 1), `key` that clients must show as a bearer
    token (none)."""
    known = {"program", "options", "gpus", "cpus", "least", "most", "key"}
    if unknown := set(arguments) - known:
        raise ValueError(f"unknown arguments: {', '.join(sorted(unknown))} (known: {', '.join(sorted(known))})")
    least, most = int(arguments.get("least", 1)), int(arguments.get("most", arguments.get("least", 1)))
    key = secrets.token_hex(16)
    worker = Worker.options(
        ray_actor_options={"num_gpus": float(arguments.get("gpus", 1)), "num_cpus": float(arguments.get("cpus", 1))},
        # A worker draws one picture after the other: more than two waiting ones ask for another worker.
        autoscaling_config={"min_replicas": least, "max_replicas": most, "target_ongoing_requests": 2},
    )
    workers = worker.bind(arguments.get("program", "sdrun"), shlex.split(arguments.get("options", "")), key)
    return Front.bind(workers, key, arguments.get("key"))
