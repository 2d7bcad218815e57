// Package backend serves the driver contract of drakit, drakit.backend.v1.
//
// A backend is a driver for Kubernetes Dynamic Resource Allocation (DRA) that runs as its own
// process on a node. The node plugin of drakit is its client, and does everything that Kubernetes
// requires. This package does everything that the contract requires of a server. The driver
// implements [Driver], and a program calls [Serve]:
//
//	err := backend.Serve(ctx, &lamps{}, backend.Options{
//		Socket: "/run/drakit/lamps.sock",
//		Info:   &backendv1.GetInfoResponse{DriverName: "lamps.example.com", Version: "1.0.0"},
//	})
//
// The messages are generated from the contract, in package backendv1 (drakit.dev/backend/v1). Their
// comments describe each field. The server ignores methods and fields that a later version of the
// contract adds, so a backend keeps working with later versions of the node plugin.
package backend

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"google.golang.org/grpc"

	backendv1 "drakit.dev/backend/v1"
)

// Driver is the interface that a vendor implements. All methods can be called concurrently.
//
// A driver can also implement [HealthWatcher], [Checker], [BatchPreparer], [PolicyApplier] and
// [NodeObserver]. To let the compiler verify the methods of an optional interface, assign a value:
//
//	var _ backend.Checker = (*lamps)(nil)
type Driver interface {
	// WatchDevices lists and watches the devices. It calls publish with all devices, and again
	// with all of them after each change, until the context ends. [Poll] does so for a driver that
	// has no notifications. A node without devices also calls publish, with an empty message.
	//
	// publish returns immediately. It copies the message, and does nothing if the message equals
	// the previous one. Any number of node plugins get the latest message.
	//
	// Return an error if the devices cannot be read. The node plugin then taints all devices and
	// prepares none of them, and Serve calls the method again: after a second at first, and later
	// after at most 30 seconds.
	WatchDevices(ctx context.Context, publish func(*backendv1.WatchDevicesResponse)) error

	// Prepare prepares the devices of a claim, and returns the edits to the containers that use it:
	// one for each device, in the order of claim.Devices. PreparedClaim.Devices can add data about
	// the devices that users and containers can read. Serve sets the UID and the error of the
	// result.
	//
	// The method must be idempotent. It is called again for the same claim after a failure, a
	// crash or a reboot, must then return the same result, and make sure that all side effects are
	// in place. Calls for one claim never overlap, and neither do calls for one device or one counter
	// set: they run in the order of their arrival. The claims of a pod arrive in one call and are
	// prepared one after another.
	//
	// An error fails only this claim. Its message becomes part of an Event of the pod, so write a
	// sentence with the device, the cause and the remedy, without times and counters. A panic also
	// fails the claim.
	//
	// The context ends 5 minutes after the beginning of the call, and at the end of a shutdown, but not
	// when the node plugin no longer waits for the result. The next call for the claim or its devices
	// waits until this call has returned. If it has not returned a minute after the limit, the backend
	// reports that it is not alive.
	Prepare(ctx context.Context, claim *backendv1.Claim) (*backendv1.PreparedClaim, error)

	// Unprepare undoes Prepare. It is called after all containers have terminated, even if Prepare
	// failed or never ran, possibly by a new process, and again after an error. The claim object
	// and the devices may no longer exist. If there is nothing to undo, it returns nil. While it
	// returns an error, the devices stay reserved for the claim. The pod also waits, unless the error
	// wraps [ErrReleasePending].
	//
	// A driver without side effects returns nil.
	Unprepare(ctx context.Context, claim *backendv1.Claim) error
}

// ErrReleasePending is for work that takes a long time, such as erasing a device's memory. If Unprepare
// returns an error that wraps it, the pod can terminate, but the devices stay reserved until
// Unprepare returns nil.
var ErrReleasePending = errors.New("the release is pending")

// HealthWatcher is a Driver that reports the health of its devices separately from the devices.
// Alternatively, a driver can set Device.Health in the devices that it publishes.
type HealthWatcher interface {
	// WatchHealth calls publish with the health of all devices, and again after each change, until
	// the context ends. Serve sends the differences. After an error, Serve calls the method again,
	// like WatchDevices. Meanwhile, the health of the devices does not change.
	WatchHealth(ctx context.Context, publish func(*backendv1.WatchHealthResponse)) error
}

