package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	backendv1 "drakit.dev/backend/v1"
)

// requestID is the metadata key of the request ID.
const requestID = "drakit-request-id"

// minInterval is the time between two messages of a stream. The node plugin disconnects a backend
// that continuously sends more than 100 messages per second.
const minInterval = 20 * time.Millisecond

// callTimeout is the time limit for a call of the driver, from the moment when its work begins.
// returnTimeout is how long the driver can take to return after that. Both are variables for tests.
var (
	callTimeout   = 5 * time.Minute
	returnTimeout = time.Minute
)

var errStopping = status.Error(codes.Unavailable, "the backend is stopping")

// policiesKey serializes the calls about policies.
var policiesKey = key{kind: "policies"}

// service implements drakit.backend.v1 with a Driver. It keeps the latest lists and the calls in
// progress, so the node plugin can repeat calls and several node plugins can connect.
type service struct {
	// Returns Unimplemented for methods that later versions of the contract add.
	backendv1.UnimplementedBackendServer

	driver Driver
	info   *backendv1.GetInfoResponse
	log    *slog.Logger

	socket *ownSocket

	// stopping ends at the beginning of a shutdown, which then waits for the calls in progress. When
	// working ends, the calls that remain are canceled. When watching ends, all streams end.
	stopping, working, watching context.Context

	devices topic[*backendv1.WatchDevicesResponse]
	health  *topic[*backendv1.WatchHealthResponse]
	order   order
	status  connectionStatus
	calls   calls

	// applied is closed after policies were applied for the first time.
	applied chan struct{}
	once    sync.Once
}

// ------------------------------------------------------------ lists and streams

// topic has the latest message of a list, or the error that made it unknown.
type topic[M proto.Message] struct {
	// sendable returns a copy that can be sent: the driver may change its message later.
	sendable func(M) M

	mutex   sync.Mutex
	latest  M
	known   bool
	err     error
	changed chan struct{}
}

func (t *topic[M]) publish(message M) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.known && proto.Equal(t.latest, message) {
		return
	}
	sendable := t.sendable(message)
	if t.known && proto.Equal(t.latest, sendable) {
		return
	}
	t.latest, t.known, t.err = sendable, true, nil
	t.wake()
}

func (t *topic[M]) fail(err error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.known, t.err = false, err
	t.wake()
}

func (t *topic[M]) wake() {
	if t.changed != nil {
		close(t.changed)
		t.changed = nil
	}
}

// read returns the latest message, or the error, and a channel that is closed by the next change.
func (t *topic[M]) read() (message M, known bool, err error, changed <-chan struct{}) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.changed == nil {
		t.changed = make(chan struct{})
	}
	return t.latest, t.known, t.err, t.changed
}

// keepWatching runs a watch of the driver until the context ends. A failure ends the streams,
// because the state of the devices is unknown, until the watch publishes again.
func keepWatching[M proto.Message](
	ctx context.Context, log *slog.Logger, name string, list *topic[M],
	watch func(context.Context, func(M)) error,
) {
	ctx = context.WithValue(ctx, loggerKey{}, log)
	delay := firstRetryDelay
	for {
		var published atomic.Bool
		err := protect(log, func() error {
			return watch(ctx, func(message M) { published.Store(true); list.publish(message) })
		})
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = fmt.Errorf("%s returned, but must run until its context ends", name)
		}
		log.Error("the driver stopped watching", "method", name, "error", err)
		list.fail(err)
		if published.Load() {
			delay = firstRetryDelay
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return
		}
		delay = min(2*delay, maxRetryDelay)
	}
}

// message is a pointer to a generated message R.
type message[R any] interface {
	*R
	proto.Message
}

// follow sends a list now, and again whenever it changes. A slow node plugin gets only the latest list.
// changes returns the message to send after the previous list; nil is not sent. onSent is called after
// each message.
func follow[R any, M message[R]](
	s *service, stream grpc.ServerStreamingServer[R], list *topic[M],
	changes func(before, now M) M, onSent func(),
) error {
	var sent M
	for {
		latest, known, err, changed := list.read()
		if err != nil {
			// Don't return Unavailable, which the node plugin would treat as a lost connection.
			return status.Error(codes.Aborted, sentence(err))
		}
		if known && latest != sent {
			if message := changes(sent, latest); message != nil {
				if err := stream.Send(message); err != nil {
					return err
				}
				onSent()
			}
			sent = latest
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		case <-s.watching.Done():
			return errStopping
		}
		time.Sleep(minInterval)
	}
}

func (s *service) WatchDevices(
	_ *backendv1.WatchDevicesRequest, stream grpc.ServerStreamingServer[backendv1.WatchDevicesResponse],
) error {
	onSent, ended := s.status.watch()
	defer ended()
	return follow(s, stream, &s.devices,
		func(_, now *backendv1.WatchDevicesResponse) *backendv1.WatchDevicesResponse { return now }, onSent)
}

