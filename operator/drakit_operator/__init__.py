"""
The operator: it reports why a pod's claim is pending, warns of templates that cannot be allocated,
and maintains the DeviceClass and the status of HostDevicePolicies, and a DeviceDriver for each
driver (:mod:`.drivers`).

:mod:`.app` is the composition root. :mod:`.leadership` decides when it works. :mod:`.sources` and
Kopf (:mod:`.policies`) fill :mod:`.store`; :mod:`.affected` selects what a change concerns,
:mod:`.reconciler` takes it off the queue, :mod:`.problems` finds its problems, and
:mod:`.announcing` reports them.
"""
