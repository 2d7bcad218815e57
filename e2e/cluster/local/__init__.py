"""
The provider `local`: a real Kubernetes on this machine, without a container engine, as root.

A *box* (:mod:`.boxes`) is a PID namespace with our init. The control plane has one box, and each
node has one with additional mount, network and UTS namespaces. When a box's init ends, the kernel
ends every process, mount, link and firewall rule in it. So no stop order is needed, and
:mod:`.leftovers` can find everything that a crash leaves.
"""
