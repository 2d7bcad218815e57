package backend

import (
	"context"
	"slices"
	"sync"

	backendv1 "drakit.dev/backend/v1"
)

// key identifies something that calls work on. Calls that share a key never overlap.
type key struct{ kind, pool, name string }

// claimKeys returns the keys of a call: its claims, their devices, and the counter sets of these. The
// claims of a call share one place in the order.
func claimKeys(claims []*backendv1.Claim) []key {
	var keys []key
	for _, claim := range claims {
		keys = append(keys, key{kind: "claim", name: claim.GetUid()})
		for _, device := range claim.GetDevices() {
			keys = append(keys, key{"device", device.GetPool(), device.GetName()})
			for set := range device.GetConsumes() {
				keys = append(keys, key{"counter set", device.GetPool(), set})
			}
		}
	}
	return keys
}

// order runs calls that share a key one after another, in the order of their arrival. Calls with
// different keys run at the same time.
//
// The node plugin cannot know whether the backend still works on a call that timed out or lost its
// connection. Without an order, a following UnprepareClaims would find nothing to undo, and the
// earlier PrepareClaims would complete afterwards.
type order struct {
	mutex  sync.Mutex
	queues map[key][]*place
}

// place is the place of a call in the queues of its keys.
type place struct {
	keys []key

	// waits counts the queues in which another call comes first. first is closed when there is none.
	waits int
	first chan struct{}
}

// run waits for earlier calls that share a key, and then does the work. A caller that leaves does not
// end running work, and the next call waits for it. If a caller leaves before its work has begun, the
// work never begins, and run returns the error of the context.
func (o *order) run(ctx context.Context, keys []key, work func()) error {
	place := o.enter(keys)
	defer o.leave(place)
	select {
	case <-place.first:
	case <-ctx.Done():
	}
	// Both can be true, and a caller that has left needs no work.
	if err := ctx.Err(); err != nil {
		return err
	}
	work()
	return nil
}

func (o *order) enter(keys []key) *place {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if o.queues == nil {
		o.queues = map[key][]*place{}
	}
	entered := &place{first: make(chan struct{})}
	known := map[key]bool{}
	for _, key := range keys {
		if known[key] {
			continue // it would wait for itself
		}
		known[key] = true
		if len(o.queues[key]) > 0 {
			entered.waits++
		}
		entered.keys = append(entered.keys, key)
		o.queues[key] = append(o.queues[key], entered)
	}
	if entered.waits == 0 {
		close(entered.first)
	}
	return entered
}

func (o *order) leave(left *place) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	for _, key := range left.keys {
		queue := o.queues[key]
		number := slices.Index(queue, left)
		rest := slices.Delete(queue, number, number+1)
		o.queues[key] = rest
		if len(rest) == 0 {
			delete(o.queues, key)
		} else if next := rest[0]; number == 0 {
			if next.waits--; next.waits == 0 {
				close(next.first)
			}
		}
	}
}
