package backend

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	backendv1 "drakit.dev/backend/v1"
)

const (
	// maxCalls limits the calls in progress, with those that wait. A node has at most a few hundred pods.
	maxCalls = 256

	// maxStreams limits the streams of each method: those of two node plugins, and of their successors.
	maxStreams = 4
)

// callBuckets are the upper bounds of the histogram of calls, in seconds.
var callBuckets = []float64{0.01, 0.1, 1, 10, 60, 300}

// calls counts calls and streams, and limits them.
type calls struct {
	mutex    sync.Mutex
	running  int
	draining bool
	drained  chan struct{}
	streams  map[string]int
	overdue  int

	results map[[2]string]int
	seconds map[string]*histogram
}

type histogram struct {
	counts [7]int // the last one has no upper bound
	sum    float64
}

func newCalls() calls {
	return calls{
		drained: make(chan struct{}), streams: map[string]int{},
		results: map[[2]string]int{}, seconds: map[string]*histogram{},
	}
}

// counted is a context value of a call, which is running until its response is sent.
type counted struct{ running bool }

type countedKey struct{}

// unary is a [grpc.UnaryServerInterceptor].
func (c *calls) unary(
	ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	if err := c.begin(); err != nil {
		return nil, err
	}
	ctx.Value(countedKey{}).(*counted).running = true
	began := time.Now()
	response, err := handler(ctx, request)
	c.observe(path.Base(info.FullMethod), response, err, time.Since(began))
	return response, err
}

// TagRPC and the methods below implement [stats.Handler]: an interceptor returns before the response is sent.
func (c *calls) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	return context.WithValue(ctx, countedKey{}, &counted{})
}

func (c *calls) HandleRPC(ctx context.Context, event stats.RPCStats) {
	if _, ok := event.(*stats.End); !ok || !ctx.Value(countedKey{}).(*counted).running {
		return
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.running--; c.draining && c.running == 0 {
		close(c.drained)
	}
}

func (c *calls) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (c *calls) HandleConn(context.Context, stats.ConnStats) {}

func (c *calls) begin() error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.draining && c.running == 0 {
		return errStopping
	}
	if c.running == maxCalls {
		return status.Errorf(codes.ResourceExhausted, "the backend already has %d calls in progress", maxCalls)
	}
	c.running++
	return nil
}

// observe adds a call to the metrics.
func (c *calls) observe(method string, response any, err error, took time.Duration) {
	if status.Code(err) == codes.Unimplemented {
		return // the node plugin finds out that the driver does not have the method
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	result := "success"
	if err != nil || hasError(response) {
		result = "error"
	}
	c.results[[2]string{method, result}]++
	if c.seconds[method] == nil {
		c.seconds[method] = &histogram{}
	}
	place, _ := slices.BinarySearch(callBuckets, took.Seconds())
	c.seconds[method].counts[place]++
	c.seconds[method].sum += took.Seconds()
}

func hasError(response any) bool {
	switch response := response.(type) {
	case *backendv1.PrepareClaimsResponse:
		return slices.ContainsFunc(response.GetClaims(),
			func(claim *backendv1.PreparedClaim) bool { return claim.GetError() != "" })
	case *backendv1.UnprepareClaimsResponse:
		return slices.ContainsFunc(response.GetClaims(),
			func(claim *backendv1.UnpreparedClaim) bool { return claim.GetError() != "" && !claim.GetPending() })
	case *backendv1.ApplyPoliciesResponse:
		return response.GetError() != ""
	}
	return false
}

// stream is a [grpc.StreamServerInterceptor].
func (c *calls) stream(
	server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler,
) error {
	method := path.Base(info.FullMethod)
	if !c.addStream(method, 1) {
		return status.Errorf(codes.ResourceExhausted, "the backend already has %d streams of %s", maxStreams, method)
	}
	defer c.addStream(method, -1)
	return handler(server, stream)
}

func (c *calls) addStream(method string, number int) bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.streams[method]+number > maxStreams {
		return false
	}
	c.streams[method] += number
	return true
}

// drain waits until no call is in progress, and returns false on a timeout. Once no call is in
// progress, calls are refused. Calls that arrive before that are served, because the node plugin still
// uses this process.
func (c *calls) drain(timeout time.Duration) bool {
	c.mutex.Lock()
	c.draining = true
	idle := c.running == 0
	c.mutex.Unlock()
	if idle {
		return true
	}
	select {
	case <-c.drained:
		return true
	case <-time.After(timeout):
		return false
	}
}

// expectReturn records when a part of the driver has not returned in time. Call the result when it
// returns.
func (c *calls) expectReturn(log *slog.Logger) (returned func()) {
	add := func(number int) {
		c.mutex.Lock()
		defer c.mutex.Unlock()
		c.overdue += number
	}
	timer := time.AfterFunc(callTimeout+returnTimeout, func() {
		log.Error("the driver has not returned from a call after its time limit")
		add(1)
	})
	return func() {
		if !timer.Stop() {
			add(-1)
		}
	}
}

// notAlive returns why only a restart helps, or an empty string.
func (c *calls) notAlive() string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.overdue == 0 {
		return ""
	}
	return fmt.Sprintf("the driver has not returned from a call %s after its time limit", returnTimeout)
}

// metrics returns the calls in the text format of Prometheus.
func (c *calls) metrics() string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	text := &strings.Builder{}
	text.WriteString("# HELP drakit_driver_calls_total Calls by the node plugin. A call with a claim that fails is an error.\n" +
		"# TYPE drakit_driver_calls_total counter\n")
	for _, each := range slices.SortedFunc(maps.Keys(c.results), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
		fmt.Fprintf(text, "drakit_driver_calls_total{method=%q,result=%q} %d\n", each[0], each[1], c.results[each])
	}
	text.WriteString("# HELP drakit_driver_call_seconds Duration of calls, with their wait for earlier calls.\n" +
		"# TYPE drakit_driver_call_seconds histogram\n")
	for _, method := range slices.Sorted(maps.Keys(c.seconds)) {
		count := 0
		for number, each := range c.seconds[method].counts {
			bound := "+Inf"
			if number < len(callBuckets) {
				bound = fmt.Sprint(callBuckets[number])
			}
			count += each
			fmt.Fprintf(text, "drakit_driver_call_seconds_bucket{method=%q,le=%q} %d\n", method, bound, count)
		}
		fmt.Fprintf(text, "drakit_driver_call_seconds_sum{method=%q} %g\n", method, c.seconds[method].sum)
		fmt.Fprintf(text, "drakit_driver_call_seconds_count{method=%q} %d\n", method, count)
	}
	return text.String()
}
