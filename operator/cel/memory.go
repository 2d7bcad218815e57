package main

import (
	"fmt"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// softMemory is the size from which garbage is collected more often, and from which no compiled
	// expressions are kept.
	softMemory = 64 << 20

	// hardMemory is the size at which the process ends: its client starts another one, and the
	// container goes on.
	hardMemory = 96 << 20

	// maxStack ends a recursion without end before it takes 1 GiB, Go's own limit.
	maxStack = 64 << 20

	// watchPeriod is short, because a process can allocate 1 MiB in 1 ms.
	watchPeriod = 10 * time.Millisecond
)

func limitMemory() {
	debug.SetMemoryLimit(softMemory)
	debug.SetMaxStack(maxStack)
}

// watchMemory ends the process if it exceeds hardMemory before the returned function is called. An idle
// process does not grow, so it has no timer.
func watchMemory(exit func()) (stop func()) {
	done := make(chan struct{})
	go func() {
		ticker := time.NewTicker(watchPeriod)
		defer ticker.Stop()
		samples := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
			}
			metrics.Read(samples)
			if used := samples[0].Value.Uint64() - samples[1].Value.Uint64(); used > hardMemory {
				fmt.Fprintf(os.Stderr, "drakit-cel: a question takes more than %d bytes of memory\n", hardMemory)
				exit()
			}
		}
	}()
	return func() { close(done) }
}

// liveMemory is the size of what the last garbage collection left.
func liveMemory() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
