"""What the kubelet tells of the devices that containers have."""
