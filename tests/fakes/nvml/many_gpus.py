"""The driver of examples/nvidia on a machine with enough GPUs for all rules of the conformance
kit."""

from dataclasses import replace

import pynvml
from gpus import Gpus

__all__ = ("Gpus",)

pynvml.MACHINE.gpus += [
    replace(
        pynvml.MACHINE.gpus[0],
        uuid=f"GPU-11111111-aaaa-4bbb-8ccc-00000000001{number}",
        bus_id=f"00000000:1{number}:00.0",
    )
    for number in range(3)
]