func (s *service) WatchHealth(
	request *backendv1.WatchHealthRequest, stream grpc.ServerStreamingServer[backendv1.WatchHealthResponse],
) error {
	if s.health == nil {
		return s.UnimplementedBackendServer.WatchHealth(request, stream)
	}
	return follow(s, stream, s.health, changedHealth, func() {})
}

// changedHealth returns the health that differs from the previous list, or nil.
func changedHealth(before, now *backendv1.WatchHealthResponse) *backendv1.WatchHealthResponse {
	type key struct{ pool, name string }
	known := map[key]*backendv1.DeviceHealth{}
	for _, device := range before.GetDevices() {
		known[key{device.GetPool(), device.GetName()}] = device
	}
	changed := &backendv1.WatchHealthResponse{}
	for _, device := range now.GetDevices() {
		if !proto.Equal(known[key{device.GetPool(), device.GetName()}], device) {
			changed.Devices = append(changed.Devices, device)
		}
	}
	if len(changed.Devices) == 0 {
		return nil
	}
	return changed
}

// ------------------------------------------------------------ calls

func (s *service) GetInfo(
	ctx context.Context, request *backendv1.GetInfoRequest,
) (*backendv1.GetInfoResponse, error) {
	Logger(s.withLogger(ctx)).Info("node plugin connected",
		"node", request.GetNodeName(), "plugin_version", request.GetPluginVersion())
	if driver, ok := s.driver.(NodeObserver); ok {
		err := s.observe(ctx, key{kind: "node"}, func(ctx context.Context) { driver.ObserveNode(ctx, request) })
		if err != nil {
			return nil, err
		}
	}
	s.status.requestedName()
	return s.info, nil
}

