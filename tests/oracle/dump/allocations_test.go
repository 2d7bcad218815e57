package allocatortesting

import (
	"context"
	"encoding/json"
	"os"
	"testing"

	"github.com/onsi/gomega/types"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	apitypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured/internal/experimental"
)

var dumped = map[string]any{}

// TestDump writes the table of TestAllocator to the file that $DUMP names. The experimental allocator
// has all features, and must pass.
func TestDump(t *testing.T) {
	TestAllocator(t, experimental.SupportedFeatures, func(
		ctx context.Context, features Features, state AllocatedState, classes DeviceClassLister,
		slices []*resourceapi.ResourceSlice, cache *cel.Cache,
	) (Allocator, error) {
		return experimental.NewAllocator(ctx, features, state, classes, slices, cache)
	})
	text, err := json.Marshal(dumped)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(os.Getenv("DUMP"), text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// dump keeps a case. The copy of upstream's file calls it for each (see dumps.py).
func dump(
	name string, features Features, where *v1.Node, claims []*resourceapi.ResourceClaim,
	classes []*resourceapi.DeviceClass, slices []*resourceapi.ResourceSlice, devices []DeviceID,
	shared sets.Set[SharedDeviceID], consumed ConsumedCapacityCollection,
	results []any, failure types.GomegaMatcher,
) {
	if where == nil {
		where = node(node1, region1)
	}
	answer := "no fit"
	if len(results) == len(claims) {
		answer = "fits"
	}
	if failure != nil {
		if matches, err := failure.Match(nil); err != nil || !matches {
			answer = "failed"
		}
	}
	dumped[name] = map[string]any{
		"features":  features,
		"node":      where,
		"claims":    claims,
		"classes":   classes,
		"slices":    slices,
		"allocated": allocated(devices, shared, consumed),
		"answer":    answer,
	}
}

// allocated writes what is in use as results of a claim.
func allocated(
	devices []DeviceID, shared sets.Set[SharedDeviceID], consumed ConsumedCapacityCollection,
) []resourceapi.DeviceRequestAllocationResult {
	results := []resourceapi.DeviceRequestAllocationResult{}
	add := func(id DeviceID) *resourceapi.DeviceRequestAllocationResult {
		results = append(results, resourceapi.DeviceRequestAllocationResult{
			Driver: id.Driver.String(), Pool: id.Pool.String(), Device: id.Device.String(),
		})
		return &results[len(results)-1]
	}
	for _, id := range devices {
		add(id)
	}
	for id := range shared {
		share := apitypes.UID(id.ShareID.String())
		add(DeviceID{Driver: id.Driver, Pool: id.Pool, Device: id.Device}).ShareID = &share
	}
	for id, amounts := range consumed {
		share, result := apitypes.UID("consumed"), add(id)
		result.ShareID = &share
		result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{}
		for name, amount := range amounts {
			result.ConsumedCapacity[name] = *amount
		}
	}
	return results
}
