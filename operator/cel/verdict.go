package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	kjson "sigs.k8s.io/json"
)

// Tenants write most of a question, so its size and cost are limited.
const (
	// verdictTimeout ends the search on all nodes of a question. The scheduler searches each node for up
	// to 10 s; an ordinary search takes less than 1 ms.
	verdictTimeout = 2 * time.Second

	// verdictGrace is how long a search has to notice its cancellation. CEL notices it late in nested
	// loops. Such a search is abandoned, and the process exits after its response.
	verdictGrace = time.Second / 2

	// maxVerdict limits a question in bytes. When decoded, it takes up to ten times as much memory.
	maxVerdict = 4 << 20

	// maxNodes limits the nodes of a question.
	maxNodes = 64

	// maxText limits each string in a response, in bytes, because it can quote expressions.
	maxText = 1 << 10

	// maxUnknown limits the unknown fields in a response.
	maxUnknown = 16

	// maxRuns limits the searches on a node in a release whose allocator tries pools in random order.
	maxRuns = 4

	// maxVerdictExpressions limits the compiled expressions that are cached for further questions.
	maxVerdictExpressions = 64
)

// verdictRequest asks whether the scheduler's allocator finds devices on nodes.
type verdictRequest struct {
	Nodes []*corev1.Node `json:"nodes"`
	// Claims are the claims to allocate, in the order of the pod.
	Claims []*resourceapi.ResourceClaim `json:"claims"`
	// Classes are the classes that the claims name. The scheduler has already checked that they exist.
	Classes []*resourceapi.DeviceClass `json:"classes"`
	// Slices have the taints of DeviceTaintRules. A pool needs all of its slices, including those of other
	// nodes.
	Slices []*resourceapi.ResourceSlice `json:"slices"`
	// InUse has the results of all allocated claims.
	InUse []resourceapi.DeviceRequestAllocationResult `json:"inUse"`
	// Gates are the cluster's feature gates.
	Gates gates `json:"gates"`
}

// gates are feature gates of Kubernetes by name. A missing gate is disabled.
type gates map[string]bool

type verdictAnswer struct {
	// Verdicts has one entry per node.
	Verdicts []verdict `json:"verdicts"`
	// Unknown names fields of the question that this release of Kubernetes does not have. The
	// allocator did not see them.
	Unknown []string `json:"unknown,omitempty"`
}

type verdict struct {
	Outcome outcome `json:"outcome"`
	// Text is the message of the allocator, if it returned an error.
	Text string `json:"text,omitempty"`
	// Results has the devices of each claim, if they are allocated.
	Results [][]resourceapi.DeviceRequestAllocationResult `json:"results,omitempty"`
	// Varies is whether another search of the same objects gives a different result.
	Varies bool `json:"varies,omitempty"`
}

type outcome string

const (
	allocated outcome = "allocated"
	// unavailable means that there are no devices on this node.
	unavailable outcome = "unavailable"
	// fatal means that the scheduler gives up the pod, whatever devices other nodes have.
	fatal outcome = "fatal"
	// undecided means that the search did not end in time.
	undecided outcome = "undecided"
)

func (e *evaluator) verdicts(ctx context.Context, raw json.RawMessage) (*verdictAnswer, error) {
	if len(raw) > maxVerdict {
		return nil, fmt.Errorf("the query has more than %d bytes", maxVerdict)
	}
	var asked verdictRequest
	// As in the API server, names of fields are case-sensitive.
	unknown, err := kjson.UnmarshalStrict(raw, &asked)
	if err != nil {
		return nil, err
	}
	if len(asked.Nodes) > maxNodes {
		return nil, fmt.Errorf("the query has more than %d nodes", maxNodes)
	}
	ctx, cancel := context.WithTimeout(ctx, verdictTimeout)
	defer cancel()
	answer := &verdictAnswer{Verdicts: make([]verdict, len(asked.Nodes))}
	for _, problem := range unknown[:min(len(unknown), maxUnknown)] {
		answer.Unknown = append(answer.Unknown, short(problem.Error()))
	}
	found := make(chan verdict, 2*len(asked.Nodes))
	go func() {
		defer func() {
			// The allocator of 1.34 panics for some valid objects.
			if problem := recover(); problem != nil {
				for range asked.Nodes {
					found <- verdict{Outcome: undecided, Text: short(fmt.Sprintf("the allocator panics: %v", problem))}
				}
			}
		}()
		e.search(ctx, &asked, func(each verdict) { found <- each })
	}()
	end := time.After(verdictTimeout + verdictGrace)
	for i := range asked.Nodes {
		answer.Verdicts[i] = verdict{Outcome: undecided, Text: "the search did not end in time"}
		if e.abandoned {
			continue
		}
		select {
		case <-end:
			e.abandoned = true
		case each := <-found:
			answer.Verdicts[i] = each
		}
	}
	return answer, nil
}

