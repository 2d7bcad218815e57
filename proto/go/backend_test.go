package backend

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
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
	log    *buffer
	stop   context.CancelFunc
	ended  chan error
}

func serve(t *testing.T, driver Driver, stopTimeout time.Duration) *server {
	t.Helper()
	// t.TempDir contains the test's name, and a socket's path is short.
	folder, err := os.MkdirTemp("", "backend")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	ctx, stop := context.WithCancel(context.Background())
	s := &server{
		T: t, socket: filepath.Join(folder, "b.sock"), log: &buffer{}, stop: stop, ended: make(chan error, 1),
	}
	go func() {
		s.ended <- Serve(ctx, driver, Options{
			Socket:      s.socket,
			Info:        &backendv1.GetInfoResponse{DriverName: "lamps.example.com", Version: "1.2.3"},
			Log:         slog.New(slog.NewJSONHandler(s.log, nil)),
			StopTimeout: stopTimeout,
		})
	}()
	t.Cleanup(stop)
	return s
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

func TestDevicesThatCannotBeReadEndTheStreamsUntilTheyCan(t *testing.T) {
	driver := newLamps()
	s := serve(t, driver, 0)
	stream := watch(s)
	driver.lists <- []string{"desk"}
	expectNames(s, stream, "desk")
	driver.lists <- nil
	_, err := stream.Recv()
	if status.Code(err) != codes.Unavailable || status.Convert(err).Message() != errUnreadable.Error() {
		t.Errorf("got %v", err)
	}
	driver.lists <- []string{"desk"}
	time.Sleep(minInterval)
	expectNames(s, watch(s), "desk")
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

func TestAClaimFailsAlone(t *testing.T) {
	driver := newLamps()
	driver.prepare = func(_ context.Context, claim *backendv1.Claim) error {
		switch claim.GetUid() {
		case "broken":
			return errors.New("the lamp is broken; replace it")
		case "silent":
			return errors.New("")
		case "panic":
			panic(claim)
		}
		return nil
	}
	driver.undo = func(claim *backendv1.Claim) error { return driver.prepare(nil, claim) }
	s := serve(t, driver, 0)
	expected := map[string]string{
		"a": "", "broken": "the lamp is broken; replace it", "b": "",
		"silent": "the driver returned an error of type *errors.errorString without a message",
		"panic":  "the driver panicked; see the log of the backend",
	}
	all := claims("a", "broken", "silent", "panic", "b")
	for range 2 {
		prepared, err := s.client().PrepareClaims(t.Context(), &backendv1.PrepareClaimsRequest{Claims: all})
		if err != nil {
			t.Fatal(err)
		}
		for number, result := range prepared.GetClaims() {
			uid := all[number].GetUid()
			if result.GetUid() != uid || result.GetError() != expected[uid] {
				t.Errorf("%s: %v", uid, result)
			}
			if failed := result.GetError() != ""; failed == (len(result.GetEdits()) == 1) {
				t.Errorf("%s: %v", uid, result)
			}
		}
		unprepared, err := s.client().UnprepareClaims(t.Context(), &backendv1.UnprepareClaimsRequest{Claims: all})
		if err != nil {
			t.Fatal(err)
		}
		for number, result := range unprepared.GetClaims() {
			if uid := all[number].GetUid(); result.GetUid() != uid || result.GetError() != expected[uid] {
				t.Errorf("%s: %v", uid, result)
			}
		}
	}
	for _, line := range s.log.lines(t, "the driver panicked") {
		if !strings.Contains(line["stack"].(string), "backend_test.go") {
			t.Error(line)
		}
	}
}

func TestAReleaseThatIsPendingLetsThePodTerminate(t *testing.T) {
	driver := newLamps()
	driver.undo = func(claim *backendv1.Claim) error {
		if claim.GetUid() == "erasing" {
			return fmt.Errorf("the memory is being erased: %w", ErrReleasePending)
		}
		return errors.New("the lamp is broken; replace it")
	}
	response, err := serve(t, driver, 0).client().UnprepareClaims(t.Context(),
		&backendv1.UnprepareClaimsRequest{Claims: claims("erasing", "broken")})
	if err != nil {
		t.Fatal(err)
	}
	erasing, broken := response.GetClaims()[0], response.GetClaims()[1]
	if !erasing.GetPending() || erasing.GetError() != "the memory is being erased: the release is pending" {
		t.Error(erasing)
	}
	if broken.GetPending() || broken.GetError() == "" {
		t.Error(broken)
	}
}

func TestACheckThatFailsIsNotPrepared(t *testing.T) {
	s := serve(t, &checked{lamps: newLamps()}, 0)
	response, err := s.client().CheckClaims(t.Context(),
		&backendv1.CheckClaimsRequest{Claims: claims("held", "free", "odd")})
	if err != nil {
		t.Fatal(err)
	}
	var prepared []bool
	for _, result := range response.GetClaims() {
		prepared = append(prepared, result.GetPrepared())
	}
	if !slices.Equal(prepared, []bool{true, false, false}) {
		t.Error(prepared)
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

func TestTheNextCallForAClaimWaitsForACanceledCall(t *testing.T) {
	driver := newLamps()
	begun, release := make(chan struct{}), make(chan struct{})
	var events []string
	driver.prepare = func(ctx context.Context, claim *backendv1.Claim) error {
		if claim.GetUid() == "a" {
			close(begun)
			<-release
			events = append(events, "prepared")
		}
		return ctx.Err()
	}
	driver.undo = func(*backendv1.Claim) error { events = append(events, "unprepared"); return nil }
	s := serve(t, driver, 0)
	client := s.client()
	canceled, cancel := context.WithCancel(t.Context())
	returned := make(chan error, 1)
	go func() {
		_, err := client.PrepareClaims(canceled, &backendv1.PrepareClaimsRequest{Claims: claims("a")})
		returned <- err
	}()
	<-begun
	cancel()
	if err := <-returned; status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	// A call that ends while it waits does nothing.
	short, done := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer done()
	if _, err := client.UnprepareClaims(short, &backendv1.UnprepareClaimsRequest{Claims: claims("a")}); err == nil {
		t.Error("it did not wait")
	}
	// Another node plugin calls, and other claims do not wait.
	go func() {
		_, err := s.client().UnprepareClaims(t.Context(), &backendv1.UnprepareClaimsRequest{Claims: claims("a")})
		returned <- err
	}()
	other, err := client.PrepareClaims(t.Context(), &backendv1.PrepareClaimsRequest{Claims: claims("b")})
	if err != nil || other.GetClaims()[0].GetError() != "" {
		t.Errorf("%v, %v", other, err)
	}
	select {
	case err := <-returned:
		t.Errorf("it did not wait: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	close(release)
	if err := <-returned; err != nil {
		t.Error(err)
	}
	if expected := []string{"prepared", "unprepared"}; !slices.Equal(events, expected) {
		t.Error(events)
	}
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

func TestAShutdownWaitsForCallsButNotForever(t *testing.T) {
	for name, step := range map[string]struct {
		timeout  time.Duration
		work     time.Duration
		expected string
	}{
		"a call that returns": {10 * time.Second, 50 * time.Millisecond, ""},
		"a call that hangs":   {50 * time.Millisecond, time.Minute, "calls in progress did not return within 50ms"},
	} {
		t.Run(name, func(t *testing.T) {
			driver := newLamps()
			begun := make(chan struct{})
			driver.prepare = func(context.Context, *backendv1.Claim) error {
				close(begun)
				time.Sleep(step.work)
				return nil
			}
			s := serve(t, driver, step.timeout)
			returned := make(chan error, 1)
			go func() {
				_, err := s.client().PrepareClaims(t.Context(), &backendv1.PrepareClaimsRequest{Claims: claims("a")})
				returned <- err
			}()
			<-begun
			text := ""
			if err := s.end(); err != nil {
				text = err.Error()
			}
			if text != step.expected {
				t.Error(text)
			}
			if err := <-returned; (err == nil) != (step.expected == "") {
				t.Error(err)
			}
			if _, err := os.Lstat(s.socket); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the socket is still there: %v", err)
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
	own, err := listen(path, 0o660)
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
	first, err := listen(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	second, err := listen(path, 0o600)
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
		``:                              "white 50",
		`{}`:                            "white 50",
		`{"colour": "green"}`:           "green 50",
		`{"level": 3, "at": {"x": 1}}`:  "white 3",
		`{"colour": 3}`:                 "the parameter colour is of type number, but must be of type string",
		`{"level": "3"}`:                "the parameter level is of type string, but must be of type int",
		`{"at": {"x": "1"}}`:            "the parameter at.x is of type string, but must be of type int",
		`{"at": {"y": 1}}`:              `the parameters are invalid: unknown field "y"`,
		`{"colour": null}`:              "the parameter colour is null: omit it, or give it a value",
		`{"Colour": "red"}`:             `there is no parameter "Colour": choose from colour, level, at`,
		`{"b": 1, "a": 1, "colour": 1}`: `there is no parameter "a": choose from colour, level, at`,
		`null`:                          "the parameters are not a JSON object",
		`["red"]`:                       "the parameters are not a JSON object",
		`{"colour": "red"}}`:            "the parameters are not a JSON object",
	} {
		target := struct {
			Colour string `json:"colour"`
			Level  int    `json:"level,omitempty"`
			At     struct {
				X int `json:"x"`
			} `json:"at"`
			Cache string `json:"-"`
			own   string
		}{Colour: "white", Level: 50}
		got := fmt.Sprintf("%s %d", target.Colour, target.Level)
		if err := DecodeParameters(parameters, &target); err != nil {
			got = err.Error()
		} else {
			got = fmt.Sprintf("%s %d", target.Colour, target.Level)
		}
		if got != expected {
			t.Errorf("%s: got %q, expected %q", parameters, got, expected)
		}
		_ = target.own
	}
}
