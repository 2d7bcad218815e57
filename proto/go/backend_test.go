package backend

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	backendv1 "drakit.dev/backend/v1"
)

func TestMain(m *testing.M) {
	firstRetryDelay = 10 * time.Millisecond
	os.Exit(m.Run())
}

// lamps is a driver whose tests decide what it lists and how it prepares.
type lamps struct {
	lists   chan []string
	prepare func(context.Context, *backendv1.Claim) error
	undo    func(*backendv1.Claim) error
}

var errUnreadable = errors.New("cannot read /dev/lamps")

func (l *lamps) WatchDevices(ctx context.Context, publish func(*backendv1.WatchDevicesResponse)) error {
	for {
		select {
		case names := <-l.lists:
			if names == nil {
				return errUnreadable
			}
			list := &backendv1.WatchDevicesResponse{}
			for _, name := range names {
				list.Devices = append(list.Devices, &backendv1.Device{Name: name})
			}
			publish(list)
		case <-ctx.Done():
			return nil
		}
	}
}

func (l *lamps) Prepare(ctx context.Context, claim *backendv1.Claim) (*backendv1.PreparedClaim, error) {
	if l.prepare != nil {
		if err := l.prepare(ctx, claim); err != nil {
			return nil, err
		}
	}
	return &backendv1.PreparedClaim{Edits: []*backendv1.Edits{{Env: map[string]string{"CLAIM": claim.GetUid()}}}}, nil
}

func (l *lamps) Unprepare(_ context.Context, claim *backendv1.Claim) error {
	if l.undo != nil {
		return l.undo(claim)
	}
	return nil
}

// checked is a driver that also reports health and checks claims.
type checked struct {
	*lamps
	health chan map[string]backendv1.HealthStatus
}

func (c *checked) WatchHealth(ctx context.Context, publish func(*backendv1.WatchHealthResponse)) error {
	for {
		select {
		case all := <-c.health:
			list := &backendv1.WatchHealthResponse{}
			for name, health := range all {
				list.Devices = append(list.Devices,
					&backendv1.DeviceHealth{Name: name, Health: &backendv1.Health{Status: health}})
			}
			publish(list)
		case <-ctx.Done():
			return nil
		}
	}
}

func (c *checked) Check(_ context.Context, claim *backendv1.Claim) (bool, error) {
	if claim.GetUid() == "odd" {
		return true, errors.New("cannot read the lamp")
	}
	return claim.GetUid() == "held", nil
}

// batch is a driver that prepares all claims of a pod at once.
type batch struct{ *lamps }

func (b *batch) PrepareBatch(_ context.Context, claims []*backendv1.Claim) []*backendv1.PreparedClaim {
	var results []*backendv1.PreparedClaim
	for _, claim := range claims {
		if claim.GetUid() == "panic" {
			panic("no lamp")
		}
		results = append(results, &backendv1.PreparedClaim{
			Uid: claim.GetUid(), Error: fmt.Sprintf("one of %d", len(claims)),
		})
	}
	return results
}

// ruled is a driver with policies, which needs the node.
type ruled struct {
	*lamps
	node string
	held int
}

func (r *ruled) ApplyPolicies(
	_ context.Context, request *backendv1.ApplyPoliciesRequest,
) (*backendv1.ApplyPoliciesResponse, error) {
	response := &backendv1.ApplyPoliciesResponse{}
	for _, policy := range request.GetPolicies() {
		switch policy.GetSpec() {
		case "error":
			return response, errors.New("the lamps are dark")
		case "panic":
			panic("no lamp")
		case "wrong":
			response.Invalid = append(response.Invalid,
				&backendv1.InvalidPolicy{Name: policy.GetName(), Problem: "spec is wrong"})
		}
	}
	return response, nil
}

func (r *ruled) UpdateHeldDevices(_ context.Context, request *backendv1.UpdateHeldDevicesRequest) {
	r.held = len(request.GetClaims())
}

func (r *ruled) ObserveNode(_ context.Context, node *backendv1.GetInfoRequest) {
	r.node = node.GetNodeName() + " " + node.GetNodeLabels().GetLabels()["zone"]
}

// buffer is a log that tests read while the server writes.
type buffer struct {
	mutex sync.Mutex
	text  bytes.Buffer
}

func (b *buffer) Write(text []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.text.Write(text)
}

