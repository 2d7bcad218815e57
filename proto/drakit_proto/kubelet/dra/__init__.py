"""What the kubelet asks a DRA driver to do for claims."""
