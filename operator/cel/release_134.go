//go:build kubernetes1.34

package main

import (
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// The scheduler of Kubernetes 1.34: how its feature gates reach the compiler and the allocator
// (dynamicresources.go), and which errors concern only one node.

func selectorFeatures(on gates) cel.Features {
	return cel.Features{EnableConsumableCapacity: on["DRAConsumableCapacity"]}
}

func allocatorFeatures(on gates) structured.Features {
	return structured.Features{
		AdminAccess:          on["DRAAdminAccess"],
		ConsumableCapacity:   on["DRAConsumableCapacity"],
		DeviceBinding:        on["DRADeviceBindingConditions"],
		DeviceStatus:         on["DRAResourceClaimDeviceStatus"],
		DeviceTaints:         on["DRADeviceTaints"],
		PartitionableDevices: on["DRAPartitionableDevices"],
		PrioritizedList:      on["DRAPrioritizedList"],
	}
}

func onlyThisNode(error) bool { return false }

// sortsPools: the allocator tries the pools of a node in an order, not that of a Go map.
const sortsPools = false
