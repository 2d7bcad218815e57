//go:build !kubernetes1.34 && !kubernetes1.35 && !kubernetes1.37

package main

import (
	"errors"

	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// The scheduler of Kubernetes 1.36, whose build has no tag; see release_134.go.

func selectorFeatures(on gates) cel.Features {
	return cel.Features{
		EnableConsumableCapacity: on["DRAConsumableCapacity"],
		EnableListTypeAttributes: on["DRAListTypeAttributes"],
	}
}

// allocatorFeatures has no list attributes: the scheduler of 1.36 never turns them on in the allocator.
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

const sortsPools = true
