"""
Questions of a command, in the namespace of the user.

It must not know what is asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import TypeVar

from drakit_cli import connection
from drakit_daemon.kube import Session

Answer = TypeVar("Answer")

USER_AGENT = "kubectl-drakit"


def fetch(options: argparse.Namespace, ask: Callable[[Session, str], Awaitable[Answer]]) -> Answer:
    """
    Connect as the user, and ask in the user's namespace.

    :raises UsageError: the kubeconfig is unusable.
    """

    async def ask_inside(session: Session) -> Answer:
        return await ask(session, options.namespace or session.namespace or "default")

    return connection.fetch(options, ask_inside, user_agent=USER_AGENT)