// lines returns the log lines with a message.
func (b *buffer) lines(t *testing.T, message string) []map[string]any {
	t.Helper()
	b.mutex.Lock()
	defer b.mutex.Unlock()
	var found []map[string]any
	for line := range bytes.Lines(b.text.Bytes()) {
		var fields map[string]any
		if err := json.Unmarshal(line, &fields); err != nil {
			t.Fatal(err)
		}
		if fields["msg"] == message {
			found = append(found, fields)
		}
	}
	return found
}

// server is a backend that serves in the background.
type server struct {
	*testing.T
	socket string
	probes string
	log    *buffer
	stop   context.CancelFunc
	ended  chan error
}

func serve(t *testing.T, driver Driver, stopTimeout time.Duration) *server {
	t.Helper()
	return serveAt(t, driver, "", stopTimeout)
}

// serveAt serves at a socket; by default, at a new one.
func serveAt(t *testing.T, driver Driver, socket string, stopTimeout time.Duration) *server {
	t.Helper()
	if socket == "" {
		// t.TempDir contains the test's name, and a socket's path is short.
		folder, err := os.MkdirTemp("", "backend")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(folder) })
		socket = filepath.Join(folder, "b.sock")
	}
	free, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	free.Close()
	ctx, stop := context.WithCancel(context.Background())
	s := &server{
		T: t, socket: socket, probes: "http://" + free.Addr().String(), log: &buffer{}, stop: stop,
		ended: make(chan error, 1),
	}
	go func() {
		s.ended <- Serve(ctx, driver, Options{
			Socket:      s.socket,
			Info:        &backendv1.GetInfoResponse{DriverName: "lamps.example.com", Version: "1.2.3"},
			Log:         slog.New(slog.NewJSONHandler(s.log, nil)),
			StopTimeout: stopTimeout,
			ProbePort:   free.Addr().(*net.TCPAddr).Port,
		})
		close(s.ended)
	}()
	// The variables of the package can change when the server has ended.
	t.Cleanup(func() { s.stop(); <-s.ended })
	return s
}

// get returns the response of a probe, as its status and body.
func (s *server) get(path string) string {
	s.Helper()
	response, err := http.Get(s.probes + path)
	if err != nil {
		return err.Error() // not served yet, or no longer
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		s.Fatal(err)
	}
	return fmt.Sprintf("%d %s", response.StatusCode, strings.TrimSpace(string(body)))
}

// expectProbe waits until a probe fails with this reason, or succeeds if it is empty. Only the log has the
// reason.
func (s *server) expectProbe(path, reason string) {
	s.Helper()
	eventually(s.T, func() string {
		switch got := s.get(path); got {
		case "200 ok":
			return "success"
		case "503 unhealthy", "503 not ready":
			lines := s.log.lines(s.T, "probe fails")
			last := lines[len(lines)-1]
			return fmt.Sprintf("failure of %s: %s", last["probe"], last["reason"])
		default:
			return got
		}
	}, map[bool]string{true: "success", false: fmt.Sprintf("failure of %s: %s", path, reason)}[reason == ""])
}

// expect waits for the response of a path.
func (s *server) expect(path, expected string) {
	s.Helper()
	eventually(s.T, func() string { return s.get(path) }, expected)
}

