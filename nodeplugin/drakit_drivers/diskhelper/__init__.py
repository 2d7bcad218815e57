"""
The disk helper: a small privileged program that opens and wipes disks for the driver `hostdev`.

A container without privileges cannot open block devices. So the node plugin cannot check that no
program has a disk open, and cannot wipe it. The chart runs this program in a container of its own
if an admin enables it. :mod:`.disk` works on one disk, :mod:`.protocol` defines the messages, and
:mod:`.server` answers on a unix socket.

It uses only the standard library. It must not know Kubernetes, policies, claims, or the rest of
drakit: every line here runs with full privileges.
"""
