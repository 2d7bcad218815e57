"""
``drakit``: its commands and exit codes.

Results go to standard output, and error messages to standard error.

Does not depend on the commands: the module of a command is imported when the command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

from drakit_cli.answers import run
from drakit_cli.options import add_connection, add_option
from drakit_daemon.command_line import Commands, Parser, ProgramParser

DEFAULT_CONFIG = Path("/etc/drakit/nodeplugin.yaml")
"""The path at which the chart mounts the node plugin's configuration."""

_EXTRAS = {"conformance": "drakit[testing]"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit code."""
    options = parser().read(arguments)
    module, _, function = cast("str", options.command).rpartition(".")

    def command() -> int:
        found = getattr(import_module(f"drakit_cli.{module}"), function)
        return cast("Callable[..., int]", found)(options)

    return run(command, extra=_EXTRAS.get(module, "drakit[nodeplugin]"))


def parser() -> ProgramParser:
    """Return the parser for all commands."""
    parser = ProgramParser(
        prog="drakit",
        description="Inspects drakit on this node, and helps you write drivers.",
        epilog="Exit codes: 0 success, 1 problems found, 2 invalid arguments or settings.",
    )
    commands = parser.add_commands()
    node = commands.add_parser(
        "node", help="inspect the node plugin's data on this node"
    ).add_commands()
    _add_checkpoint(node)
    _add_host_devices(node)
    _add_report(node)
    _add_lint(commands.add_parser("cdi", help="check CDI files").add_commands())
    _add_new(commands)
    _add_package(commands)
    _add_conformance(commands)
    _add_schema(commands)
    _add_setup(
        commands.add_parser("setup", help="install and remove drakit's objects").add_commands()
    )
    version = commands.add_parser(
        "version",
        help="print the versions of drakit, Python and SQLite",
        description="Prints the versions of drakit, Python and SQLite.",
        examples=(
            "drakit version",
            "drakit --version",
        ),
    )
    version.set_defaults(command="report.versions")
    return parser


def _add_lint(group: Commands) -> None:
    lint = group.add_parser(
        "lint",
        help="find problems in CDI files",
        description="Finds parts of CDI files that runtimes reject, or that two runtimes interpret "
        "differently. Checks all directories as one set, as a runtime does, so that it finds "
        "conflicts between them.",
        examples=(
            "drakit cdi lint",
            "drakit cdi lint /etc/cdi /var/run/cdi",
        ),
    )
    lint.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="a file or directory; list directories in ascending order of precedence (default: "
        "/etc/cdi /var/run/cdi)",
    )
    _add_json(lint)
    lint.set_defaults(command="cdi.lint")


def _add_new(group: Commands) -> None:
    new = group.add_parser(
        "new",
        help="create a project for a new driver",
        description="Creates a project for a new driver: source, tests, Dockerfile, chart values, "
        "and a workflow that tests it. The generated driver works without changes. Never "
        "overwrites existing files.",
        examples=(
            "drakit new rack-lamps",
            "drakit new rack-lamps --language go --directory ~/src/rack-lamps",
        ),
    )
    new.add_argument("name", metavar="NAME", help="name of the project, such as rack-lamps")
    add_option(
        new,
        "--driver DRIVER",
        "name of the driver, in a domain that you own (default: NAME.example.com)",
    )
    add_option(new, "--directory DIR", "directory of the project (default: NAME)")
    new.add_argument(
        "--image",
        help="repository of the image, to which the chart of a driver in the node plugin adds "
        "-nodeplugin (default: registry.example.com/NAME)",
    )
    place = new.add_mutually_exclusive_group()
    add_option(
        place,
        "--plugin",
        "the driver runs in drakit's node plugin, without privileges (default; on a terminal, "
        "the command asks)",
    )
    add_option(
        place,
        "--container",
        "the driver runs in its own container, with a chart that sets its privileges; it can "
        "also be a device plugin. A driver in Go always has its own container.",
    )
    new.add_argument(
        "--language",
        choices=("python", "go"),
        default="python",
        help="language of the driver (default: python). A driver in Go runs as its own process, a "
        "backend.",
    )
    add_option(
        new,
        "--checkout PATH",
        "clone of drakit whose Go module a driver in Go uses until drakit has a release "
        "(default: the clone from which this command was installed)",
    )
    new.set_defaults(command="new.new")


def _add_package(group: Commands) -> None:
    package = group.add_parser(
        "package",
        help="collect the packages of a driver for its image",
        description="Installs the driver's package and its dependencies into build/driver, which "
        "the Dockerfile of `drakit new` copies. Selects wheels for the Python and the processor of "
        "the node plugin's image. Leaves out the packages that the image contains, and fails if a "
        "dependency needs other versions of them. Needs pip and a package index.",
        examples=(
            "drakit package",
            "drakit package --architecture arm64",
        ),
    )
    package.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="folder with the driver's pyproject.toml (default: the current folder)",
    )
    package.add_argument(
        "--architecture",
        choices=("amd64", "arm64"),
        help="processor of the nodes (default: that of this machine)",
    )
    package.set_defaults(command="package.package")


def _add_schema(group: Commands) -> None:
    schema = group.add_parser(
        "schema",
        help="print the schemas of a driver's parameters",
        description="Prints a DeviceDriver manifest with the JSON schemas of a driver's opaque "
        "parameters, by apiVersion. With the manifest in the cluster, and the chart's value "
        "operator.admission.enabled, the API server rejects parameters that do not fit.",
        examples=(
            "drakit schema lamps:Lamps",
            "drakit schema lamps:Lamps | kubectl apply -f -",
        ),
    )
    schema.add_argument(
        "driver",
        metavar="DRIVER",
        help="a driver in Python (module:Class, or the name of an installed driver), or a running "
        "backend that announces its schemas (unix:/path/to.sock)",
    )
    add_option(
        schema,
        "--driver-config FILE",
        "configuration of the driver (YAML), if its name depends on it",
    )
    schema.set_defaults(command="schema.schema")


def _add_setup(group: Commands) -> None:
    crds = group.add_parser(
        "crds",
        help="install or upgrade the CustomResourceDefinitions",
        description="Installs or upgrades drakit's CustomResourceDefinitions by server-side apply. "
        "Does not change definitions that another release owns. Fails, and changes nothing, if "
        "objects are stored in a version that a definition no longer has.",
        examples=(
            "drakit setup crds --release drakit-system/drakit",
            "drakit setup crds --release drakit-system/drakit --context staging",
        ),
    )
    crds.set_defaults(command="setup.crds")
    migrate = group.add_parser(
        "migrate",
        help="rewrite the objects of drakit's kinds in the current version",
        description="Rewrites all objects of drakit's kinds, so that the API server stores them in "
        "the current version, and updates the storedVersions of the CustomResourceDefinitions.",
        examples=(
            "drakit setup migrate",
            "drakit setup migrate --context staging",
        ),
    )
    migrate.set_defaults(command="setup.migrate")
    policies = group.add_parser(
        "policies",
        help="apply the HostDevicePolicies of a release",
        description="Applies the HostDevicePolicies in the file for a release of the chart, and "
        "deletes policies of this release that are not in the file. Does not change other "
        "policies.",
        examples=(
            "drakit setup policies --file policies.yaml --release drakit-system/drakit",
            "drakit setup policies --file policies.yaml --release default/drakit --context staging",
        ),
    )
    add_option(
        policies, "--file FILE", "YAML file that maps names of policies to specs", required=True
    )
    policies.set_defaults(command="setup.policies")
    test = group.add_parser(
        "test",
        help="check the claimed device of this container",
        description="Checks that the container runtime has given this container the device of its "
        "claim. The chart runs it in the pod of `helm test`.",
        examples=(
            "drakit setup test",
            "drakit setup test --variable SIMULATED_DEVICE",
        ),
    )
    add_option(
        test,
        "--variable NAME",
        "environment variable that the driver sets (default: none is expected)",
    )
    test.set_defaults(command="setup.test")
    remove = group.add_parser(
        "remove",
        help="prepare the uninstallation of a release",
        description="Prepares the uninstallation of a release of the chart. Fails, and changes "
        "nothing, while claims of its drivers are prepared, and names the pods that use them. The "
        "annotation drakit.dev/force-uninstall=true on the DaemonSet overrides this. Then deletes "
        "the HostDevicePolicies of the release, stops its node plugins, waits for every node, and "
        "deletes their ResourceSlices and NodeDeviceReports. Names nodes that do not respond, and "
        "devices that stay in maintenance.",
        examples=(
            "drakit setup remove --daemonset drakit-nodeplugin --release drakit-system/drakit",
            "drakit setup remove --daemonset gpus --release default/gpus --driver gpu.example.com",
        ),
    )
    add_option(remove, "--daemonset NAME", "DaemonSet of the node plugins", required=True)
    add_option(
        remove, "--driver NAME", "driver of the release; you can repeat the option", action="append"
    )
    add_option(
        remove,
        "--unnamed-drivers",
        "print that the values of the release do not name all drivers",
    )
    remove.set_defaults(command="removal.remove")
    for command in (crds, policies, remove):
        add_option(
            command,
            "--release NAMESPACE/NAME",
            "release of the chart that owns the objects",
            required=True,
        )
    for command in (crds, migrate, policies, remove):
        add_connection(command, user_agent="drakit-setup")


def _add_conformance(group: Commands) -> None:
    conformance = group.add_parser(
        "conformance",
        help="test a driver against the driver contract",
        description="Runs a driver on a simulated node, and tests it against each rule of the "
        "driver contract. Prints each violated rule, and the kubelet behavior that is the reason "
        "for the rule.",
        examples=(
            "drakit conformance lamps:Lamps",
            "drakit conformance 'backend:./lamps {directory}' --config lamps.yaml",
        ),
    )
    conformance.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="a Python driver (module:Class, or the name of an installed driver), a running "
        "backend (unix:/path/to.sock), or a program that the kit starts (backend:COMMAND or "
        "device-plugin:COMMAND; {directory} stands for its directory)",
    )
    add_option(
        conformance,
        "--config FILE",
        "YAML file with the configuration of a Python driver, or with the entry of a backend "
        "(backends.allowed) or device plugin (devicePlugins.plugins); {root} stands for the node's "
        "directory",
        dest="driver_config",
    )
    add_option(conformance, "--parameters FILE", "YAML file with opaque parameters for the claims")
    add_option(
        conformance,
        "--setup COMMAND",
        "command to run before the first start and after each reboot; $DRAKIT_ROOT is the "
        "node's directory, and a reboot empties $DRAKIT_ROOT/run",
    )
    add_option(
        conformance,
        "--unplug COMMAND",
        "command that removes at least one device while the driver is running; at least one "
        "device must remain; $DRAKIT_ROOT is the node's directory",
    )
    add_option(
        conformance, "--rule ID", "test only this rule; you can repeat the option", action="append"
    )
    add_option(conformance, "--list", "print the rules, with their reasons")
    add_option(conformance, "--junit FILE", "also write the results to a file, as JUnit XML")
    conformance.set_defaults(command="conformance.conformance")


def _add_checkpoint(group: Commands) -> None:
    checkpoint = group.add_parser("checkpoint", help="inspect the prepared claims").add_commands()
    show = checkpoint.add_parser(
        "show",
        help="print the entries of the checkpoints",
        description="Prints the entries of the checkpoints. Writes nothing. You can run it "
        "while the node plugin is running.",
        examples=(
            "drakit node checkpoint show",
            "drakit node checkpoint show --driver hostdev.drakit.dev --json",
        ),
    )
    show.set_defaults(command="checkpoint.show")
    verify = checkpoint.add_parser(
        "verify",
        help="check the checkpoints and the CDI files",
        description="Checks the checkpoints, and compares the CDI files with their entries. Writes "
        "nothing. Exits with 1 if a check fails.",
        examples=(
            "drakit node checkpoint verify",
            "drakit node checkpoint verify --driver hostdev.drakit.dev",
        ),
    )
    verify.set_defaults(command="checkpoint.verify")
    claim = group.add_parser("claim", help="release the devices of a claim").add_commands()
    forget = claim.add_parser(
        "forget",
        help="release a claim's devices without calling the driver",
        description="Removes the entry and the CDI file of a claim. Does not call the driver, so "
        "the driver's side effects remain. You can run it while the node plugin is running.",
        examples=(
            "drakit node claim forget 0f3a9c52-6d0e-4f5b-9d0f-6f8d1c2b7a10",
            "drakit node claim forget 0f3a9c52-6d0e-4f5b-9d0f-6f8d1c2b7a10 --force",
        ),
    )
    forget.add_argument("uid", metavar="UID", help="UID of the ResourceClaim")
    add_option(forget, "--force", "also release devices that a container uses or might use")
    forget.set_defaults(command="checkpoint.forget")
    for command in (show, verify):
        _add_json(command)
    for command in (show, verify, forget):
        add_option(command, "--driver NAME", "only this driver")
        _add_place(command)


def _add_host_devices(group: Commands) -> None:
    devices = group.add_parser(
        "devices",
        help="list the device nodes that policies can publish",
        description="Lists the device nodes on this node. For each one, prints the policy that "
        "matches it, or the reason why hostdev does not publish it. Uses the policies in the "
        "configuration file, and this node's copy of the cluster's policies. Writes nothing.",
        examples=(
            "drakit node devices",
            "drakit node devices /dev/ttyUSB0 --policy",
        ),
    )
    devices.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="only these device nodes: paths under /dev, or links to them (default: all)",
    )
    add_option(devices, "--subsystem NAME", "only devices of this subsystem")
    add_option(
        devices, "--policy", "for each device, print a policy that publishes only that device"
    )
    add_option(
        devices,
        "--labels KEY=VALUE,...",
        "labels of this node; without them, policies with a node selector are ignored",
    )
    devices.set_defaults(command="host_devices.devices")
    _add_json(devices)
    _add_place(devices)


def _add_report(group: Commands) -> None:
    report = group.add_parser(
        "report",
        help="collect the data for a bug report",
        description="Collects this node's data for a bug report: versions, configuration, "
        "policies, devices, claims, sockets, CDI files, and mounts. Leaves out opaque parameters, "
        "environment variables, and the configuration of vendors' drivers. Writes only the output "
        "file.",
        examples=(
            "drakit node report",
            "drakit node report --output report.tar.gz",
        ),
    )
    add_option(
        report,
        "-o --output FILE",
        "write to a file; the suffix .tar.gz creates an archive (default: print the data)",
    )
    report.set_defaults(command="report.report")
    _add_place(report)


def _add_json(parser: Parser) -> None:
    add_option(parser, "--json", "print JSON instead of text")


def _add_place(parser: Parser) -> None:
    place = parser.add_argument_group("paths on the node")
    add_option(
        place, "--config FILE", f"configuration file of the node plugin (default: {DEFAULT_CONFIG})"
    )
    add_option(
        place,
        "--kubelet-root DIR",
        "root directory of the kubelet; overrides the configuration file",
    )
    add_option(place, "--cdi-dir DIR", "directory of CDI specs; overrides the configuration file")
    parser.set_defaults(default_config=DEFAULT_CONFIG)


if __name__ == "__main__":
    sys.exit(main())