// eventually waits until a text contains another one.
func eventually(t *testing.T, read func() string, expected string) {
	t.Helper()
	got := read()
	for end := time.Now().Add(5 * time.Second); !strings.Contains(got, expected); got = read() {
		if time.Now().After(end) {
			t.Fatalf("got %q, expected %q", got, expected)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// shorten sets a duration of the package for the test.
func shorten(t *testing.T, duration *time.Duration, value time.Duration) {
	before := *duration
	*duration = value
	t.Cleanup(func() { *duration = before })
}

// end stops the server, and returns the result of Serve.
func (s *server) end() error {
	s.Helper()
	s.stop()
	select {
	case err := <-s.ended:
		return err
	case <-time.After(10 * time.Second):
		s.Fatal("the backend does not stop")
		return nil
	}
}

// client connects as a node plugin does.
func (s *server) client() backendv1.BackendClient {
	s.Helper()
	connection, err := grpc.NewClient("unix:"+s.socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { connection.Close() })
	return backendv1.NewBackendClient(connection)
}

func newLamps() *lamps { return &lamps{lists: make(chan []string)} }

func claim(uid string) *backendv1.Claim {
	return &backendv1.Claim{Namespace: "lab", Name: "claim-" + uid, Uid: uid}
}

func claims(uids ...string) []*backendv1.Claim {
	var all []*backendv1.Claim
	for _, uid := range uids {
		all = append(all, claim(uid))
	}
	return all
}

func watch(s *server) grpc.ServerStreamingClient[backendv1.WatchDevicesResponse] {
	s.Helper()
	stream, err := s.client().WatchDevices(s.Context(), &backendv1.WatchDevicesRequest{})
	if err != nil {
		s.Fatal(err)
	}
	return stream
}

func expectNames(
	s *server, stream grpc.ServerStreamingClient[backendv1.WatchDevicesResponse], expected ...string,
) {
	s.Helper()
	response, err := stream.Recv()
	if err != nil {
		s.Fatal(err)
	}
	names := []string{}
	for _, device := range response.GetDevices() {
		names = append(names, device.GetName())
	}
	if !slices.Equal(names, expected) {
		s.Errorf("got %v, expected %v", names, expected)
	}
}

func TestTwoNodePluginsGetEveryChangeAndNoRepetition(t *testing.T) {
	driver := newLamps()
	s := serve(t, driver, 0)
	first, second := watch(s), watch(s)
	driver.lists <- []string{"desk"}
	expectNames(s, first, "desk")
	expectNames(s, second, "desk")
	// The first is not sent again. Otherwise, it would be the next message.
	driver.lists <- []string{"desk"}
	time.Sleep(2 * minInterval)
	driver.lists <- []string{"desk", "wall"}
	expectNames(s, first, "desk", "wall")
	expectNames(s, second, "desk", "wall")
	// A node plugin that connects later gets the latest list.
	expectNames(s, watch(s), "desk", "wall")
	if err := s.end(); err != nil {
		t.Error(err)
	}
	for _, stream := range []grpc.ServerStreamingClient[backendv1.WatchDevicesResponse]{first, second} {
		if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
			t.Errorf("expected Unavailable, got %v", err)
		}
	}
}

func TestALoopOfChangesIsPaced(t *testing.T) {
	driver := newLamps()
	s := serve(t, driver, 0)
	stream := watch(s)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for number := range 2000 {
			driver.lists <- []string{fmt.Sprintf("lamp-%d", number)}
		}
	}()
	for received := 1; ; received++ {
		response, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if response.GetDevices()[0].GetName() != "lamp-1999" {
			continue
		}
		<-over
		if received > 500 {
			t.Errorf("%d messages", received)
		}
		return
	}
}

func TestOnlyChangesOfHealthAreSent(t *testing.T) {
	const healthy, unhealthy = backendv1.HealthStatus_HEALTH_STATUS_HEALTHY, backendv1.HealthStatus_HEALTH_STATUS_UNHEALTHY
	driver := &checked{newLamps(), make(chan map[string]backendv1.HealthStatus)}
	s := serve(t, driver, 0)
	stream, err := s.client().WatchHealth(t.Context(), &backendv1.WatchHealthRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		all     map[string]backendv1.HealthStatus
		changed []string
	}{
		{map[string]backendv1.HealthStatus{"desk": healthy, "wall": healthy}, []string{"desk", "wall"}},
		{map[string]backendv1.HealthStatus{"desk": healthy, "wall": unhealthy}, []string{"wall"}},
		{map[string]backendv1.HealthStatus{"roof": healthy, "wall": unhealthy}, []string{"roof"}},
	} {
		driver.health <- step.all
		response, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, device := range response.GetDevices() {
			names = append(names, device.GetName())
		}
		slices.Sort(names)
		if !slices.Equal(names, step.changed) {
			t.Errorf("got %v, expected %v", names, step.changed)
		}
	}
}

func TestOptionalMethodsAreUnimplementedWithoutTheirInterface(t *testing.T) {
	s := serve(t, newLamps(), 0)
	_, err := s.client().CheckClaims(t.Context(), &backendv1.CheckClaimsRequest{})
	if status.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
	stream, err := s.client().WatchHealth(t.Context(), &backendv1.WatchHealthRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
	_, err = s.client().ApplyPolicies(t.Context(), &backendv1.ApplyPoliciesRequest{})
	if status.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
	_, err = s.client().UpdateHeldDevices(t.Context(), &backendv1.UpdateHeldDevicesRequest{})
	if status.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
}

func TestTheLogHasTheStackOfAPanic(t *testing.T) {
	driver := newLamps()
	driver.prepare = func(context.Context, *backendv1.Claim) error { panic("no lamp") }
	s := serve(t, driver, 0)
	if _, err := s.client().PrepareClaims(t.Context(), &backendv1.PrepareClaimsRequest{Claims: claims("a")}); err != nil {
		t.Fatal(err)
	}
	for _, line := range s.log.lines(t, "the driver panicked") {
		if !strings.Contains(line["stack"].(string), "backend_test.go") {
			t.Error(line)
		}
	}
}

func TestABatchIsPreparedAtOnce(t *testing.T) {
	s := serve(t, &batch{newLamps()}, 0)
	response, err := s.client().PrepareClaims(t.Context(), &backendv1.PrepareClaimsRequest{Claims: claims("a", "b")})
	if err != nil {
		t.Fatal(err)
	}
	for number, uid := range []string{"a", "b"} {
		if got := response.GetClaims()[number]; got.GetUid() != uid || got.GetError() != "one of 2" {
			t.Error(got)
		}
	}
	_, err = s.client().PrepareClaims(t.Context(), &backendv1.PrepareClaimsRequest{Claims: claims("a", "panic")})
	if status.Code(err) != codes.Internal {
		t.Error(err)
	}
}

func TestDevicesWaitForPoliciesThatWereApplied(t *testing.T) {
	driver := &ruled{lamps: newLamps()}
	s := serve(t, driver, 0)
	client, stream := s.client(), watch(s)
	labels := &backendv1.NodeLabels{Labels: map[string]string{"zone": "a"}}
	if _, err := client.GetInfo(t.Context(), &backendv1.GetInfoRequest{NodeName: "node-1", NodeLabels: labels}); err != nil {
		t.Fatal(err)
	}
	if driver.node != "node-1 a" {
		t.Error(driver.node)
	}
	held := &backendv1.UpdateHeldDevicesRequest{Claims: []*backendv1.HeldClaim{{Uid: "a"}, {Uid: "b"}}}
	if _, err := client.UpdateHeldDevices(t.Context(), held); err != nil || driver.held != 2 {
		t.Errorf("%v, %d", err, driver.held)
	}
	for _, step := range []struct{ spec, failure string }{
		{"error", "the lamps are dark"},
		{"panic", "the driver panicked; see the log of the backend"},
		{"wrong", "spec is wrong"},
	} {
		policies := []*backendv1.Policy{{Name: "p", Spec: step.spec}}
		response, err := client.ApplyPolicies(t.Context(), &backendv1.ApplyPoliciesRequest{Policies: policies})
		if err != nil {
			t.Fatal(err)
		}
		got := response.GetError()
		for _, invalid := range response.GetInvalid() {
			got += invalid.GetProblem()
		}
		if got != step.failure {
			t.Errorf("%s: %q", step.spec, got)
		}
		select {
		case driver.lists <- []string{"desk"}:
			t.Errorf("%s: the driver lists devices without policies", step.spec)
		case <-time.After(20 * time.Millisecond):
		}
	}
	if _, err := client.ApplyPolicies(t.Context(), &backendv1.ApplyPoliciesRequest{}); err != nil {
		t.Fatal(err)
	}
	driver.lists <- []string{"desk"}
	expectNames(s, stream, "desk")
}

func TestTheLogNamesACallThatItsCallerLeft(t *testing.T) {
	driver := newLamps()
	begun, release := make(chan struct{}), make(chan struct{})
	driver.prepare = func(ctx context.Context, _ *backendv1.Claim) error {
		close(begun)
		<-release
		return ctx.Err()
	}
	s := serve(t, driver, 0)
	canceled, cancel := context.WithCancel(t.Context())
	returned := make(chan error, 1)
	go func() {
		_, err := s.client().PrepareClaims(canceled, &backendv1.PrepareClaimsRequest{Claims: claims("a")})
		returned <- err
	}()
	<-begun
	cancel()
	if err := <-returned; status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	eventually(t, func() string { return fmt.Sprint(s.log.lines(t, "caller no longer waits for a call that continues")) }, "WARN")
	close(release)
	// The caller's end did not reach the driver.
	eventually(t, func() string { return fmt.Sprint(len(s.log.lines(t, "prepare claim"))) }, "1")
}

func TestACallThatNeverReturnsMakesTheBackendNotAlive(t *testing.T) {
	shorten(t, &callTimeout, 20*time.Millisecond)
	shorten(t, &returnTimeout, 20*time.Millisecond)
	driver := newLamps()
	release := make(chan struct{})
	driver.prepare = func(ctx context.Context, _ *backendv1.Claim) error {
		<-ctx.Done() // the limit
		<-release
		return errors.New("the lamp did not answer")
	}
	s := serve(t, driver, 0)
	s.expectProbe("/livez", "")
	go s.client().PrepareClaims(t.Context(), &backendv1.PrepareClaimsRequest{Claims: claims("a")})
	s.expectProbe("/livez", "the driver has not returned from a call 20ms after its time limit")
	close(release)
	s.expectProbe("/livez", "")
}

func TestTheLogNamesTheRequest(t *testing.T) {
	driver := newLamps()
	driver.prepare = func(ctx context.Context, _ *backendv1.Claim) error {
		Logger(ctx).Info("switched on")
		return nil
	}
	s := serve(t, driver, 0)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "drakit-request-id", "k7f3")
	info, err := s.client().GetInfo(ctx, &backendv1.GetInfoRequest{NodeName: "node-1", PluginVersion: "0.1.0"})
	if err != nil || info.GetDriverName() != "lamps.example.com" || info.GetVersion() != "1.2.3" {
		t.Errorf("%v, %v", info, err)
	}
	if _, err := s.client().PrepareClaims(ctx, &backendv1.PrepareClaimsRequest{Claims: claims("a")}); err != nil {
		t.Fatal(err)
	}
	for message, fields := range map[string]map[string]any{
		"node plugin connected": {"node": "node-1", "plugin_version": "0.1.0"},
		"switched on":           {"claim": "lab/claim-a", "claim_uid": "a"},
		"prepare claim":         {"claim": "lab/claim-a", "claim_uid": "a"},
	} {
		found := s.log.lines(t, message)
		if len(found) != 1 {
			t.Fatalf("%s: %v", message, found)
		}
		fields["request_id"], fields["driver"] = "k7f3", "lamps.example.com"
		for key, value := range fields {
			if found[0][key] != value {
				t.Errorf("%s: %v", message, found[0])
			}
		}
	}
}

func TestAShutdownWaitsForCallsAndThenEndsTheStreams(t *testing.T) {
	for name, step := range map[string]struct {
		timeout  time.Duration
		returns  bool
		expected string
	}{
		"a call that returns": {10 * time.Second, true, "<nil>"},
		"a call that hangs":   {50 * time.Millisecond, false, "calls in progress did not return within 50ms"},
	} {
		t.Run(name, func(t *testing.T) {
			driver := newLamps()
			begun, release := make(chan struct{}), make(chan struct{})
			driver.prepare = func(context.Context, *backendv1.Claim) error {
				close(begun)
				<-release
				return nil
			}
			s := serve(t, driver, step.timeout)
			client := s.client()
			stream := watch(s)
			driver.lists <- []string{"desk"}
			expectNames(s, stream, "desk")
			returned, ended := make(chan error, 1), make(chan error, 1)
			go func() {
				_, err := client.PrepareClaims(t.Context(), &backendv1.PrepareClaimsRequest{Claims: claims("a")})
				returned <- err
			}()
			<-begun
			go func() {
				_, err := stream.Recv()
				ended <- err
			}()
			s.stop()
			if step.returns {
				// The node plugin finds the next process, and still uses this one.
				eventually(t, func() string { _, err := os.Lstat(s.socket); return fmt.Sprint(err) }, "no such file")
				s.expectProbe("/readyz", "the backend is stopping")
				select {
				case err := <-ended:
					t.Errorf("the stream ended before the call: %v", err)
				case <-time.After(50 * time.Millisecond):
				}
				if _, err := client.GetInfo(t.Context(), &backendv1.GetInfoRequest{}); err != nil {
					t.Error(err)
				}
				close(release)
			}
			if got := fmt.Sprint(s.end()); got != step.expected {
				t.Error(got)
			}
			if err := <-ended; status.Code(err) != codes.Unavailable {
				t.Error(err)
			}
			if err := <-returned; (err == nil) != step.returns {
				t.Error(err)
			}
			if !step.returns {
				close(release)
			}
		})
	}
}

func TestASocketThatACrashLeftIsReplaced(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "b.sock")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	left.Close()
	own, err := listen(path, 0o660, nil, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	found, err := os.Lstat(path)
	if err != nil || found.Mode() != fs.ModeSocket|0o660 {
		t.Errorf("%v, %v", found, err)
	}
	own.Close()
	own.Close()
	if left, _ := os.ReadDir(folder); len(left) > 0 {
		t.Errorf("%v are left", left)
	}
}

func TestASuccessorsSocketStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "b.sock")
	first, err := listen(path, 0o600, nil, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	second, err := listen(path, 0o600, nil, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	if _, err := net.Dial("unix", path); err != nil {
		t.Error(err)
	}
}

func TestOnlyTheNodePluginsUserCanConnect(t *testing.T) {
	own := uint32(os.Getuid())
	for name, step := range map[string]struct {
		peers    []uint32
		accepted bool
	}{"another user": {[]uint32{own + 1}, false}, "an allowed user": {[]uint32{own + 1, own}, true}} {
		t.Run(name, func(t *testing.T) {
			log := &buffer{}
			path := filepath.Join(t.TempDir(), "b.sock")
			socket, err := listen(path, 0o600, step.peers, slog.New(slog.NewJSONHandler(log, nil)))
			if err != nil {
				t.Fatal(err)
			}
			accepted := make(chan net.Conn)
			go func() {
				defer close(accepted)
				for {
					connection, err := socket.Accept()
					if err != nil {
						return
					}
					accepted <- connection
				}
			}()
			for range 3 { // a loop of refusals is logged once
				connection, err := net.Dial("unix", path)
				if err != nil {
					t.Fatal(err)
				}
				if step.accepted {
					(<-accepted).Close()
				}
				if _, err := connection.Read(make([]byte, 1)); err != io.EOF {
					t.Error(err)
				}
			}
			socket.Close()
			if _, open := <-accepted; open {
				t.Error("the connection was accepted")
			}
			lines := log.lines(t, "connection refused: add the user to Options.PeerUIDs if the node plugin runs as it")
			if step.accepted == (len(lines) == 1 && lines[0]["uid"] == float64(own)) {
				t.Error(lines)
			}
		})
	}
}

func TestTheModeOfNoOtherFileIsSet(t *testing.T) {
	folder := t.TempDir()
	victim, hidden := filepath.Join(folder, "victim"), filepath.Join(folder, ".b")
	for name, replace := range map[string]func() error{
		"a link": func() error { return os.Symlink(victim, hidden) },
		"a file": func() error { return os.Link(victim, hidden) },
		"another name of a socket": func() error {
			listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(folder, "older"), Net: "unix"})
			if err != nil {
				return err
			}
			t.Cleanup(func() { listener.Close() })
			victim = filepath.Join(folder, "older")
			return errors.Join(os.Chmod(victim, 0o600), os.Link(victim, hidden))
		},
	} {
		t.Run(name, func(t *testing.T) {
			victim = filepath.Join(folder, "victim")
			if err := errors.Join(os.WriteFile(victim, nil, 0o600), replace()); err != nil {
				t.Fatal(err)
			}
			defer os.Remove(hidden)
			if _, _, err := setMode(hidden, 0o666); err == nil || !strings.Contains(err.Error(), "was replaced") {
				t.Error(err)
			}
			if found, err := os.Stat(victim); err != nil || found.Mode().Perm() != 0o600 {
				t.Errorf("%v, %v", found.Mode(), err)
			}
		})
	}
}

