"""
The admission webhook: Kopf handlers that reject invalid objects that the API server itself cannot
check.

Each replica serves the webhook, whether it is the leader or not. The webhook has its own thread,
because the API server waits for the response, and a check of a large cluster blocks the main loop
for a tenth of a second. The chart registers the webhook so that the API server allows a request if
it gets no valid response in time. Therefore, the response to a request that cannot be checked is an
error.

Anyone on the pod network can connect, and objects come from tenants. Therefore, the number of
connections, the bytes, values and seconds of a request, and the steps of a check are limited. The
queries about templates, which the leader answers, have a rate limit. Does not depend on the store.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, cast

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from drakit.settings import describe
from drakit_daemon import tasks
from drakit_daemon.event_loop import run_in_thread
from drakit_daemon.httpserver import open_listener
from drakit_daemon.kube import Session, resource_path
from drakit_daemon.kube.reflector import Applied, Deleted, Reflector, Replaced
from drakit_daemon.logs import ProblemLog
from drakit_daemon.rate_limiter import RateLimiter
from drakit_explain.parameters import DriverSchemas, parameter_problems, schemas_of
from drakit_formats import crds
from drakit_formats.resource.objects import GROUP, VERSIONS, Object
from drakit_operator.config import Admission as Settings
from drakit_operator.kopf_import import Resource, kopf, run

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Maximum number of concurrent connections. Each takes up to 200 KiB. An API server needs one or
two."""

MAX_REQUEST_BYTES = 3 << 20
SMALL_REQUEST_BYTES = 1 << 16
MAX_LARGE_REQUESTS = 4
"""Maximum number of larger requests to read concurrently. Most requests are small, and do not wait
for large ones from slow clients."""

MAX_VALUES = 20_000
"""Maximum number of JSON values in a request. A decoded value can take 100 times as much memory as
its JSON."""

REQUEST_SECONDS = 3.0
"""The time limit for a TLS handshake, and for a request, because the API server does not wait
longer."""

MAX_SENTENCES = 3
"""Maximum number of problems to name in a refusal. All problems of a config are one."""

CERTIFICATE_SECONDS = 5.0
"""How often to check the certificate files, which the kubelet replaces."""

TEMPLATE_SECONDS = 1.0
"""How long to wait for the leader's result about a template. The API server waits 3 s in total."""

TEMPLATES_A_SECOND = 2.0
TEMPLATES_AT_ONCE = 10.0
"""The rate limit and burst of queries about templates, which the leader answers in its main loop. A
check of a large cluster takes a tenth of a second there. The leader later checks each template
anyway, for an Event."""

RETRY_SECONDS = 0.5
"""How long to wait after failing to accept a connection."""

STOP_SECONDS = 2.0
"""How long to wait for in-flight requests during shutdown."""

LOG_SECONDS = 60.0
"""The minimum time between two log lines about requests, because anyone on the pod network can send
requests."""

MAX_LOGGED = 256
"""Maximum length of a log line about a request."""

INVALID = 422
"""The HTTP status of a refusal."""

Warn = Callable[[Object], Awaitable[list[str]]]
"""Returns the known reasons why claims of a template can never be allocated."""

CHECKED = {
    "resourceclaims": ("CREATE",),  # the spec of a claim or template is immutable
    "resourceclaimtemplates": ("CREATE",),
    "deviceclasses": ("CREATE", "UPDATE"),
}
"""The operations to check, keyed by kind. The chart's webhook configuration has the same
operations."""


