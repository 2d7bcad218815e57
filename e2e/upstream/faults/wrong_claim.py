"""A prepare returns the devices of the first claim, whatever the requested claim."""

from typing import Any

from drakit_nodeplugin.__main__ import main
from drakit_nodeplugin.kubelet import dra

Service: Any = vars(dra)["_Dra"]
honest_prepare = Service.NodePrepareResources
first: list[Any] = []


async def prepare(self: Any, request: Any, context: Any) -> Any:
    response = await honest_prepare(self, request, context)
    for claim in response.claims.values():
        if claim.devices and not first:
            first.extend(claim.devices)
        elif claim.devices:
            del claim.devices[:]
            claim.devices.extend(first)
    return response


Service.NodePrepareResources = prepare

if __name__ == "__main__":
    main()