// Checker is a Driver whose side effects can get lost while a claim is prepared.
type Checker interface {
	// Check returns whether all devices of a claim are still prepared correctly. If it returns
	// false or an error, the node plugin calls Prepare again, without Unprepare.
	Check(ctx context.Context, claim *backendv1.Claim) (bool, error)
}

// BatchPreparer is a Driver that prepares the claims of a pod in one step.
type BatchPreparer interface {
	// PrepareBatch is called instead of Prepare. It returns a result for each claim, with the UID of
	// the claim. To fail a claim, set PreparedClaim.Error. A claim without a result has failed.
	PrepareBatch(ctx context.Context, claims []*backendv1.Claim) []*backendv1.PreparedClaim
}

// PolicyApplier is a Driver whose devices depend on custom resources of administrators. Info.Policies
// names the resource. Calls never overlap, even if two node plugins are connected. Both methods must
// return within 10 seconds: the node plugin disconnects a backend whose UpdateHeldDevices takes
// longer, and that call waits for ApplyPolicies.
type PolicyApplier interface {
	// ApplyPolicies applies all policies, which replace the previous ones. Serve calls WatchDevices
	// after the method has succeeded once. If the response has invalid policies, the driver must not
	// have applied any. After an error, the previous policies must stay in effect.
	ApplyPolicies(
		ctx context.Context, request *backendv1.ApplyPoliciesRequest,
	) (*backendv1.ApplyPoliciesResponse, error)

	// UpdateHeldDevices is called before the first ApplyPolicies on a connection, and after every
	// change. While a claim holds a device, the driver must neither rename the device nor switch it
	// to a different policy.
	UpdateHeldDevices(ctx context.Context, request *backendv1.UpdateHeldDevicesRequest)
}

// NodeObserver is a Driver that needs the name or the labels of the node.
type NodeObserver interface {
	// ObserveNode is called when a node plugin connects, and again when the labels have changed.
	ObserveNode(ctx context.Context, node *backendv1.GetInfoRequest)
}

// Options configure Serve. Socket and Info are required.
type Options struct {
	// Socket is the path of the socket in the backend's directory. The node plugin finds a name
	// that ends in ".sock" and does not begin with a dot.
	Socket string

	// SocketMode is the permission bits of the socket, 0600 by default. Any process that can
	// connect to the socket can prepare any claim.
	SocketMode fs.FileMode

	// PeerUIDs are users whose processes can connect, in addition to root, as which the node plugin
	// runs, and the backend's own user. In a pod with a user namespace (hostUsers: false), root of the
	// node has the ID 65534.
	PeerUIDs []uint32

	// Info identifies the driver, and requests optional parts of the contract.
	Info *backendv1.GetInfoResponse

	// Log is the destination of log lines, slog.Default() by default. Lines about a call have the
	// attribute request_id, which is also in the log of the node plugin. [Logger] returns the same
	// logger to a driver.
	Log *slog.Logger

	// StopTimeout limits how long calls in progress delay a shutdown, 20 seconds by default. It
	// must be shorter than the terminationGracePeriodSeconds of the pod.
	StopTimeout time.Duration

	// ProbePort is the port of the probes and metrics, on all addresses of the pod. With 0, there are
	// no probes and metrics. /readyz succeeds when the node plugin has received the devices. During
	// an update, it also succeeds while the node plugin uses the previous process at the same Socket.
	// /livez fails if a call does not return. The log has the reason for a failure. /metrics has the
	// calls by method and result, their duration, and whether a node plugin is connected, in the text
	// format of Prometheus.
	ProbePort int
}

const (
	defaultSocketMode  = 0o600
	defaultStopTimeout = 20 * time.Second
	maxRetryDelay      = 30 * time.Second

	// lastDelay is the time to return after the context of a call has ended.
	lastDelay = time.Second
)

// firstRetryDelay is a variable for tests.
var firstRetryDelay = time.Second