class Admission:
    """Serves the webhook until canceled."""

    def __init__(
        self,
        settings: Settings,
        *,
        connect: Callable[[], Awaitable[Session]],
        warn: Warn,
        policy_type: type[BaseModel] | None,
        count: Callable[[str], None],
    ) -> None:
        """
        :param connect: opens a session in the thread of the webhook.
        :param warn: called in that thread.
        :param policy_type: the type of a HostDevicePolicy's ``spec``. None if the operator does not
            reconcile HostDevicePolicies.
        :param count: receives the result of each request.
        """
        self._settings = settings
        self._connect = connect
        self._warn = warn
        self._policy_type = policy_type
        self._count = count
        self._schemas: dict[str, DriverSchemas] = {}
        self._listed = asyncio.Event()
        self._context: ssl.SSLContext | None = None
        self._certificates = ProblemLog(
            logger,
            "the certificate of the admission webhook cannot be loaded",
            recovered="the certificate of the admission webhook is loaded",
            fact="reason",
        )
        self._requests = ProblemLog(
            logger,
            "a request of the admission webhook cannot be checked",
            recovered="requests of the admission webhook are checked",
            fact="reason",
            pause_seconds=LOG_SECONDS,
        )
        self.port = 0
        """The port in use. 0 while the webhook is not served."""

    async def run(self) -> None:
        """Serve until canceled. If a part of the webhook fails, raise its error."""
        await run_in_thread("admission", self._serve, stop_seconds=2 * STOP_SECONDS)

    # ---- called in the webhook thread

    async def _serve(self, stop: asyncio.Event) -> None:
        self._limiter = RateLimiter(burst=TEMPLATES_AT_ONCE, per_second=TEMPLATES_A_SECOND)
        async with await self._connect() as session:
            follow = Reflector(
                session, resource_path(crds.API_VERSION, crds.DRIVERS), keep=schemas_of
            )
            kopf = partial(run, self, self._registry())
            await tasks.run_until(stop, {"drivers": lambda: self._follow(follow), "kopf": kopf})

    async def _follow(self, reflector: Reflector[DriverSchemas]) -> None:
        async for change in reflector.changes():
            match change:
                case Replaced(items=items):
                    self._schemas = {each.driver: each for each in items}
                    self._listed.set()
                case Applied(object=one):
                    self._schemas[one.driver] = one
                case Deleted(object=one):
                    self._schemas.pop(one.driver, None)

    # ------------------------------------------------------------ the resources for Kopf

    @property
    def resources(self) -> list[Resource]:
        """The kinds to check, in each version that a request can have."""
        ours = [crds.DRIVERS, *([crds.POLICIES] if self._policy_type else [])]
        kinds = [(GROUP, version, plural) for version in VERSIONS for plural in CHECKED]
        kinds += [(crds.GROUP, crds.VERSION, plural) for plural in ours]
        return [
            Resource(group=group, version=version, plural=plural, preferred=True)
            for group, version, plural in kinds
        ]

    async def events(self, resource: Resource) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield nothing, because the webhook's handlers do not need cluster events."""
        await asyncio.Event().wait()
        yield {}

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self._configure)
        kopf.on.login(registry=registry)(self._login)
        handlers = {
            "resourceclaims": self._check_parameters,
            "resourceclaimtemplates": self._check_template,
            "deviceclasses": self._check_parameters,
            crds.DRIVERS: self._check_driver,
            crds.POLICIES: self._check_policy,
        }
        for each in self.resources:
            kopf.on.validate(
                *(each.group, each.version, each.plural),
                registry=registry,
                id=each.plural,
                when=_has_new_spec,
            )(handlers[each.plural])
        return registry

    async def _configure(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.admission.server = self._listen
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.process.ultimate_exiting_timeout = None

    async def _login(self, **_: Any) -> kopf.ConnectionInfo:
        # Kopf requires a server URL, although the webhook does not send requests through Kopf.
        return kopf.ConnectionInfo(server="https://unused.invalid")

    # ------------------------------------------------------------ the server

    async def _listen(self, answer: Callable[..., Awaitable[Any]]) -> AsyncIterator[Any]:
        """Serve the requests of the API server. Kopf gets no configuration to register, because the
        chart registers the webhook."""
        await self._listed.wait()  # without schemas, the webhook would allow invalid objects
        while not await self._load_certificate():  # noqa: ASYNC110 - nothing notifies
            await asyncio.sleep(CERTIFICATE_SECONDS)
        large = asyncio.Semaphore(MAX_LARGE_REQUESTS)

        async def serve(request: web.Request) -> web.Response:
            try:
                size = request.content_length or MAX_REQUEST_BYTES
                async with asyncio.timeout(REQUEST_SECONDS):
                    async with large if size > SMALL_REQUEST_BYTES else nullcontext():
                        body = await request.read()
                    if sum(map(body.count, (b"{", b"[", b","))) > MAX_VALUES:
                        raise ValueError(f"it has more than {MAX_VALUES} values")
                    found = await answer(orjson.loads(body))
                response = found["response"]
                if not response["allowed"] and response["status"]["code"] != INVALID:
                    # Any other refusal is a bug in the webhook.
                    raise RuntimeError(response["status"]["message"])
            except Exception as error:  # without a result, the API server allows the request
                self._count("error")
                self._requests.report(repr(error)[:MAX_LOGGED])
                raise web.HTTPInternalServerError from None
            self._requests.report(None)
            self._count("allowed" if response["allowed"] else "rejected")
            return web.json_response(found)

        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/", serve)
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=STOP_SECONDS,
            auto_decompress=False,
            read_bufsize=SMALL_REQUEST_BYTES,
        )
        await runner.setup()
        assert runner.server is not None
        listener = await asyncio.to_thread(open_listener, self._settings.listen)
        accepting = asyncio.create_task(self._accept(listener, runner.server))
        try:
            self.port = listener.getsockname()[1]
            logger.info("admission webhook served", extra={"port": self.port})
            yield {}
            while not accepting.done():
                await asyncio.wait({accepting}, timeout=CERTIFICATE_SECONDS)
                await self._load_certificate()
            accepting.result()
        finally:
            self.port = 0
            accepting.cancel()
            listener.close()
            await runner.cleanup()

    async def _load_certificate(self) -> bool:
        """Load the certificate for new connections, and return whether that succeeded. If not, the
        old certificate stays in use."""
        folder = self._settings.certificates
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # The kubelet replaces the whole directory, so load both files from the same directory.
            certificate = await asyncio.to_thread((folder / "tls.crt").resolve, strict=True)
            context.load_cert_chain(certificate, certificate.with_name("tls.key"))
        except OSError as error:
            self._certificates.report(f"{folder}: {error}")
            return False
        self._context = context
        self._certificates.report(None)
        return True

    async def _accept(self, listener: socket.socket, server: web.Server) -> None:
        """Accept connections until canceled. If there are too many, a new connection replaces the
        oldest one."""
        loop = asyncio.get_running_loop()
        opening: dict[asyncio.Task[Any], None] = {}

        async def open_connection(client: socket.socket) -> None:
            with suppress(OSError):  # a failed handshake affects only this client
                await loop.connect_accepted_socket(
                    server, client, ssl=self._context, ssl_handshake_timeout=REQUEST_SECONDS
                )

        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # for example, there are no free file descriptors
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if len(opening) + len(server.connections) >= MAX_CONNECTIONS:
                if opening:
                    next(iter(opening)).cancel()
                elif (oldest := server.connections[0].transport) is not None:
                    oldest.abort()
            task = loop.create_task(open_connection(client))
            opening[task] = None
            task.add_done_callback(opening.pop)
            await asyncio.sleep(0)

    # ------------------------------------------------------------ the checks

    async def _check_parameters(self, *, body: kopf.Body, **_: Any) -> None:
        _refuse(list(parameter_problems(body, self._schemas)))

    async def _check_template(self, *, body: kopf.Body, warnings: list[str], **_: Any) -> None:
        await self._check_parameters(body=body)
        if self._limiter.take():
            with suppress(TimeoutError):
                async with asyncio.timeout(TEMPLATE_SECONDS):
                    warnings += await self._warn(cast("Object", dict(body)))

    async def _check_driver(self, *, body: kopf.Body, **_: Any) -> None:
        _refuse(schemas_of(body).problems)

    async def _check_policy(self, *, spec: kopf.Spec, **_: Any) -> None:
        assert self._policy_type is not None
        try:
            self._policy_type.model_validate(dict(spec))
        except ValidationError as error:
            _refuse(describe(error, file="spec").splitlines())


def _has_new_spec(*, body: kopf.Body, old: Any, **_: Any) -> bool:
    """Return whether the webhook may refuse an object. An existing object may be refused only if
    its spec has changed, so that its labels can always be changed."""
    return old is None or old.get("spec") != body.get("spec")


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        more = f"; and {len(problems) - MAX_SENTENCES} more" * (len(problems) > MAX_SENTENCES)
        raise kopf.AdmissionError("; ".join(problems[:MAX_SENTENCES]) + more, code=INVALID)
