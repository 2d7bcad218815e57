package main

import (
	"context"
	"sync"
)

// locks allow one call at a time to work on a claim.
//
// The node plugin serializes the calls for a device, but it cannot know whether the backend still works on
// a call that timed out or lost its connection. Without a lock, a following Unprepare would find nothing to
// undo, and the earlier Prepare would take the blinker afterwards and never release it.
type locks struct {
	mutex sync.Mutex
	held  map[string]chan struct{}
}

// lock waits for the lock, and returns a function that releases it. It returns an error if the call ends
// first: its result is no longer needed, and the next call may already be waiting.
func (l *locks) lock(ctx context.Context, claimUID string) (func(), error) {
	for {
		// Check the context first: if the lock is free but the call has already ended, do not start its work.
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		busy, unlock := l.try(claimUID)
		if unlock != nil {
			return unlock, nil
		}
		select {
		case <-busy:
		case <-ctx.Done():
		}
	}
}

// try returns a function that releases the lock, or a channel that is closed when its holder releases it.
func (l *locks) try(claimUID string) (<-chan struct{}, func()) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if busy, ok := l.held[claimUID]; ok {
		return busy, nil
	}
	over := make(chan struct{})
	if l.held == nil {
		l.held = map[string]chan struct{}{}
	}
	l.held[claimUID] = over
	return nil, func() {
		l.mutex.Lock()
		defer l.mutex.Unlock()
		delete(l.held, claimUID)
		close(over)
	}
}
