package main

import (
	"fmt"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// softMemory is the size above which garbage is collected more often, and the cached compiled
	// expressions are dropped after a response.
	softMemory = 64 << 20

	// hardMemory is the size at which the process exits. Its client starts another process, and the
	// container continues.
	hardMemory = 96 << 20

	// maxStack ends an infinite recursion before it takes 1 GiB, Go's own limit.
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

// liveMemory is the size of the heap after the last garbage collection.
func liveMemory() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
