package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// allocateTimeout ends a search for devices.
const allocateTimeout = 2 * time.Second

// allocateRequest asks the scheduler's allocator for devices on one node.
type allocateRequest struct {
	Node *corev1.Node `json:"node"`
	// Claims are to be allocated.
	Claims []*resourceapi.ResourceClaim `json:"claims"`
	// Allocated are the claims that hold devices.
	Allocated []*resourceapi.ResourceClaim `json:"allocated"`
	Classes   []*resourceapi.DeviceClass   `json:"classes"`
	Slices    []*resourceapi.ResourceSlice `json:"slices"`
	Features  structured.Features          `json:"features"`
}

type allocateAnswer struct {
	Fits bool `json:"fits"`
	// Failed is the text of the allocator's error: the pod is unschedulable on this node.
	Failed  string                         `json:"failed,omitempty"`
	Results []resourceapi.AllocationResult `json:"results,omitempty"`
}

func (e *evaluator) allocate(ctx context.Context, asked *allocateRequest) (*allocateAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, allocateTimeout)
	defer cancel()
	allocator, err := structured.NewAllocator(
		ctx, asked.Features, stateOf(asked.Allocated), lister(asked.Classes), asked.Slices,
		cel.NewCache(maxExpressions, e.features),
	)
	if err != nil {
		return nil, err
	}
	results, err := allocator.Allocate(ctx, asked.Node, asked.Claims)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		return &allocateAnswer{Failed: err.Error()}, nil
	}
	return &allocateAnswer{Fits: len(asked.Claims) == len(results) && results != nil, Results: results}, nil
}

// stateOf gathers what claims hold, as the scheduler does (allocateddevices.go).
func stateOf(claims []*resourceapi.ResourceClaim) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			if result.AdminAccess != nil && *result.AdminAccess {
				continue
			}
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			if result.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
			if result.ConsumedCapacity != nil {
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
			}
		}
	}
	return state
}

type lister []*resourceapi.DeviceClass

func (l lister) List() ([]*resourceapi.DeviceClass, error) { return l, nil }

func (l lister) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range l {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("deviceclass.resource.k8s.io %q not found", name)
}

func sorted(names map[string]bool) []string {
	var all []string
	for name := range names {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}
