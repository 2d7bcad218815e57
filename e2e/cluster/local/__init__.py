"""
The provider `local`: a real Kubernetes on this machine, without a container engine, as root.

A *box* (:mod:`.boxes`) is a PID namespace with an init of ours: the control plane has one, and each
node has one that also owns a mount, a network and a UTS namespace. Ending a box's init ends, by the
kernel's own hand, every process, mount, link and firewall rule in it. So nothing has to be stopped
in order, and a crash in the middle leaves at most what :mod:`.leftovers` can name.
"""
