package main

import (
	"reflect"

	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// featureGates maps each feature of the compiler or the allocator to the feature gates that enable it in
// the scheduler of any release (dynamicresources.go). A build contains only the features of its release.
var featureGates = map[string][]string{
	"AdminAccess":              {"DRAAdminAccess"},
	"CompatibilityGroups":      {"DRADeviceCompatibilityGroups"},
	"ConsumableCapacity":       {"DRAConsumableCapacity"},
	"DerivedAttributes":        {"DRADerivedAttributes"},
	"DeviceBinding":            {"DRADeviceBindingConditions"},
	"DeviceBindingAndStatus":   {"DRADeviceBindingConditions", "DRAResourceClaimDeviceStatus"},
	"DeviceStatus":             {"DRAResourceClaimDeviceStatus"},
	"DeviceTaints":             {"DRADeviceTaints"},
	"EnableConsumableCapacity": {"DRAConsumableCapacity"},
	"EnableListTypeAttributes": {"DRAListTypeAttributes"},
	"FractionalCapacityRange":  {"DRAFractionalCapacityRange"},
	"ListTypeAttributes":       {"DRAListTypeAttributes"},
	"OptionalNodeOperations":   {"DRAOptionalNodeOperations"},
	"PartitionableDevices":     {"DRAPartitionableDevices"},
	"PrioritizedList":          {"DRAPrioritizedList"},
}

func selectorFeatures(on gates) (features cel.Features) {
	setFeatures(&features, on)
	return features
}

func allocatorFeatures(on gates) (features structured.Features) {
	setFeatures(&features, on)
	return features
}

// setFeatures enables the features whose gates are all enabled.
func setFeatures(features any, on gates) {
	fields := reflect.ValueOf(features).Elem()
	for i := range fields.NumField() {
		name := fields.Type().Field(i).Name
		needed := featureGates[name]
		isOn := len(needed) > 0 && name != neverOn
		for _, gate := range needed {
			isOn = isOn && on[gate]
		}
		fields.Field(i).SetBool(isOn)
	}
}
