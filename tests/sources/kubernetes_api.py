"""A small API server for the tests: it lists what it is given, and replays watch streams line by line."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

SLICES = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
PODS = "/api/v1/namespaces/llm/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools"
OLD_POOLS = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/llm/inferencepools"

_END = object()
_CUT = object()


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    """What the API sends for whatever it refuses, as an answer or in a watch."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


GONE = status(410, "Expired", "too old resource version: 100 (205)")


@dataclass(slots=True)
class Watch:
    """One watch that a client opened; the test says what comes."""

    params: dict[str, str]
    headers: dict[str, str]
    _lines: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def sends(self, *events: tuple[str, dict[str, Any]]) -> None:
        for kind, changed in events:
            self.sends_bytes(json.dumps({"type": kind, "object": changed}).encode() + b"\n")

    def sends_bytes(self, data: bytes) -> None:
        self._lines.put_nowait(data)

    def ends(self) -> None:
        """As the server does it when the time that the client asked for is over."""
        self._lines.put_nowait(_END)

    def breaks(self) -> None:
        """The connection is lost."""
        self._lines.put_nowait(_CUT)


@dataclass(slots=True)
class Collection:
    """What a path answers. `status` other than 200: that, with `said`."""

    items: list[dict[str, Any]] = field(default_factory=list)
    version: str = "100"
    page: int = 1000
    code: int = 200
    said: bytes = b""
    expired_page: bool = False

    def refuses(self, code: int, reason: str, message: str) -> None:
        self.code, self.said = code, json.dumps(status(code, reason, message)).encode()

    def allows(self) -> None:
        self.code = 200


@dataclass(slots=True)
class FakeApi:
    url: str = ""
    collections: dict[str, Collection] = field(default_factory=dict)
    refused_watches: dict[str, Collection] = field(default_factory=dict)
    tokens: set[str] | None = None
    """Those that are accepted; None: all."""
    lists: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    watches: dict[str, asyncio.Queue[Watch]] = field(default_factory=dict)
    open: int = 0

    def put(self, path: str, *items: dict[str, Any], version: str = "100") -> Collection:
        made = self.collections.setdefault(path, Collection())
        made.items, made.version = list(items), version
        return made

    async def watch(self, path: str) -> Watch:
        """The next watch that is opened there."""
        async with asyncio.timeout(10):
            return await self.watches.setdefault(path, asyncio.Queue()).get()

    def listed(self, path: str) -> int:
        return sum(each == path for each, _ in self.lists)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        params, path = dict(request.query), request.path
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.tokens is not None and token not in self.tokens:
            return web.json_response(status(401, "Unauthorized", "Unauthorized"), status=401)
        collection = self.collections.get(path)
        if collection is None:
            return web.Response(text="404 page not found\n", status=404)
        watching = params.get("watch") == "1"
        refusing = self.refused_watches.get(path) if watching else collection
        if not watching:
            self.lists.append((path, params))
        if refusing is not None and refusing.code != 200:
            return web.Response(body=refusing.said, status=refusing.code, content_type="application/json")
        return await self._stream(request, path, params) if watching else self._list(collection, params)

    def _list(self, collection: Collection, params: dict[str, str]) -> web.Response:
        start = int(params.get("continue", 0))
        if start and collection.expired_page:
            collection.expired_page = False
            return web.json_response(GONE, status=410)
        size = min(collection.page, int(params["limit"]))
        meta = {"resourceVersion": collection.version}
        if start + size < len(collection.items):
            meta["continue"] = str(start + size)
        return web.json_response({"kind": "List", "metadata": meta, "items": collection.items[start : start + size]})

    async def _stream(self, request: web.Request, path: str, params: dict[str, str]) -> web.StreamResponse:
        watch = Watch(params, dict(request.headers))
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        self.open += 1
        try:
            await answer.prepare(request)
            self.watches.setdefault(path, asyncio.Queue()).put_nowait(watch)
            while (line := await watch._lines.get()) is not _END:
                if line is _CUT:
                    assert request.transport is not None
                    request.transport.abort()
                    break
                await answer.write(line)
        finally:
            self.open -= 1
        return answer


@asynccontextmanager
async def fake_api(tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeApi]:
    api = FakeApi()
    app = web.Application()
    app.router.add_get("/{any:.*}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    api.url = "{}://127.0.0.1:{}".format("https" if tls else "http", runner.addresses[0][1])
    try:
        yield api
    finally:
        await runner.cleanup()


def endpoint(
    ip: str,
    pod: str | None = None,
    *,
    ready: bool | None = True,
    serving: bool | None = None,
    terminating: bool | None = None,
    uid: str = "",
) -> dict[str, Any]:
    """As the endpoint slice controller writes it: what is unknown is left out."""
    conditions = {"ready": ready, "serving": ready if serving is None else serving, "terminating": terminating}
    made: dict[str, Any] = {
        "addresses": [ip],
        "conditions": {key: value for key, value in conditions.items() if value is not None},
        "nodeName": "gpu-1",
        "zone": "zone-a",
    }
    if pod is not None:
        made["targetRef"] = {"kind": "Pod", "namespace": "llm", "name": pod, "uid": uid or f"uid-{pod}"}
    return made


def endpoint_slice(
    name: str,
    *endpoints: dict[str, Any],
    version: int = 100,
    family: str = "IPv4",
    ports: Iterable[tuple[str | None, int]] | None = (("http", 8000),),
) -> dict[str, Any]:
    named = None if ports is None else [{"name": n, "port": p, "protocol": "TCP"} for n, p in ports]
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "generation": 3,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"kubernetes.io/service-name": "vllm", "endpointslice.kubernetes.io/managed-by": "x"},
        },
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": named,
    }


def bookmark(version: int, kind: str = "EndpointSlice") -> tuple[str, dict[str, Any]]:
    """As the API server sends it: an object of the kind with nothing in it but the version."""
    return "BOOKMARK", {"kind": kind, "metadata": {"resourceVersion": str(version), "creationTimestamp": None}}


def pod(
    name: str,
    ip: str | None,
    *,
    ready: bool = True,
    leaving: bool = False,
    version: int = 100,
    ips: Iterable[str] | None = None,
) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name, "namespace": "llm", "uid": f"uid-{name}", "resourceVersion": str(version)}
    meta["labels"] = {"app": "vllm", "topology.kubernetes.io/zone": "zone-b"}
    if leaving:
        meta["deletionTimestamp"] = "2026-01-01T00:00:30Z"
    shown: dict[str, Any] = {
        "phase": "Running",
        "conditions": [
            {"type": "Initialized", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False"},
        ],
    }
    if ip is not None:
        shown |= {"podIP": ip, "podIPs": [{"ip": each} for each in (ips or [ip])]}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": meta,
        "spec": {"nodeName": "gpu-2", "containers": [{"name": "vllm", "image": "vllm"}]},
        "status": shown,
    }


def inference_pool(name: str, spec: dict[str, Any], *, version: int = 50) -> dict[str, Any]:
    return {
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "llm", "resourceVersion": str(version)},
        "spec": {**spec, "endpointPickerRef": {"name": "epp"}},
        "status": {"parents": []},
    }
