"""What the kubelet asks a DRA driver about the health of its devices."""
