"""
`python -m e2e.cluster`: the cluster targets of make.

Errors are printed as one sentence, and the exit code is 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .api import Cluster, ClusterError, Options
from .choice import REPOSITORY, cluster

PLUGINS = REPOSITORY / "build" / "kubectl-plugins"
"""The folder that `env` puts on the PATH for `kubectl drakit`."""


def main() -> int:
    arguments = _parser().parse_args()
    action: Callable[[Cluster, argparse.Namespace], int] = arguments.action
    try:
        return action(cluster(arguments.name), arguments)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def prepare(chosen: Cluster, arguments: argparse.Namespace) -> int:
    chosen.prepare()
    return 0


def up(chosen: Cluster, arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    chosen.start(Options(nodes=arguments.nodes, kept=True))
    seconds = time.monotonic() - started
    print(f"cluster {chosen.name} ({chosen.provider}) is up after {seconds:.1f} s")
    print("to use it with kubectl, kubectl drakit and helm, run this in each terminal:")
    print('eval "$(make -s cluster-env)"')
    return 0


def down(chosen: Cluster, arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    chosen.stop()
    left = chosen.leftovers()
    for sentence in left:
        print(f"error: after the stop, {sentence}", file=sys.stderr)
    if not left:
        print(f"cluster {chosen.name} is removed after {time.monotonic() - started:.1f} s")
    return 1 if left else 0


def status(chosen: Cluster, arguments: argparse.Namespace) -> int:
    if not chosen.is_up():
        print(f"cluster {chosen.name} ({chosen.provider}) is not up")
        return 1
    print(
        f"cluster {chosen.name} ({chosen.provider}) is up: {', '.join(chosen.nodes) or 'no node'}"
    )
    print(f"logs: {chosen.logs}")
    print(f"export KUBECONFIG={chosen.kubeconfig}")
    return 0


def kubeconfig(chosen: Cluster, arguments: argparse.Namespace) -> int:
    print(chosen.kubeconfig)
    return 0


def environment(chosen: Cluster, arguments: argparse.Namespace) -> int:
    """Print the shell's lines for kubectl, helm and kubectl drakit."""
    environment = Path(sys.executable).parent
    folders = [
        link_programs(PLUGINS, [*environment.glob("kubectl*-drakit"), *_selectors(chosen.minor)])
    ]
    kubectl = Path(chosen.program("kubectl"))
    if kubectl.is_absolute():
        folders.append(kubectl.parent)
    print(f"export KUBECONFIG={chosen.kubeconfig}")
    print(f'export PATH="{":".join(map(str, folders))}:$PATH"')
    return 0


def link_programs(folder: Path, programs: Iterable[Path]) -> Path:
    """Link programs in a separate folder, and return it. If a whole Python environment was on the
    PATH, it would hide the user's own Python."""
    folder.mkdir(parents=True, exist_ok=True)
    for link in folder.iterdir():
        link.unlink()
    for each in programs:
        (folder / each.name).symlink_to(each)
    return folder


def _selectors(minor: str) -> list[Path]:
    """Return Kubernetes' CEL compiler and allocator of a release for `kubectl drakit`. Builds it if
    it is not in the cache. Empty if Go is missing."""
    from e2e.images.cache import ImageError
    from e2e.images.go import cel_program

    if shutil.which("go") is None:
        print("note: kubectl drakit has no allocator, because Go is not installed", file=sys.stderr)
        return []
    try:
        return [cel_program(minor)]
    except ImageError as error:
        print(f"note: kubectl drakit has no allocator: {error}", file=sys.stderr)
        return []


def program(chosen: Cluster, arguments: argparse.Namespace) -> int:
    """Run kubectl or helm with our own input and output, as if they were called directly."""
    env = {**os.environ, "KUBECONFIG": str(chosen.kubeconfig)}
    argv = [chosen.program(arguments.command), *_words(arguments)]
    return subprocess.run(argv, env=env, check=False).returncode


def _words(arguments: argparse.Namespace) -> list[str]:
    words: list[str] = arguments.words
    return words[1:] if words[:1] == ["--"] else words


def exec_on_node(chosen: Cluster, arguments: argparse.Namespace) -> int:
    """Run a command on a node, outside every container, and print its output."""
    done = chosen.exec_on_node(arguments.node, _words(arguments), check=False)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


def load_image(chosen: Cluster, arguments: argparse.Namespace) -> int:
    for archive in arguments.archives:
        chosen.load_image(archive)
    if arguments.image:
        print(f"loaded {arguments.image} into {', '.join(chosen.nodes)}")
    return 0


def restart_kubelet(chosen: Cluster, arguments: argparse.Namespace) -> int:
    chosen.restart_kubelet(arguments.node)
    return 0


def reboot_node(chosen: Cluster, arguments: argparse.Namespace) -> int:
    chosen.reboot_node(arguments.node)
    chosen.wait_for_nodes()
    return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", help="the cluster's name; by default, this clone's own")
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, action: Callable[[Cluster, argparse.Namespace], int], text: str):
        found = commands.add_parser(name, parents=[common], help=text)
        found.set_defaults(action=action)
        return found

    command("prepare", prepare, "build the programs of the cluster, without starting it")
    starter = command("up", up, "start the cluster, and wait until its nodes are ready")
    default_nodes = int(os.environ.get("CLUSTER_NODES") or 1)
    starter.add_argument(
        "--nodes",
        type=int,
        default=default_nodes,
        help="number of nodes; 0 starts only the control plane",
    )
    command("down", down, "stop the cluster, and remove its files")
    command("status", status, "print whether the cluster is running")
    command("kubeconfig", kubeconfig, "print the path of the administrator's kubeconfig")
    command("env", environment, "print the shell's lines for kubectl, kubectl drakit and helm")
    for name in ("kubectl", "helm"):
        command(name, program, f"run {name}: ... {name} -- ARGS").add_argument("words", nargs="*")
    loader = command(
        "load-image", load_image, "load the images of docker-archive files into the nodes"
    )
    loader.add_argument("--image", help="the image's name, to report it")
    loader.add_argument("archives", nargs="+", type=Path)
    execution = command("exec", exec_on_node, "run a command on a node: exec NODE -- COMMAND")
    execution.add_argument("node")
    execution.add_argument("words", nargs="+")
    for name, action in (("restart-kubelet", restart_kubelet), ("reboot-node", reboot_node)):
        command(name, action, f"{name.replace('-', ' ')}").add_argument("node")
    return parser


if __name__ == "__main__":
    sys.exit(main())
