"""The service with which the kubelet prepares and unprepares claims of a DRA driver."""
