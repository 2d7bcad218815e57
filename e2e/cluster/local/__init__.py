"""
The provider `local`: a real Kubernetes on this machine, without a container engine, as root.

A *box* (:mod:`.boxes`) is a PID namespace with an init of ours: the control plane has one, and each
node has one that also owns a mount, a network and a UTS namespace. When a box's init ends, the
kernel ends every process, mount, link and firewall rule in it. So no stop order is needed, and a
crash leaves at most what :mod:`.leftovers` can find.
"""
