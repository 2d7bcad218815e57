package main

import (
	"context"
	"sync"
)

// locks let one call at a time work on a claim, from its begin to its end.
//
// The node plugin lets calls for one device wait for each other, but it cannot know whether we still work
// on one whose time was over or whose connection was lost. Without a lock an Unprepare that comes then
// would find nothing to undo, and the Prepare before it would take the blinker afterwards, for ever.
type locks struct {
	mutex sync.Mutex
	held  map[string]chan struct{}
}

// lock waits for its turn, and returns what ends it; an error if the call has ended meanwhile: then nobody
// wants its work any more, and the next call may have been made already.
func (l *locks) lock(ctx context.Context, claimUID string) (func(), error) {
	for {
		// First, as both may be true: a call that has ended begins nothing.
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

// try returns what ends the turn that it has taken, or what is closed once the turn of another is over.
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
