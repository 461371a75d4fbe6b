"""The two verbs of the Kubernetes API that discovery needs, list and watch, over plain HTTP.

A generated client would bring thousands of types, and would leave to us what is hard: resuming, and telling a watch
that ended from one that has to begin anew.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from extproc.sources.discovery.source import BackOff

log = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its `token`, `ca.crt` and `namespace`."""

_PAGE = 50
"""Objects: some milliseconds to read."""
_MAX_LIST_BYTES = 64 << 20
_MAX_EVENT_BYTES = 8 << 20
"""etcd holds objects of 1.5 MiB at most, in an encoding that is more compact."""
_FIRST_WAIT_S, _MOST_WAIT_S = 0.1, 30.0
_STEADY_S = 10.0
"""A watch that lasted that long is no reason to wait before the next."""
_MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API is, and who asks."""

    url: str
    token: Path | None = ACCOUNT / "token"
    """Read again for each request, since it is replaced about hourly."""
    ca: Path | None = ACCOUNT / "ca.crt"
    timeout_s: float = 10.0
    quiet_s: float = 120.0
    """A watch on which nothing comes for that long is given up: bookmarks come about every minute."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object of the API."""

    group: str
    """"" for the core group."""
    version: str
    plural: str

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{quote(namespace, safe='')}/{self.plural}"


class ApiError(Exception):
    """The API did not do what was asked; the text says what and why."""


class Missing(ApiError):
    """It does not know the resource."""


class Expired(ApiError):
    """What is to be resumed lies too far back."""


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    """An object's metadata, as far as it matters."""

    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None


class Kept(Protocol):
    """An object reduced to what discovery reads of it."""

    @property
    def metadata(self) -> Meta: ...


T = TypeVar("T", bound=Kept)


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    next_page: str | None = msgspec.field(default=None, name="continue")


class _List(msgspec.Struct, Generic[T], frozen=True):
    metadata: _ListMeta
    items: list[T] | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: Meta


_EVENT = msgspec.json.Decoder(_Event)