// Serve creates the socket, and serves the contract until the context ends. Then it removes the
// socket, so that the node plugin finds the next process, waits for calls in progress, ends the streams,
// and returns nil.
//
// In a rolling update, the new process replaces the socket before the old process stops. Therefore,
// Serve replaces an existing socket, and removes the socket only if it is still its own.
//
// It returns an error if the options are invalid, if it cannot create the socket, or if calls in
// progress did not return within StopTimeout.
func Serve(ctx context.Context, driver Driver, options Options) error {
	if options.Info.GetDriverName() == "" {
		return errors.New("Options.Info has no DriverName: set the name of the driver")
	}
	if field := invalidText(options.Info); field != "" {
		return fmt.Errorf("the field %s of Options.Info has text that is not UTF-8", field)
	}
	if options.SocketMode == 0 {
		options.SocketMode = defaultSocketMode
	}
	if options.StopTimeout == 0 {
		options.StopTimeout = defaultStopTimeout
	}
	log := options.Log
	if log == nil {
		log = slog.Default()
	}
	log = log.With("driver", options.Info.GetDriverName())
	peers := append([]uint32{0, uint32(os.Geteuid())}, options.PeerUIDs...)
	socket, err := listen(options.Socket, options.SocketMode, peers, log)
	if err != nil {
		return err
	}
	defer socket.Close()

	// Streams and calls in progress outlive the context of Serve.
	watching, endStreams := context.WithCancel(context.WithoutCancel(ctx))
	defer endStreams()
	working, endCalls := context.WithCancel(context.WithoutCancel(ctx))
	defer endCalls()
	s := &service{
		driver: driver, info: options.Info, log: log, socket: socket,
		stopping: ctx, working: working, watching: watching, calls: newCalls(), applied: make(chan struct{}),
	}
	s.devices.sendable = func(list *backendv1.WatchDevicesResponse) *backendv1.WatchDevicesResponse {
		return sendableDevices(log, list)
	}
	if options.ProbePort != 0 {
		probes, err := s.serveProbes(options.ProbePort)
		if err != nil {
			return err
		}
		defer probes.Close()
	}
	go s.logConnection(ctx, connectTimeout)
	go func() {
		if _, ok := driver.(PolicyApplier); ok {
			// The first list must be of devices with policies.
			select {
			case <-s.applied:
			case <-watching.Done():
				return
			}
		}
		keepWatching(watching, log, "WatchDevices", &s.devices, driver.WatchDevices)
	}()
	if watcher, ok := driver.(HealthWatcher); ok {
		s.health = &topic[*backendv1.WatchHealthResponse]{sendable: sendableHealth}
		go keepWatching(watching, log, "WatchHealth", s.health, watcher.WatchHealth)
	}
	server := grpc.NewServer(
		grpc.UnaryInterceptor(s.calls.unary), grpc.StreamInterceptor(s.calls.stream),
		grpc.StatsHandler(&s.calls), grpc.MaxConcurrentStreams(maxCalls+2*maxStreams),
	)
	backendv1.RegisterBackendServer(server, s)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(socket) }()
	log.Info("serving", "socket", options.Socket, "version", options.Info.GetVersion())

	select {
	case err := <-ended:
		return fmt.Errorf("the server of %s ended by itself: %w", options.Socket, err)
	case <-ctx.Done():
	}
	log.Info("stopping")
	if err := socket.remove(); err != nil {
		log.Warn("the socket cannot be removed", "error", err)
	}
	// The node plugin cancels its calls when the stream of devices ends, and then calls the next process.
	// So calls end first.
	idle := s.calls.drain(options.StopTimeout)
	// A driver that ignores the end of the contexts must not keep the process.
	endCalls()
	endStreams()
	stopped := make(chan struct{})
	go func() { server.GracefulStop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(lastDelay):
		go server.Stop()
	}
	if !idle {
		return fmt.Errorf("calls in progress did not return within %s", options.StopTimeout)
	}
	return nil
}

// Poll calls list immediately and then after each interval, and publishes the result. It returns
// the first error of list, or nil when the context ends.
func Poll[T any](
	ctx context.Context, interval time.Duration, list func() (T, error), publish func(T),
) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		found, err := list()
		if err != nil {
			return err
		}
		publish(found)
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

type loggerKey struct{}

// Logger returns the logger of the call that the context belongs to.
func Logger(ctx context.Context) *slog.Logger {
	if log, ok := ctx.Value(loggerKey{}).(*slog.Logger); ok {
		return log
	}
	return slog.Default()
}
