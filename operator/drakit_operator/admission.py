"""
The admission webhook: handlers of Kopf that reject objects which the API server cannot check.

Each replica serves it, whether it leads or not, in a thread of its own: the API server waits for an
answer, and a check of a large cluster in the main loop takes a tenth of a second. The chart
registers the webhook so that an answer that is missing, late or wrong allows the request. So does
each doubt here.

Objects come from tenants: a request has a limit in bytes, a check one in steps, and the questions
about templates, which the leader answers, have a rate. Does not depend on the objects' other
problems, or on the store.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from aiohttp import web
from pydantic import BaseModel, ValidationError

from drakit.settings import describe, parse_address
from drakit_daemon import tasks
from drakit_daemon.event_loop import run_in_thread
from drakit_daemon.kube import Session, resource_path
from drakit_daemon.kube.reflector import Applied, Deleted, Reflector, Replaced
from drakit_daemon.logs import ProblemLog
from drakit_daemon.rate_limiter import RateLimiter
from drakit_explain.parameters import DriverSchemas, parameter_problems, schemas_of
from drakit_formats import crds
from drakit_formats.resource.objects import GROUP, VERSIONS, Object
from drakit_operator.config import Admission as Settings
from drakit_operator.kopf_import import Resource, kopf, spawn

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8 << 20
"""A request has an object before and after a change, each of at most 3 MiB."""

MAX_REQUESTS = 8
"""Requests that are read or checked at the same time: their bytes are in memory."""

MAX_SENTENCES = 3
"""Configs whose problems a refusal reports."""

CERTIFICATE_SECONDS = 5.0
"""Pause between two looks at the files of the certificate, which the kubelet replaces."""

TEMPLATE_SECONDS = 1.0
"""Longest wait for what the leader knows about a template; the API server waits 3 s in all."""

TEMPLATES_A_SECOND = 5.0
TEMPLATES_AT_ONCE = 20.0
"""The templates about which the leader is asked. It checks each of them anyway, for an Event."""

STOP_SECONDS = 2.0
"""Longest time for the requests that are in progress at a stop."""

LOG_SECONDS = 60.0
"""Least time between two log lines about requests: anyone on the pod network can send them."""

MAX_LOGGED = 256
"""Characters of such a line."""

INVALID = 422
"""The HTTP status of a refusal."""

Warn = Callable[[Object], Awaitable[list[str]]]
"""Returns why claims of a template can never be allocated, as far as that is known."""

CHECKED = {
    "resourceclaims": ("CREATE",),  # the spec of a claim or template never changes
    "resourceclaimtemplates": ("CREATE",),
    "deviceclasses": ("CREATE", "UPDATE"),
}
"""The operations by kind; the chart's webhook has the same."""


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
        :param policy_type: the type of the ``spec`` of HostDevicePolicies; None without them.
        :param count: takes the result of each request.
        """
        self._settings = settings
        self._connect = connect
        self._warn = warn
        self._policy_type = policy_type
        self._count = count
        self._schemas: dict[str, DriverSchemas] = {}
        self._certificates = ProblemLog(
            logger,
            "the certificate of the admission webhook cannot be used; nothing is checked",
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
        """The port in use; 0 while nothing is served."""

    async def run(self) -> None:
        """Serve until canceled; raises what ended a part."""
        await run_in_thread("admission", self._serve, stop_seconds=2 * STOP_SECONDS)

    # ---- in the thread of the webhook

    async def _serve(self, stop: asyncio.Event) -> None:
        self._limiter = RateLimiter(burst=TEMPLATES_AT_ONCE, per_second=TEMPLATES_A_SECOND)
        async with await self._connect() as session:
            follow = Reflector(
                session, resource_path(crds.API_VERSION, crds.DRIVERS), keep=schemas_of
            )
            parts = {"drivers": lambda: self._follow(follow), "kopf": self._run_kopf}
            await tasks.run_until(stop, parts)

    async def _follow(self, reflector: Reflector[DriverSchemas]) -> None:
        async for change in reflector.changes():
            match change:
                case Replaced(items=items):
                    self._schemas = {each.driver: each for each in items}
                case Applied(object=one):
                    self._schemas[one.driver] = one
                case Deleted(object=one):
                    self._schemas.pop(one.driver, None)

    async def _run_kopf(self) -> None:
        running = await spawn(self, self._registry())
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=STOP_SECONDS)

    # ------------------------------------------------------------ the source of Kopf

    @property
    def resources(self) -> list[Resource]:
        """The kinds that are checked, in each version that a request can have."""
        ours = [crds.DRIVERS, *([crds.POLICIES] if self._policy_type else [])]
        kinds = [(GROUP, version, plural) for version in VERSIONS for plural in CHECKED]
        kinds += [(crds.GROUP, crds.VERSION, plural) for plural in ours]
        return [
            Resource(group=group, version=version, plural=plural, preferred=True)
            for group, version, plural in kinds
        ]

    async def events(self, resource: Resource) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield nothing: no handler is called for what happens in the cluster."""
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
            on = kopf.on.validate(
                each.group, each.version, each.plural, registry=registry, id=each.plural
            )
            on(handlers[each.plural])
        return registry

    async def _configure(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.admission.server = self._listen
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.process.ultimate_exiting_timeout = None

    async def _login(self, **_: Any) -> kopf.ConnectionInfo:
        # Kopf needs one, although nothing here sends requests.
        return kopf.ConnectionInfo(server="https://unused.invalid")

    # ------------------------------------------------------------ the server

    async def _listen(self, answer: Callable[..., Awaitable[Any]]) -> AsyncIterator[Any]:
        """Serve the requests of the API server; yields nothing of use, because the chart registers
        the webhook."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        loaded = await self._load_certificate(context, None)
        while loaded is None:  # a connection without one would fail anyway
            await asyncio.sleep(CERTIFICATE_SECONDS)
            loaded = await self._load_certificate(context, None)
        at_once = asyncio.Semaphore(MAX_REQUESTS)

        async def serve(request: web.Request) -> web.Response:
            async with at_once:
                try:
                    found = await answer(await request.json())
                    response = found["response"]
                    if not response["allowed"] and response["status"]["code"] != INVALID:
                        raise RuntimeError(response["status"]["message"])  # a defect of ours
                except web.HTTPException:
                    raise
                except Exception as error:  # the API server allows what is not checked
                    self._count("error")
                    self._requests.report(repr(error)[:MAX_LOGGED])
                    raise web.HTTPInternalServerError from None
                self._requests.report(None)
                self._count("allowed" if response["allowed"] else "rejected")
                return web.json_response(found)

        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/", serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_SECONDS)
        await runner.setup()
        try:
            host, port = parse_address(self._settings.listen)
            site = web.TCPSite(runner, host, port, ssl_context=context)
            await site.start()
            self.port = runner.addresses[0][1]
            logger.info("admission webhook served", extra={"port": self.port})
            yield {}
            while True:
                await asyncio.sleep(CERTIFICATE_SECONDS)
                loaded = await self._load_certificate(context, loaded) or loaded
        finally:
            self.port = 0
            await runner.cleanup()

    async def _load_certificate(
        self, context: ssl.SSLContext, loaded: _Certificate | None
    ) -> _Certificate | None:
        """
        Load the certificate, unless it is loaded; return it, or None if it cannot be used.

        New connections use it at once, and those that are open keep the earlier one.
        """
        folder = self._settings.certificates
        try:
            found = await asyncio.to_thread(_find_certificate, folder)
            if found != loaded:
                # The first one tries: a certificate without its key would break the served one.
                for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                    each.load_cert_chain(*found.paths)
        except (OSError, ssl.SSLError) as error:
            self._certificates.report(f"{folder}: {error}")
            return None
        self._certificates.report(None)
        return found

    # ------------------------------------------------------------ the checks

    async def _check_parameters(self, *, body: kopf.Body, old: Any, **_: Any) -> None:
        if not _is_same_spec(body, old):
            problems = list(parameter_problems(body, self._schemas))
            more = f"; and {len(problems) - MAX_SENTENCES} more" * (len(problems) > MAX_SENTENCES)
            if problems:
                raise _refusal("; ".join(problems[:MAX_SENTENCES]) + more)

    async def _check_template(
        self, *, body: kopf.Body, old: Any, warnings: list[str], **_: Any
    ) -> None:
        await self._check_parameters(body=body, old=old)
        if self._limiter.take():
            with suppress(TimeoutError):
                async with asyncio.timeout(TEMPLATE_SECONDS):
                    warnings += await self._warn(cast("Object", dict(body)))

    async def _check_driver(self, *, body: kopf.Body, old: Any, **_: Any) -> None:
        if not _is_same_spec(body, old) and (problems := schemas_of(body).problems):
            raise _refusal("; ".join(problems[:MAX_SENTENCES]))

    async def _check_policy(self, *, body: kopf.Body, old: Any, **_: Any) -> None:
        if self._policy_type is None or _is_same_spec(body, old):
            return
        try:
            self._policy_type.model_validate(body.get("spec"))
        except ValidationError as error:
            lines = describe(error, file="spec").splitlines()
            raise _refusal("; ".join(lines[:MAX_SENTENCES])) from error


def _is_same_spec(body: Mapping[str, Any], old: Mapping[str, Any] | None) -> bool:
    """Return whether an update concerns other fields: an object that was accepted once can change
    its labels."""
    return old is not None and old.get("spec") == body.get("spec")


def _refusal(text: str) -> kopf.AdmissionError:
    return kopf.AdmissionError(text, code=INVALID)


class _Certificate(NamedTuple):
    """The files of a certificate and its key, and what changes with them."""

    paths: tuple[Path, Path]
    stamps: tuple[tuple[int, int], ...]


def _find_certificate(folder: Path) -> _Certificate:
    """Find the files. The kubelet replaces their directory, so both must be from one. Blocks."""
    certificate = (folder / "tls.crt").resolve(strict=True)
    paths = certificate, certificate.with_name("tls.key")
    stats = [path.stat() for path in paths]
    return _Certificate(paths, tuple((each.st_ino, each.st_mtime_ns) for each in stats))