// search reports a verdict for each node.
func (e *evaluator) search(ctx context.Context, asked *verdictRequest, report func(verdict)) {
	allocator, err := structured.NewAllocator(
		ctx, allocatorFeatures(asked.Gates), stateOf(asked.InUse, asked.Gates["DRAConsumableCapacity"]),
		lister(asked.Classes), asked.Slices, e.cacheFor(selectorFeatures(asked.Gates)),
	)
	for _, node := range asked.Nodes {
		if err != nil {
			report(verdict{Outcome: fatal, Text: short(err.Error())})
		} else {
			report(verdictOn(ctx, allocator, node, asked.Claims))
		}
	}
}

// verdictOn searches again if the order of pools is random. An error takes precedence, because it ends
// the scheduler's attempt.
func verdictOn(
	ctx context.Context, allocator structured.Allocator, node *corev1.Node, claims []*resourceapi.ResourceClaim,
) verdict {
	found := searchOn(ctx, allocator, node, claims)
	for run := 1; run < maxRuns && !sortsPools && found.Outcome != undecided; run++ {
		again := searchOn(ctx, allocator, node, claims)
		if again.Outcome == found.Outcome || again.Outcome == undecided {
			continue
		}
		if again.Outcome == fatal {
			found = again
		}
		found.Varies = true
		return found
	}
	return found
}

// searchOn decides as the scheduler's Filter does (dynamicresources.go).
func searchOn(
	ctx context.Context, allocator structured.Allocator, node *corev1.Node, claims []*resourceapi.ResourceClaim,
) verdict {
	if ctx.Err() != nil {
		return verdict{Outcome: undecided, Text: "the search did not begin in time"}
	}
	results, err := allocator.Allocate(ctx, node, claims)
	switch {
	case err == nil && len(results) == len(claims):
		return verdict{Outcome: allocated, Results: resultsOf(results)}
	case ctx.Err() != nil: // even without an error: CEL's "interrupted && false" is false
		return verdict{Outcome: undecided, Text: "the search did not end in time"}
	case err == nil:
		return verdict{Outcome: unavailable}
	case onlyThisNode(err):
		return verdict{Outcome: unavailable, Text: short(err.Error())}
	default:
		return verdict{Outcome: fatal, Text: short(err.Error())}
	}
}

func resultsOf(allocations []resourceapi.AllocationResult) [][]resourceapi.DeviceRequestAllocationResult {
	found := make([][]resourceapi.DeviceRequestAllocationResult, len(allocations))
	for i, each := range allocations {
		found[i] = each.Devices.Results
	}
	return found
}

// cacheFor returns the compiled expressions for some gates, and drops those for other gates.
func (e *evaluator) cacheFor(features cel.Features) *cel.Cache {
	if e.verdictCache == nil || e.verdictFeatures != features {
		e.verdictCache = cel.NewCache(maxVerdictExpressions, features)
		e.verdictFeatures = features
	}
	return e.verdictCache
}

// stateOf collects the devices that claims hold, like the scheduler (allocateddevices.go).
func stateOf(results []resourceapi.DeviceRequestAllocationResult, consumable bool) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, result := range results {
		if result.AdminAccess != nil && *result.AdminAccess {
			continue
		}
		id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
		if !consumable || result.ShareID == nil {
			state.AllocatedDevices.Insert(id)
			continue
		}
		state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
		if result.ConsumedCapacity != nil {
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
		}
	}
	return state
}

// short truncates a string at maxText bytes, between characters.
func short(text string) string {
	if len(text) <= maxText {
		return text
	}
	end := maxText
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return strings.Clone(text[:end]) + "..."
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
