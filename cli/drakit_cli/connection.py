"""
Opens a command's session, based on its options (:mod:`.options`) and the kubeconfig.

Does not depend on the command's requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from drakit_cli.answers import CommandError, UsageError
from drakit_daemon.kube import ApiError, ConfigError, Overrides, Session, connect
from drakit_daemon.kube.session import Timeouts, kubeconfig_exists, user_kubeconfig

Answer = TypeVar("Answer")

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 30.0
"""The request timeout. It is longer than a daemon's, because a user may be far from the cluster."""

_NO_TIMEOUT_SECONDS = 24 * 3600.0
"""The timeout if the option is 0, which means no limit."""


def fetch(options: argparse.Namespace, ask: Callable[[Session, str], Awaitable[Answer]]) -> Answer:
    """
    Connect as the user, and call `ask` with the session and the user's namespace.

    :raises UsageError: the kubeconfig is unusable.
    """

    # Don't return the result from the task. When the task ends, Python 3.11 replaces the signal
    # handler that refers to the task. For that, it formats the task with its result, which can
    # refer to all facts of a cluster.
    answers: list[Answer] = []

    async def fetch() -> None:
        async with await open_session(options) as session:
            answers.append(await ask(session, namespace_of(options, session)))

    asyncio.run(fetch())
    return answers[0]


def fetch_checked(
    options: argparse.Namespace, ask: Callable[[Session], Awaitable[Answer]]
) -> Answer:
    """
    Connect as the user, and call `ask`. An API server error becomes the command's error.

    :raises CommandError: the API server refuses a request, or does not respond.
    :raises UsageError: the kubeconfig is unusable.
    """
    try:
        return fetch(options, lambda session, _: ask(session))
    except ApiError as error:
        raise CommandError(str(error)) from error


def namespace_of(options: argparse.Namespace, session: Session) -> str:
    """Return the namespace from the option if the command has it, otherwise the namespace of the
    kubeconfig."""
    return getattr(options, "namespace", None) or session.namespace or "default"


async def open_session(options: argparse.Namespace) -> Session:
    """Return a session that has not sent a request yet."""
    seconds = options.request_timeout
    request_seconds = REQUEST_SECONDS if seconds is None else seconds or _NO_TIMEOUT_SECONDS
    kubeconfig = await asyncio.to_thread(find_kubeconfig, options.kubeconfig, os.environ)
    try:
        return await connect(
            kubeconfig,
            context=options.context,
            overrides=_overrides(options),
            user_agent=options.user_agent,
            timeouts=Timeouts(
                connect_seconds=min(CONNECT_SECONDS, request_seconds),
                request_seconds=request_seconds,
            ),
        )
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _overrides(options: argparse.Namespace) -> Overrides:
    as_user = options.as_ or ""
    if not as_user and (options.as_group or options.as_uid):
        raise UsageError("--as-group and --as-uid need --as")
    texts = ("cluster", "user", "server", "token", "certificate_authority", "tls_server_name")
    return Overrides(
        **{key: getattr(options, key) or "" for key in (*texts, "as_uid")},
        insecure_skip_tls_verify=options.insecure_skip_tls_verify,
        as_user=as_user,
        as_groups=tuple(options.as_group),
    )


def find_kubeconfig(given: Path | None, environ: Mapping[str, str]) -> Path | None:
    """
    Return the given kubeconfig, or the user's default one. None if neither exists.

    The kubeconfig takes precedence over a pod's service account, as in kubectl.
    """
    if given is not None:
        return given
    paths = user_kubeconfig(environ)
    return Path(paths) if kubeconfig_exists(paths) else None
