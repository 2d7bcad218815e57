"""
The commands of ``kubectl drakit`` and their options.

Does not depend on what the commands compute.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from drakit_cli.options import add_connection, add_option, duration
from drakit_daemon.command_line import Commands, Parser, ProgramParser

_FORMATS = ("wide", "json", "yaml")
_FORMATS_WITH_NAME = (*_FORMATS, "name")
SHELLS = ("bash", "fish", "zsh")

COMPLETE = "__complete"
"""The hidden command that the completion scripts run."""


def parser() -> ProgramParser:
    """Return the parser for all commands."""
    root = ProgramParser(
        prog="kubectl drakit",
        description="Explains pods that wait for devices, and shows the devices in the cluster. "
        "Takes devices out of service. Uses your kubeconfig and your permissions. Only cordon, "
        "drain and uncordon change the cluster.",
        epilog="Exit codes: 0 no problem, 1 a pod is blocked or a problem was found, 2 invalid "
        "arguments or kubeconfig, 3 the API server is unavailable or denies all requests, 4 drakit "
        "cannot decide, 5 the object does not exist.",
    )
    commands = root.add_commands()
    _add_explain(commands)
    _add_listings(commands)
    _add_maintenance(commands)
    _add_version(commands)
    completion = commands.add_parser(
        "completion",
        help="print a shell completion script",
        description="Prints a shell completion script for the program `kubectl-drakit`. You do not "
        "need it for `kubectl drakit`: kubectl's own completion already supports the plugin.",
        examples=(
            "kubectl drakit completion bash",
            "kubectl drakit completion zsh",
        ),
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell")
    completion.set_defaults(command="completion")
    return root


def _add_explain(commands: Commands) -> None:
    explain = commands.add_parser(
        "explain",
        help="explain why a pod or another object waits, or has a problem",
        description="Explains why a pod waits for its devices. Shows the devices that match each "
        "request, the reasons why they cannot be allocated, and the remedy. Also explains why a "
        "pod does not start on its node, or why Kubernetes has not yet deleted a pod or claim. "
        "Without an object, the command explains all pods of the namespace that wait. For a "
        "claim, template or class, it assumes a pod without a node selector, affinity or resource "
        "requests.",
        examples=(
            "kubectl drakit explain train-0",
            "kubectl drakit explain -A",
        ),
    )
    explain.add_argument(
        "target",
        nargs="*",
        metavar="[KIND] NAME",
        help="the object, as KIND NAME or KIND/NAME; without a kind, a pod. The kinds: pod, "
        "resourceclaim, resourceclaimtemplate, deviceclass, resourceslice, node, job, deployment, "
        "statefulset, daemonset, replicaset and podgroup, with the short names of kubectl",
    )
    add_option(
        explain,
        "-A --all-namespaces",
        "explain the pods that wait in all namespaces, one line each",
    )
    add_option(
        explain,
        "-f --filename FILE",
        "explain whether the API server would accept a manifest, and how many of its pods "
        "would fit; - reads the standard input",
        type=str,
    )
    again = explain.add_mutually_exclusive_group()
    add_option(again, "-w --watch", "print the explanation again when it changes")
    add_option(again, "--wait", "return when nothing waits, starts, has a problem or is undecided")
    add_option(
        explain,
        "--timeout DURATION",
        "end --wait after this time, such as 30s or 5m (default: never)",
        type=duration,
    )
    explain.set_defaults(command="explain")
    _add_shared(explain)


def _add_listings(commands: Commands) -> None:
    devices = commands.add_parser(
        "devices",
        help="show the pools of devices, and the free devices",
        description="Shows the numbers of free, allocated, tainted, unhealthy and gone devices in "
        "each pool, and the claims to which devices are allocated. Each device is counted once. "
        "For one device, shows its attributes, its capacity, its taints with their sources, and "
        "the claims and pods that use it.",
        examples=(
            "kubectl drakit devices",
            "kubectl drakit devices gpu.example.com/node-1/gpu-0",
        ),
    )
    drivers = commands.add_parser(
        "drivers",
        help="show the drivers and their problems",
        description="Shows each driver of the cluster, whether it is made with drakit or not: the "
        "nodes on which its plugin must run, is registered and publishes, its pools and devices, "
        "and its problems with the commands that help.",
        examples=(
            "kubectl drakit drivers",
            "kubectl drakit drivers gpu.example.com --fail-on problem",
        ),
    )
    drivers.add_argument("name", nargs="?", metavar="NAME", help="only the driver of this name")
    drivers.add_argument(
        "--fail-on", choices=("problem",), help="exit with 1 if a driver has a problem"
    )
    claims = commands.add_parser(
        "claims",
        help="show claims with their devices and pods",
        description="Shows claims with their state, node, devices, and pods.",
        examples=(
            "kubectl drakit claims -A",
            "kubectl drakit claims --device gpu.example.com/node-1/gpu-0",
        ),
    )
    doctor = commands.add_parser(
        "doctor",
        help="check the cluster, and your permissions",
        description="Checks API versions and feature gates, pools, nodes, classes, your "
        "permissions, and drakit's releases with their values and permissions. Each finding "
        "has a remedy.",
        examples=(
            "kubectl drakit doctor",
            "kubectl drakit doctor --fail-on note -o json",
        ),
    )
    devices.add_argument(
        "--fail-on",
        action="append",
        choices=("problem", "tainted", "unhealthy", "gone"),
        default=[],
        help="exit with 1 if a pool has a problem, or a device is in this state; you can repeat "
        "the option",
    )
    devices.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="only a driver, a pool or a device, as DRIVER, POOL, DRIVER/POOL, DEVICE, POOL/DEVICE "
        "or DRIVER/POOL/DEVICE",
    )
    doctor.add_argument(
        "--fail-on",
        choices=("problem", "note"),
        default="problem",
        help="the least severe finding for which to exit with 1 (default: problem)",
    )
    add_option(
        claims,
        "--device DEVICE",
        "show the claims in all namespaces that have a device, named DEVICE, POOL/DEVICE or "
        "DRIVER/POOL/DEVICE",
    )
    add_option(claims, "-A --all-namespaces", "show the claims in all namespaces")
    claims.add_argument(
        "--fail-on",
        action="append",
        choices=("pending", "deleting"),
        default=[],
        help="exit with 1 if a claim is in this state; you can repeat the option",
    )
    quota = commands.add_parser(
        "quota",
        help="print a ResourceQuota for the devices of a DeviceClass",
        description="Prints the manifest of a ResourceQuota that limits the devices of a "
        "DeviceClass in a namespace, whether pods request them with claims or as extended "
        "resources. Creates nothing: pass the manifest to kubectl apply.",
        examples=(
            "kubectl drakit quota gpu.example.com --devices 4 -n team-a",
            "kubectl drakit quota gpu.example.com --devices 4 -n team-a | kubectl apply -f -",
        ),
    )
    quota.add_argument("device_class", metavar="CLASS", help="the name of the DeviceClass")
    add_option(
        quota,
        "--devices NUMBER",
        "the number of devices that the namespace can request",
        type=_number,
        required=True,
    )
    for name, each in (
        *(("devices", devices), ("drivers", drivers), ("claims", claims)),
        *(("quota", quota), ("doctor", doctor)),
    ):
        each.set_defaults(command=name)
        _add_shared(each, formats=_FORMATS if name in ("quota", "doctor") else _FORMATS_WITH_NAME)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of devices")
    return int(text)


def _add_maintenance(commands: Commands) -> None:
    kept = "The command creates a DeviceMaintenance, on which drakit's operator acts."
    for name, text, more in (
        ("cordon", "keep new pods away from devices", "Pods that use the devices keep them."),
        (
            "drain",
            "keep new pods away from devices, and evict the pods that use them",
            "The operator evicts the pods that use the devices, as PodDisruptionBudgets allow.",
        ),
    ):
        each = commands.add_parser(
            name,
            help=text,
            description=f"Takes devices out of service. {more} {kept}",
            examples=(
                f"kubectl drakit {name} gpu.example.com/node-1/gpu-0 --dry-run",
                f"kubectl drakit {name} --node node-1 --driver gpu.example.com --wait",
            ),
        )
        each.add_argument(
            "device",
            nargs="?",
            metavar="DEVICE",
            help="the device, as DEVICE, POOL/DEVICE or DRIVER/POOL/DEVICE; all names must fit",
        )
        add_option(each, "--driver NAME", "only devices of this driver")
        add_option(each, "--pool NAME", "only devices of this pool")
        add_option(each, "--node NAME", "only devices of this node")
        add_option(
            each, "--class NAME", "only devices that this DeviceClass selects", dest="device_class"
        )
        add_option(each, "--reason TEXT", "the reason, which Events repeat")
        add_option(each, "--name NAME", "the name of the DeviceMaintenance")
        if name == "drain":
            add_option(
                each, "--time-limit DURATION", "stop evicting pods after this time", type=duration
            )
        add_option(each, "--dry-run", "only list devices, pods, budgets and where pods would fit")
        done = "no claim holds the devices" if name == "drain" else "the devices are tainted"
        add_option(each, "--wait", f"return when {done}, and print the progress")
        add_option(
            each,
            "--timeout DURATION",
            "end --wait after this time, such as 30s or 5m (default: never)",
            type=duration,
        )
        each.set_defaults(command=name)
        _add_shared(each)
    uncordon = commands.add_parser(
        "uncordon",
        help="bring devices back into service",
        description="Deletes a DeviceMaintenance, so that its devices are back in service.",
        examples=(
            "kubectl drakit uncordon cordon-gpu-0",
            "kubectl drakit uncordon node-1/gpu-0",
        ),
    )
    uncordon.add_argument(
        "name", metavar="NAME", help="the DeviceMaintenance, or its only device as for cordon"
    )
    uncordon.set_defaults(command="uncordon")
    _add_shared(uncordon)


def _add_version(commands: Commands) -> None:
    version = commands.add_parser(
        "version",
        help="show the versions of the plugin, the cluster and drakit's releases",
        description="Shows the versions of the plugin, of its allocators, of the cluster, and of "
        "drakit's releases. Warns if the plugin and a release are more than one minor version "
        "apart.",
        examples=(
            "kubectl drakit version",
            "kubectl drakit version --client",
        ),
    )
    add_option(version, "--client", "show only the versions on this machine")
    version.set_defaults(command="version")
    _add_shared(version, formats=_FORMATS)


def _add_shared(parser: Parser, *, formats: Sequence[str] = _FORMATS_WITH_NAME) -> None:
    """Add the options of all commands that send requests to the API server."""
    group = parser.add_argument_group("namespace and output")
    add_option(group, "-n --namespace NAME", "namespace (default: the namespace of the context)")
    group.add_argument(
        *("-o", "--output"),
        choices=formats,
        default="",
        help="output format; wide adds columns, and name prints only names (not for quota, doctor "
        "and version)",
    )
    add_connection(parser, user_agent="kubectl-drakit")