func TestADeviceThatCannotBeSentIsRejectedAlone(t *testing.T) {
	const garbage = "\xff\xfe"
	attributes := map[string]*backendv1.Attribute{"serial": {Value: &backendv1.Attribute_String_{String_: garbage}}}
	odd := &backendv1.Device{Name: "odd", Attributes: attributes}
	list := &backendv1.WatchDevicesResponse{
		Devices: []*backendv1.Device{
			{Name: "desk"}, odd, {Name: garbage}, {Name: "large", Extra: strings.Repeat("x", maxSize)},
			{Name: "wall", Pool: "roof", Consumes: map[string]*backendv1.CounterAmounts{garbage: {}}},
		},
		CounterSets: []*backendv1.CounterSet{{Name: "card"}, {Name: "odd", Counters: map[string]string{"memory": garbage}}},
		Fallback:    &backendv1.Fallback{Devices: []*backendv1.Device{odd, {Name: "desk"}}},
		Withdrawn:   []string{"held", garbage},
		Rejected:    []*backendv1.RejectedDevice{{Device: "roof", Message: garbage}},
		Policies:    []*backendv1.PolicyOutcome{{Policy: "p", Conflicts: []*backendv1.PolicyConflict{{Device: garbage}}}},
	}
	driver := &checked{lamps: newLamps(), health: make(chan map[string]backendv1.HealthStatus)}
	published := &publisher{driver, list}
	s := serve(t, published, 0)
	for range 2 { // a second node plugin, and the driver's message is as before
		stream, err := s.client().WatchDevices(t.Context(), &backendv1.WatchDevicesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		problem := func(field string) string {
			return "the field " + field + " has text that is not UTF-8; this is a bug in the driver"
		}
		expected := &backendv1.WatchDevicesResponse{
			Devices:     []*backendv1.Device{{Name: "desk"}},
			CounterSets: []*backendv1.CounterSet{{Name: "card"}},
			Fallback:    &backendv1.Fallback{Devices: []*backendv1.Device{{Name: "desk"}}},
			Withdrawn:   []string{"held", "\uFFFD", "/odd", "/\uFFFD", "/large", "roof/wall"},
			Rejected: []*backendv1.RejectedDevice{
				{Device: "roof", Message: "\uFFFD"},
				{Device: "odd", Reason: "Invalid", Message: problem("attributes[serial].string")},
				{Device: "\uFFFD", Reason: "Invalid", Message: problem("name")},
				{Device: "large", Reason: "Invalid", Message: "it is larger than 64 KiB; this is a bug in the driver"},
				{Device: "roof/wall", Reason: "Invalid", Message: problem("consumes[\uFFFD]")},
				{Device: "odd", Reason: "Invalid", Message: problem("attributes[serial].string")},
				{Device: "odd", Reason: "Invalid", Message: "as a counter set, " + problem("counters[memory]")},
			},
			Policies: []*backendv1.PolicyOutcome{{Policy: "p", Conflicts: []*backendv1.PolicyConflict{{Device: "\uFFFD"}}}},
		}
		if !proto.Equal(got, expected) {
			t.Errorf("got %v,\nexpected %v", got, expected)
		}
	}
	if odd.GetAttributes()["serial"].GetString_() != garbage {
		t.Error("the driver's message has changed")
	}
	health, err := s.client().WatchHealth(t.Context(), &backendv1.WatchHealthRequest{})
	if err != nil {
		t.Fatal(err)
	}
	driver.health <- map[string]backendv1.HealthStatus{garbage: backendv1.HealthStatus_HEALTH_STATUS_HEALTHY}
	if got, err := health.Recv(); err != nil || got.GetDevices()[0].GetName() != "\uFFFD" {
		t.Errorf("%v, %v", got, err)
	}
	for _, driver := range []Driver{published, &batchOf{published}} {
		client := serve(t, driver, 0).client()
		response, err := client.PrepareClaims(t.Context(), &backendv1.PrepareClaimsRequest{Claims: claims("a", "text", "error")})
		if err != nil {
			t.Fatal(err)
		}
		for number, expected := range []string{
			"", "the driver returned text that is not UTF-8 in the field edits.env[SERIAL]; this is a bug in the driver", "lamp \uFFFD is broken",
		} {
			if got := response.GetClaims()[number].GetError(); got != expected {
				t.Errorf("%T: %q", driver, got)
			}
		}
	}
}

// publisher is a driver that publishes one list, and some text that is not UTF-8.
type publisher struct {
	*checked
	list *backendv1.WatchDevicesResponse
}

func (p *publisher) WatchDevices(ctx context.Context, publish func(*backendv1.WatchDevicesResponse)) error {
	publish(p.list)
	publish(p.list)
	<-ctx.Done()
	return nil
}

func (p *publisher) Prepare(_ context.Context, claim *backendv1.Claim) (*backendv1.PreparedClaim, error) {
	switch claim.GetUid() {
	case "text":
		return &backendv1.PreparedClaim{Edits: []*backendv1.Edits{{Env: map[string]string{"SERIAL": "\xff"}}}}, nil
	case "error":
		return nil, errors.New("lamp \xff is broken")
	}
	return &backendv1.PreparedClaim{}, nil
}

type batchOf struct{ *publisher }

func (b *batchOf) PrepareBatch(ctx context.Context, claims []*backendv1.Claim) []*backendv1.PreparedClaim {
	var results []*backendv1.PreparedClaim
	for _, claim := range claims {
		result, err := b.Prepare(ctx, claim)
		if err != nil {
			result = &backendv1.PreparedClaim{Error: err.Error()}
		}
		result.Uid = claim.GetUid()
		results = append(results, result)
	}
	return results
}

func TestInvalidOptionsAreRefused(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "f.sock")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, expected := range map[string]string{
		file:                                     "is not a socket",
		filepath.Join(folder, "b.socket"):        "does not find the socket",
		filepath.Join(folder, ".b.sock"):         "does not find the socket",
		"":                                       "does not find the socket",
		filepath.Join("/missing", "b.sock"):      "does the node plugin run here?",
		"/" + strings.Repeat("x", 103) + ".sock": "choose a shorter one",
	} {
		info := &backendv1.GetInfoResponse{DriverName: "lamps.example.com"}
		err := Serve(t.Context(), newLamps(), Options{Socket: path, Info: info})
		if err == nil || !strings.Contains(err.Error(), expected) {
			t.Errorf("%q: %v", path, err)
		}
	}
	err := Serve(t.Context(), newLamps(), Options{Socket: filepath.Join(folder, "b.sock")})
	if err == nil || !strings.Contains(err.Error(), "no DriverName") {
		t.Error(err)
	}
}

