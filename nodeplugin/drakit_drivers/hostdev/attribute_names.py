"""
The names of the driver's own attributes, which a policy cannot give to others.

It must not know their values.
"""

from __future__ import annotations

__all__ = ("OWN_ATTRIBUTES",)

OWN_ATTRIBUTES = frozenset(
    """
    byIdLink byPathLink devname devtype driver drmConnected drmNode hidName identity inputKind
    inputName iommuGroup major minor netAddress netInterface nodeCount path pciClass pciDeviceID
    pciSubsystemDeviceID pciSubsystemVendorID pciVendorID policy serial soundCardID soundNode
    soundPcmCount subsystem tpmVersion ttyPort uartType usbClass usbInterface usbManufacturer
    usbPath usbPort usbProduct usbProductID usbSpeed usbVendorID usbVersion videoCapture videoName
    videoOutput
    """.split()  # noqa: SIM905  (a list of strings would be one line for each)
)
"""All names without a domain. docs/reference/attributes.md explains them."""
