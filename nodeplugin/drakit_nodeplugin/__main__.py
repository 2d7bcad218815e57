"""The ``drakit-nodeplugin`` command: reads flags and the environment, and runs the daemon."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from drakit.text import escaped_streams


@escaped_streams()
def main() -> None:
    """Run the node plugin. If the setup is invalid, print one sentence per problem and exit with
    2."""
    # grpc reads this variable at import. The daemon never forks, and grpc's fork handlers cost
    # threads and time.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    arguments = _parser().parse_args()

    from drakit_daemon import event_loop, logs
    from drakit_daemon.tasks import limit_exit
    from drakit_nodeplugin.app import Launch, serve
    from drakit_nodeplugin.config import ConfigError, load_config
    from drakit_nodeplugin.state.podresources import own_pod

    node_name = arguments.node_name or os.environ.get("NODE_NAME")
    if not node_name:
        sys.exit("the node's name is unknown: set NODE_NAME or --node-name")
    try:
        config = load_config(
            arguments.config,
            kubeletRoot=arguments.kubelet_root,
            cdiDirectory=arguments.cdi_dir,
        )
        logs.configure(level=config.logging.level, form=config.logging.format)
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
        sys.exit(_refuse([error]))
    except ExceptionGroup as group:
        refused, failed = group.split(ConfigError)
        if failed is None and refused is not None:
            sys.exit(_refuse(refused.exceptions))
        logging.getLogger(__name__).critical("node plugin failed", exc_info=group)
        limit_exit(1)
        sys.exit(1)


def _refuse(errors: Sequence[Exception]) -> int:
    for error in errors:
        sys.stderr.write(f"{error}\n")
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drakit-nodeplugin", description="Runs the drivers of this node for the kubelet."
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
        help="name of the Node (default: $NODE_NAME)",
    )
    return parser


if __name__ == "__main__":
    main()
