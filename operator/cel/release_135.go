//go:build kubernetes1.35

package main

import (
	"errors"

	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// The scheduler of Kubernetes 1.35; see release_134.go.

func selectorFeatures(on gates) cel.Features {
	return cel.Features{EnableConsumableCapacity: on["DRAConsumableCapacity"]}
}

func allocatorFeatures(on gates) structured.Features {
	return structured.Features{
		AdminAccess:            on["DRAAdminAccess"],
		ConsumableCapacity:     on["DRAConsumableCapacity"],
		DeviceBindingAndStatus: on["DRADeviceBindingConditions"] && on["DRAResourceClaimDeviceStatus"],
		DeviceTaints:           on["DRADeviceTaints"],
		PartitionableDevices:   on["DRAPartitionableDevices"],
		PrioritizedList:        on["DRAPrioritizedList"],
	}
}

func onlyThisNode(err error) bool { return errors.Is(err, structured.ErrFailedAllocationOnNode) }

const sortsPools = false