class Api:
    """An HTTP session with the API server; use it as a context."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self._session: aiohttp.ClientSession | None = None
        self._tls: tuple[int, ssl.SSLContext] | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(
        self, resource: Resource, namespace: str, params: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """An answer of 200, whose body is still to be read; else ApiError."""
        assert self._session is not None
        url = self.server.url + resource.path(namespace)
        verb = "watch" if "watch" in params else "list"
        try:
            # a watch, too, is to be answered in time, though it then may be quiet for longer
            async with asyncio.timeout(self.server.timeout_s):
                answer = await self._session.get(
                    url,
                    params=params,
                    headers=self._headers(),
                    ssl=self._context(),
                    timeout=limits,
                    allow_redirects=False,
                )
                if answer.status == 200:
                    return answer
                async with answer:
                    told = await answer.content.read(1 << 16)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(f"{self.server.url} {_reason(error)}") from error
        raise self._refusal(answer.status, told, resource, namespace, verb)

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self.server.token is not None:
            try:
                headers["Authorization"] = f"Bearer {self.server.token.read_text(encoding='ascii').strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise ApiError(f"the token {self.server.token} cannot be read: {_reason(error)}") from error
        return headers

    def _context(self) -> ssl.SSLContext | bool:
        """What the server has to prove itself by; read again when the file changed."""
        ca = self.server.ca
        if ca is None or not self.server.url.startswith("https:"):
            return True
        try:
            stamp = ca.stat().st_mtime_ns
            if self._tls is None or self._tls[0] != stamp:
                self._tls = (stamp, ssl.create_default_context(cafile=str(ca)))
        except (OSError, ssl.SSLError) as error:
            raise ApiError(f"the certificate {ca} cannot be used: {_reason(error)}") from error
        return self._tls[1]

    def _refusal(self, status: int, told: bytes, resource: Resource, namespace: str, verb: str) -> ApiError:
        try:
            message = msgspec.json.decode(told, type=_Status).message
        except msgspec.DecodeError:
            message = told.decode("utf-8", "replace")
        said = " ".join(message.split())[:_MAX_REASON]
        if status == 401:
            return ApiError(f"the API server does not accept the token {self.server.token} (401: {said})")
        if status == 403:
            return ApiError(
                f"not allowed to {verb} {resource} in namespace {namespace}: a Role there has to have "
                f'apiGroups: ["{resource.group}"], resources: ["{resource.plural}"], verbs: ["list", "watch"] '
                f"(403: {said})"
            )
        if status == 404:
            return Missing(f"the API server has no {resource} of version {resource.version} (404: {said})")
        if status == 410:
            return Expired(said)
        return ApiError(f"the API server answers {status} to {verb} {resource}: {said}")


@dataclass(slots=True)
class Collection(Generic[T]):
    """The objects of one resource in one namespace that `params` select."""

    api: Api
    resource: Resource
    namespace: str
    kind: type[T]
    params: Mapping[str, str]
    rng: random.Random
    _objects: dict[str, T] = field(default_factory=dict)

    async def listed(self) -> tuple[dict[str, T], str]:
        """All objects by name, and the version of the collection that they are."""
        objects: dict[str, T] = {}
        page = {"limit": str(_PAGE)}
        limits = aiohttp.ClientTimeout(total=self.api.server.timeout_s)
        while True:
            answer = await self.api.get(self.resource, self.namespace, {**self.params, **page}, limits)
            try:
                async with answer:
                    body = bytearray()
                    async for piece in answer.content.iter_any():
                        body += piece
                        if len(body) > _MAX_LIST_BYTES:
                            raise ApiError(f"the list of {self.resource} is too large")
            except (aiohttp.ClientError, TimeoutError) as error:
                raise ApiError(f"{self.api.server.url} {_reason(error)}") from error
            try:
                part = msgspec.json.decode(body, type=_List[self.kind])  # type: ignore[name-defined]
            except msgspec.DecodeError as error:
                raise ApiError(f"the API server's list of {self.resource} cannot be read: {error}") from error
            objects.update((each.metadata.name, each) for each in part.items or ())
            if not part.metadata.next_page:
                return objects, part.metadata.resource_version
            page["continue"] = part.metadata.next_page

    async def follow(self, failed: Callable[[str], None]) -> AsyncGenerator[Mapping[str, T], None]:
        """All objects by name: at first, whenever some changed, and whenever a failure is over. Missing is raised.

        A watch that ended is resumed where it was; the objects are listed anew where the server cannot do that.
        """
        wait = BackOff(self.rng, first_s=_FIRST_WAIT_S, most_s=_MOST_WAIT_S)
        version = ""
        while True:
            began = asyncio.get_running_loop().time()
            try:
                if not version:
                    self._objects, version = await self.listed()
                    yield self._objects
                async with aclosing(self._watch(version)) as batches:
                    async for events in batches:
                        version = self._take(events) or version
                        if events:
                            wait.reset()
                        yield self._objects
            except Missing:
                raise
            except Expired:
                log.debug("%s are listed anew", self.resource)
                version = ""
            except ApiError as error:
                failed(str(error))
            except msgspec.DecodeError as error:
                failed(f"an event of {self.resource} cannot be read: {error}")
                version = ""
            if asyncio.get_running_loop().time() - began > _STEADY_S:
                wait.reset()
            await wait.wait()

    async def _watch(self, version: str) -> AsyncGenerator[list[_Event], None]:
        """Events as they come; nothing, at first, when the server agreed to tell them. It ends where the watch does."""
        quiet_s = self.api.server.quiet_s
        params = {
            **self.params,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            # ends at different times for each of many watches
            "timeoutSeconds": str(self.rng.randint(240, 360)),
        }
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self.api.server.timeout_s, sock_read=quiet_s)
        async with await self.api.get(self.resource, self.namespace, params, limits) as answer:
            yield []
            rest = b""
            try:
                async for piece in answer.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    if len(rest) > _MAX_EVENT_BYTES:
                        raise ApiError(f"an event of {self.resource} is too large")
                    if events := [_EVENT.decode(line) for line in lines if line]:
                        yield events
            except (aiohttp.ClientError, TimeoutError) as error:
                # what came is complete as far as it goes, and half a line comes again
                log.debug("the watch of %s broke off: %s", self.resource, error)

    def _take(self, events: list[_Event]) -> str:
        """Make the objects what they are now, and return their version."""
        version = ""
        for event in events:
            if event.type in ("ADDED", "MODIFIED", "DELETED"):
                changed = msgspec.json.decode(event.object, type=self.kind)
                version = changed.metadata.resource_version
                if event.type == "DELETED":
                    self._objects.pop(changed.metadata.name, None)
                else:
                    self._objects[changed.metadata.name] = changed
            elif event.type == "BOOKMARK":
                version = msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version
            elif event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=_Status)
                # 410 is the usual one; whatever it was, only a new list is known to be whole
                raise Expired(status.message)
        return version


def _reason(error: Exception) -> str:
    """What is wrong, the same words each time."""
    if isinstance(error, TimeoutError):
        return "does not answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError | ssl.SSLError):
        return f"has no certificate that can be trusted: {error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
