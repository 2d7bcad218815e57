"""The service from which the kubelet gets the health of a DRA driver's devices."""
