package backend

import (
	"context"
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
)

// TestCallsRunInTheOrderOfTheirArrival runs the table that the order of the Python runtime passes, too.
func TestCallsRunInTheOrderOfTheirArrival(t *testing.T) {
	var table struct {
		Cases []struct {
			Name  string
			Steps []string
		}
	}
	text, err := os.ReadFile("testdata/call_order.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &table); err != nil {
		t.Fatal(err)
	}
	if len(table.Cases) == 0 {
		t.Fatal("the table is empty")
	}
	for _, each := range table.Cases {
		t.Run(each.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				calls := &orderedCalls{order: &order{}, calls: map[string]*tableCall{}, running: map[string]bool{}}
				for _, step := range each.Steps {
					calls.do(t, step)
					synctest.Wait()
				}
				if left := len(calls.order.queues); left > 0 {
					t.Errorf("%d queues are left", left)
				}
			})
		})
	}
}

// orderedCalls runs the steps of a case.
type orderedCalls struct {
	order *order
	calls map[string]*tableCall

	mutex   sync.Mutex
	running map[string]bool
}

func (c *orderedCalls) set(name string, running bool) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if running {
		c.running[name] = true
	} else {
		delete(c.running, name)
	}
}

type tableCall struct {
	leave context.CancelFunc
	end   chan struct{}
}

func (c *orderedCalls) do(t *testing.T, step string) {
	words := strings.Fields(step)
	verb, names := words[0], words[1:]
	switch verb {
	case "start":
		ctx, leave := context.WithCancel(t.Context())
		call := &tableCall{leave, make(chan struct{})}
		c.calls[names[0]] = call
		var keys []key
		for _, word := range names[1:] {
			kind, rest, _ := strings.Cut(word, "/")
			pool, name, _ := strings.Cut(rest, "/")
			keys = append(keys, key{kind, pool, name})
		}
		go c.order.run(ctx, keys, func() {
			c.set(names[0], true)
			<-call.end
			c.set(names[0], false)
		})
	case "leave":
		c.calls[names[0]].leave()
	case "end", "fail": // a failure is a result of the work
		if !c.running[names[0]] {
			t.Fatalf("%s: %s is not running", step, names[0])
		}
		close(c.calls[names[0]].end)
	case "running":
		running := slices.Sorted(maps.Keys(c.running))
		if slices.Sort(names); !slices.Equal(running, names) {
			t.Fatalf("%s: %v run", step, running)
		}
	default:
		t.Fatalf("the step %q is unknown", step)
	}
}