func (s *service) ApplyPolicies(
	ctx context.Context, request *backendv1.ApplyPoliciesRequest,
) (*backendv1.ApplyPoliciesResponse, error) {
	driver, ok := s.driver.(PolicyApplier)
	if !ok {
		return s.UnimplementedBackendServer.ApplyPolicies(ctx, request)
	}
	response := &backendv1.ApplyPoliciesResponse{}
	failure, err := s.run(s.withLogger(ctx), []key{policiesKey}, func(ctx context.Context) error {
		result, err := driver.ApplyPolicies(ctx, request)
		if result != nil {
			response = withValidText(proto.CloneOf(result))
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if failure != nil {
		response = &backendv1.ApplyPoliciesResponse{Error: sentence(failure)}
	}
	if response.GetError() == "" && len(response.GetInvalid()) == 0 {
		s.once.Do(func() { close(s.applied) })
	}
	return response, nil
}

func (s *service) UpdateHeldDevices(
	ctx context.Context, request *backendv1.UpdateHeldDevicesRequest,
) (*backendv1.UpdateHeldDevicesResponse, error) {
	driver, ok := s.driver.(PolicyApplier)
	if !ok {
		return s.UnimplementedBackendServer.UpdateHeldDevices(ctx, request)
	}
	err := s.observe(ctx, policiesKey, func(ctx context.Context) { driver.UpdateHeldDevices(ctx, request) })
	return &backendv1.UpdateHeldDevicesResponse{}, err
}

// observe passes an object to the driver, and returns a panic as an error of the call.
func (s *service) observe(ctx context.Context, about key, pass func(context.Context)) error {
	failure, err := s.run(s.withLogger(ctx), []key{about}, func(ctx context.Context) error { pass(ctx); return nil })
	if failure != nil {
		return status.Error(codes.Internal, sentence(failure))
	}
	return err
}

// run runs a part of the driver, once earlier calls with one of these keys have returned. It returns the
// failure of the driver, or an error if the caller left before its turn.
//
// The work outlives its caller, but not its time limit. If it does not return even then, the backend
// reports that it is not alive: the next calls for the same devices can never begin.
func (s *service) run(
	ctx context.Context, keys []key, work func(context.Context) error,
) (failure, err error) {
	err = s.order.run(ctx, keys, func() {
		caller, log := ctx, Logger(ctx)
		defer context.AfterFunc(caller, func() { log.Warn("caller no longer waits for a call that continues") })()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(caller), callTimeout)
		defer cancel()
		defer context.AfterFunc(s.working, cancel)()
		defer s.calls.expectReturn(log)()
		failure = protect(log, func() error { return work(ctx) })
	})
	if err != nil {
		return nil, status.FromContextError(err).Err()
	}
	return failure, nil
}

func (s *service) PrepareClaims(
	ctx context.Context, request *backendv1.PrepareClaimsRequest,
) (*backendv1.PrepareClaimsResponse, error) {
	if driver, ok := s.driver.(BatchPreparer); ok {
		results, err := s.prepareBatch(s.withLogger(ctx), driver, request.GetClaims())
		return &backendv1.PrepareClaimsResponse{Claims: results}, err
	}
	results, err := perClaim(s, ctx, "prepare", request.GetClaims(),
		func(ctx context.Context, claim *backendv1.Claim) (*backendv1.PreparedClaim, error) {
			result, err := s.driver.Prepare(ctx, claim)
			if err != nil {
				return nil, err
			}
			// Copy it, because the driver may return the same message again.
			result = sendableClaim(result)
			if problem := result.GetError(); problem != "" {
				return nil, errors.New(problem)
			}
			return result, nil
		},
		func(claim *backendv1.Claim, result *backendv1.PreparedClaim, failure string) *backendv1.PreparedClaim {
			if result == nil {
				result = &backendv1.PreparedClaim{}
			}
			result.Uid, result.Error = claim.GetUid(), failure
			return result
		})
	return &backendv1.PrepareClaimsResponse{Claims: results}, err
}

func (s *service) UnprepareClaims(
	ctx context.Context, request *backendv1.UnprepareClaimsRequest,
) (*backendv1.UnprepareClaimsResponse, error) {
	results, err := perClaim(s, ctx, "unprepare", request.GetClaims(),
		func(ctx context.Context, claim *backendv1.Claim) (pending bool, err error) {
			err = s.driver.Unprepare(ctx, claim)
			return errors.Is(err, ErrReleasePending), err
		},
		func(claim *backendv1.Claim, pending bool, failure string) *backendv1.UnpreparedClaim {
			return &backendv1.UnpreparedClaim{Uid: claim.GetUid(), Error: failure, Pending: pending}
		})
	return &backendv1.UnprepareClaimsResponse{Claims: results}, err
}

func (s *service) CheckClaims(
	ctx context.Context, request *backendv1.CheckClaimsRequest,
) (*backendv1.CheckClaimsResponse, error) {
	driver, ok := s.driver.(Checker)
	if !ok {
		return s.UnimplementedBackendServer.CheckClaims(ctx, request)
	}
	results, err := perClaim(s, ctx, "check", request.GetClaims(), driver.Check,
		func(claim *backendv1.Claim, prepared bool, failure string) *backendv1.CheckedClaim {
			return &backendv1.CheckedClaim{Uid: claim.GetUid(), Prepared: prepared && failure == ""}
		})
	return &backendv1.CheckClaimsResponse{Claims: results}, err
}

// perClaim does the work of a call for one claim after another, and returns a result for each. It
// returns an error if the caller left before the call began: then its results are no longer needed.
func perClaim[W, R any](
	s *service, ctx context.Context, action string, claims []*backendv1.Claim,
	work func(context.Context, *backendv1.Claim) (W, error),
	result func(claim *backendv1.Claim, done W, failure string) R,
) ([]R, error) {
	results := make([]R, 0, len(claims))
	_, err := s.run(s.withLogger(ctx), claimKeys(claims), func(ctx context.Context) error {
		for _, claim := range claims {
			ctx := s.withLogger(ctx, "claim", claim.GetNamespace()+"/"+claim.GetName(), "claim_uid", claim.GetUid())
			var done W
			failure := ""
			err := protect(Logger(ctx), func() (err error) {
				done, err = work(ctx, claim)
				return err
			})
			if err != nil {
				failure = sentence(err)
			}
			logResult(ctx, action, failure)
			results = append(results, result(claim, done, failure))
		}
		return nil
	})
	return results, err
}

func (s *service) prepareBatch(
	ctx context.Context, driver BatchPreparer, claims []*backendv1.Claim,
) ([]*backendv1.PreparedClaim, error) {
	var results []*backendv1.PreparedClaim
	failure, err := s.run(ctx, claimKeys(claims), func(ctx context.Context) error {
		for _, result := range driver.PrepareBatch(ctx, claims) {
			results = append(results, sendableClaim(result))
		}
		return nil
	})
	if failure != nil {
		return nil, status.Error(codes.Internal, sentence(failure))
	}
	for _, result := range results {
		logResult(s.withLogger(ctx, "claim_uid", result.GetUid()), "prepare", result.GetError())
	}
	return results, err
}

// withLogger returns a context whose logger has the request ID of the call.
func (s *service) withLogger(ctx context.Context, attributes ...any) context.Context {
	for _, id := range metadata.ValueFromIncomingContext(ctx, requestID) {
		attributes = append(attributes, "request_id", id)
	}
	return context.WithValue(ctx, loggerKey{}, s.log.With(attributes...))
}

func logResult(ctx context.Context, action, failure string) {
	if failure != "" {
		Logger(ctx).Warn("cannot "+action+" claim", "error", failure)
		return
	}
	Logger(ctx).Info(action + " claim")
}

// protect runs a part of the driver, and returns a panic as an error.
func protect(log *slog.Logger, work func() error) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			log.Error("the driver panicked", "panic", cause, "stack", string(debug.Stack()))
			// The cause can contain addresses: Kubernetes deduplicates only equal messages.
			err = errors.New("the driver panicked; see the log of the backend")
		}
	}()
	return work()
}

// sentence returns the message of an error. An empty message would mean success.
func sentence(err error) string {
	if text := err.Error(); text != "" {
		return validText(text)
	}
	return fmt.Sprintf("the driver returned an error of type %T without a message", err)
}
