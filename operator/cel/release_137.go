//go:build kubernetes1.37

package main

import (
	"errors"

	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// The scheduler of Kubernetes 1.37; see release_134.go.

func selectorFeatures(on gates) cel.Features {
	return cel.Features{
		EnableConsumableCapacity: on["DRAConsumableCapacity"],
		EnableListTypeAttributes: on["DRAListTypeAttributes"],
	}
}

func allocatorFeatures(on gates) structured.Features {
	return structured.Features{
		AdminAccess:             on["DRAAdminAccess"],
		CompatibilityGroups:     on["DRADeviceCompatibilityGroups"],
		ConsumableCapacity:      on["DRAConsumableCapacity"],
		DerivedAttributes:       on["DRADerivedAttributes"],
		DeviceBindingAndStatus:  on["DRADeviceBindingConditions"] && on["DRAResourceClaimDeviceStatus"],
		DeviceTaints:            on["DRADeviceTaints"],
		FractionalCapacityRange: on["DRAFractionalCapacityRange"],
		ListTypeAttributes:      on["DRAListTypeAttributes"],
		OptionalNodeOperations:  on["DRAOptionalNodeOperations"],
		PartitionableDevices:    on["DRAPartitionableDevices"],
		PrioritizedList:         on["DRAPrioritizedList"],
	}
}

func onlyThisNode(err error) bool { return errors.Is(err, structured.ErrFailedAllocationOnNode) }

const sortsPools = true
