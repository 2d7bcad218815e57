"""
The operator: it reports why a pod's claim is pending, and warns about templates that cannot be
allocated. It maintains the DeviceClass and the status of HostDevicePolicies, and a DeviceDriver for
each driver (:mod:`.drivers`).

:mod:`.app` is the composition root. :mod:`.leadership` determines when this replica is the leader.
:mod:`.sources` and the Kopf handlers (:mod:`.handlers`) fill :mod:`.store`. :mod:`.affected`
selects the objects that a change affects, :mod:`.reconciler` takes them off the queue,
:mod:`.problems` finds their problems, and :mod:`.announcing` reports the problems.
"""
