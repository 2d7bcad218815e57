"""
``drakit-operator``: reads arguments and settings, configures the log, and runs the app.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from drakit.text import escaped_streams
from drakit_daemon import event_loop, logs
from drakit_daemon.command_line import DAEMON_EXIT_CODES, ProgramParser, add_logging, refuse
from drakit_daemon.kube import ConfigError as ConnectionConfigError
from drakit_explain.cel import NoEvaluatorError, installed_selectors
from drakit_operator.app import App
from drakit_operator.config import Config, ConfigError, read_config

logger = logging.getLogger("drakit_operator")


@escaped_streams()
def main(arguments: list[str] | None = None) -> None:
    """Run the operator until it receives a signal to stop."""
    options = parser().read(arguments)
    try:
        config = read_config(options.config)
    except ConfigError as error:
        refuse([error])
    logs.configure(
        level=options.log_level or config.logging.level,
        form=options.log_format or config.logging.format,
    )
    _limit_kopf_logs()
    try:
        event_loop.run(_run(config, options.kubeconfig))
    except (ConnectionConfigError, NoEvaluatorError) as error:
        refuse([error])
    except Exception:
        logger.critical("the operator failed", exc_info=True)
        sys.exit(1)


async def _run(config: Config, kubeconfig: Path | None) -> None:
    selectors, name = installed_selectors()
    logger.info("selectors are evaluated", extra={"by": name})
    app = App(
        config=config,
        kubeconfig=kubeconfig,
        # The chart sets both variables. Outside a cluster, the hostname and "default" are used.
        name=os.environ.get("POD_NAME") or os.uname().nodename,
        namespace=os.environ.get("POD_NAMESPACE") or "default",
        selectors=selectors,
    )
    try:
        await app.run()
    finally:
        selectors.close()


def parser() -> ProgramParser:
    """Return the command-line parser."""
    parser = ProgramParser(
        prog="drakit-operator",
        description="Explains in Events why pods wait for devices, and reconciles drakit's custom "
        "resources. The chart starts it in a Deployment.",
        epilog=DAEMON_EXIT_CODES,
        examples=(
            "drakit-operator --config /etc/drakit/operator.yaml",
            "drakit-operator --config operator.yaml --kubeconfig ~/.kube/config --log-format text",
        ),
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file (YAML; default: none)"
    )
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="kubeconfig file (default: the pod's service account, or the user's kubeconfig)",
    )
    add_logging(parser)
    return parser


def _limit_kopf_logs() -> None:
    # Kopf logs each handled event at INFO.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf.objects").addFilter(_name_object)
    # The webhook's Kopf instance runs in a thread that does not receive signals, and logs that as a
    # warning.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)


def _name_object(record: logging.LogRecord) -> bool:
    """Remove the data that Kopf adds to a log record (about 2 KiB of settings), except for the
    object. Drop records about refusals, because tenants can cause any number of them."""
    if str(record.msg).startswith("Webhook ") and "failed permanently" in str(record.msg):
        return False
    facts = vars(record)
    facts.pop("settings", None)
    facts.pop("k8s_skip", None)
    if (of := facts.pop("k8s_ref", None)) is not None:
        facts["object"] = f"{of.get('kind')} {of.get('name')}"
    return True


if __name__ == "__main__":
    main()
