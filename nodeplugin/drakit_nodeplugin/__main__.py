"""The ``drakit-nodeplugin`` command: reads arguments and the environment, and runs the daemon."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from pathlib import Path

from drakit.text import escaped_streams
from drakit_daemon.command_line import DAEMON_EXIT_CODES, ProgramParser, add_logging, refuse


@escaped_streams()
def main() -> None:
    """Run the node plugin. Print one sentence for each problem in the arguments or settings."""
    # gRPC reads this variable when it is imported. The daemon never forks, and gRPC's fork handlers
    # cost threads and time.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    arguments = parser().read()

    from drakit_daemon import event_loop, logs
    from drakit_daemon.tasks import limit_exit
    from drakit_nodeplugin.app import Launch, serve
    from drakit_nodeplugin.config import ConfigError, load_config
    from drakit_nodeplugin.state.podresources import own_pod

    node_name = arguments.node_name or os.environ.get("NODE_NAME")
    if not node_name:
        refuse(["the name of this node is unknown: set --node-name or $NODE_NAME"])
    try:
        config = load_config(
            arguments.config,
            kubeletRoot=arguments.kubelet_root,
            cdiDirectory=arguments.cdi_dir,
        )
        logs.configure(
            level=arguments.log_level or config.logging.level,
            form=arguments.log_format or config.logging.format,
        )
        launch = Launch(
            config_file=arguments.config,
            node_name=node_name,
            instance_uid=os.environ.get("POD_UID") or str(uuid.uuid4()),
            pod=own_pod(os.environ),
            kubeconfig=arguments.kubeconfig,
        )
        event_loop.run(serve(config, launch))
        limit_exit(0)
    except ConfigError as error:
        refuse([error])
    except ExceptionGroup as group:
        refused, failed = group.split(ConfigError)
        if failed is None and refused is not None:
            refuse(refused.exceptions)
        logging.getLogger(__name__).critical("the node plugin failed", exc_info=group)
        limit_exit(1)
        sys.exit(1)


def parser() -> ProgramParser:
    """Return the command line parser."""
    parser = ProgramParser(
        prog="drakit-nodeplugin",
        description="Runs the drivers of this node for the kubelet. The chart starts it in a "
        "DaemonSet.",
        epilog=DAEMON_EXIT_CODES,
        examples=(
            "drakit-nodeplugin --config /etc/drakit/nodeplugin.yaml",
            "drakit-nodeplugin --config nodeplugin.yaml --kubeconfig kubeconfig --node-name node-1",
        ),
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="configuration file (YAML)"
    )
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="kubeconfig file (default: the service account of the pod)",
    )
    parser.add_argument(
        "--kubelet-root",
        type=Path,
        metavar="DIR",
        help="root directory of the kubelet; overrides the configuration file",
    )
    parser.add_argument(
        "--cdi-dir",
        type=Path,
        metavar="DIR",
        help="directory of CDI specs; overrides the configuration file",
    )
    parser.add_argument(
        "--node-name",
        metavar="NAME",
        help="name of this node (default: $NODE_NAME)",
    )
    add_logging(parser)
    return parser


if __name__ == "__main__":
    main()