func TestPollEndsWithTheFirstError(t *testing.T) {
	calls := 0
	var published []int
	err := Poll(t.Context(), time.Millisecond, func() (int, error) {
		if calls++; calls == 3 {
			return 0, errUnreadable
		}
		return calls, nil
	}, func(found int) { published = append(published, found) })
	if !errors.Is(err, errUnreadable) || !slices.Equal(published, []int{1, 2}) {
		t.Errorf("%v, %v", err, published)
	}
}

func TestParametersAreReadStrictly(t *testing.T) {
	for parameters, expected := range map[string]string{
		``:                               "white 50",
		`{}`:                             "white 50",
		`{"color": "green"}`:             "green 50",
		`{"level": 3, "at": {"x": 1}}`:   "white 3",
		`{"color": 3}`:                   "the parameter color is of type number, but must be of type string",
		`{"level": "3"}`:                 "the parameter level is of type string, but must be of type int",
		`{"at": {"x": "1"}}`:             "the parameter at.x is of type string, but must be of type int",
		`{"at": {"y": 1}}`:               `there is no parameter "at.y": choose from x`,
		`{"at": {"X": 1}}`:               `there is no parameter "at.X": choose from x`,
		`{"at": {"x": null}}`:            "the parameter at.x is null: omit it, or give it a value",
		`{"at": null}`:                   "the parameter at is null: omit it, or give it a value",
		`{"list": [{"x": 1}, {"X": 1}]}`: `there is no parameter "list[1].X": choose from x`,
		`{"list": [null]}`:               "the parameter list[0] is null: omit it, or give it a value",
		`{"map": {"A": {"X": 1}}}`:       `there is no parameter "map.A.X": choose from x`,
		`{"map": {"A": {"x": 1}}, "free": {"X": 1}}`: "white 50",
		`{"color": null}`:              "the parameter color is null: omit it, or give it a value",
		`{"Color": "red"}`:             `there is no parameter "Color": choose from color, level, at, list, map, free, named, z`,
		`{"b": 1, "a": 1, "color": 1}`: `there is no parameter "a": choose from color, level, at, list, map, free, named, z`,
		`{"named": {"y": 1}, "z": 1}`:  "white 50",
		`{"y": 1}`:                     `there is no parameter "y": choose from color, level, at, list, map, free, named, z`,
		`{"named": {"z": 1}}`:          `there is no parameter "named.z": choose from y`,
		`null`:                         "the parameters are not a JSON object",
		`["red"]`:                      "the parameters are not a JSON object",
		`{"color": "red"}}`:            "the parameters are not a JSON object",
	} {
		type position struct {
			X int `json:"x"`
		}
		type Named struct {
			Y int `json:"y"`
		}
		type Inlined struct {
			Z int `json:"z"`
		}
		target := struct {
			Color string               `json:"color"`
			Level int                  `json:"level,omitempty"`
			At    position             `json:"at"`
			List  []*position          `json:"list"`
			Map   map[string]*position `json:"map"`
			Free  json.RawMessage      `json:"free"`
			Cache string               `json:"-"`
			own   string
			Named `json:"named"`
			Inlined
		}{Color: "white", Level: 50}
		got := fmt.Sprintf("%s %d", target.Color, target.Level)
		if err := DecodeParameters(parameters, &target); err != nil {
			got = err.Error()
		} else {
			got = fmt.Sprintf("%s %d", target.Color, target.Level)
		}
		if got != expected {
			t.Errorf("%s: got %q, expected %q", parameters, got, expected)
		}
		_ = target.own
	}
}
