package main

import (
	"context"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "drakit.dev/backend/v1"
)

// node is a node with a backend on it, that can be stopped and started again.
type node struct {
	*testing.T
	options options
}

func newNode(t *testing.T, blinkers ...string) *node {
	t.Helper()
	// t.TempDir has the test's name in it, and a socket's path is short.
	root, err := os.MkdirTemp("", "blinkers")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	n := &node{T: t, options: options{
		driver:     "blinkers.example.com",
		socket:     filepath.Join(root, "b.sock"),
		blinkers:   filepath.Join(root, "blinkers"),
		state:      filepath.Join(root, "state"),
		socketMode: 0o600,
		poll:       time.Millisecond,
	}}
	if err := os.Mkdir(n.options.blinkers, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range blinkers {
		n.write(name, "")
	}
	return n
}

func (n *node) write(blinker, content string) {
	n.Helper()
	if err := os.WriteFile(filepath.Join(n.options.blinkers, blinker), []byte(content), 0o644); err != nil {
		n.Fatal(err)
	}
}

// start runs the backend, and returns a client and a function that stops the backend.
func (n *node) start() (pb.BackendClient, func()) {
	n.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, n.options, slog.New(slog.NewJSONHandler(io.Discard, nil))) }()
	connection, err := grpc.NewClient("unix:"+n.options.socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		n.Fatal(err)
	}
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				n.Errorf("the backend ended with an error: %v", err)
			}
		case <-time.After(10 * time.Second):
			n.Error("the backend does not stop")
		}
		connection.Close()
	}
	n.Cleanup(stop)
	return pb.NewBackendClient(connection), stop
}

// service returns a service for direct calls, without a socket.
func (n *node) service() *service {
	n.Helper()
	blinkers, err := openBlinkers(n.options.blinkers, n.options.state)
	if err != nil {
		n.Fatal(err)
	}
	return &service{blinkers: blinkers, log: slog.New(slog.NewJSONHandler(io.Discard, nil))}
}

func (n *node) held() []string {
	n.Helper()
	entries, err := os.ReadDir(n.options.state)
	if err != nil {
		n.Fatal(err)
	}
	names := []string{}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func claim(uid, parameters string, blinkers ...string) *pb.Claim {
	made := &pb.Claim{Namespace: "lab", Name: "claim-" + uid, Uid: uid}
	for _, name := range blinkers {
		made.Devices = append(made.Devices,
			&pb.AllocatedDevice{Name: name, Request: "main/light", Parameters: parameters})
	}
	return made
}

func prepare(n *node, client pb.BackendClient, claims ...*pb.Claim) []*pb.PreparedClaim {
	n.Helper()
	response, err := client.PrepareClaims(n.Context(), &pb.PrepareClaimsRequest{Claims: claims})
	if err != nil {
		n.Fatal(err)
	}
	return response.GetClaims()
}

func unprepare(n *node, client pb.BackendClient, claim *pb.Claim) {
	n.Helper()
	response, err := client.UnprepareClaims(n.Context(),
		&pb.UnprepareClaimsRequest{Claims: []*pb.Claim{claim}})
	if err != nil {
		n.Fatal(err)
	}
	if failure := response.GetClaims()[0].GetError(); failure != "" {
		n.Error(failure)
	}
}

func isPrepared(n *node, client pb.BackendClient, claim *pb.Claim) bool {
	n.Helper()
	response, err := client.CheckClaims(n.Context(), &pb.CheckClaimsRequest{Claims: []*pb.Claim{claim}})
	if err != nil {
		n.Fatal(err)
	}
	return response.GetClaims()[0].GetPrepared()
}

func TestFilesThatComeAndGoAreDevices(t *testing.T) {
	n := newNode(t, "desk", "Not-A-Label", ".hidden")
	client, _ := n.start()
	stream, err := client.WatchDevices(t.Context(), &pb.WatchDevicesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	next := func() []string {
		t.Helper()
		response, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		names := []string{}
		for _, device := range response.GetDevices() {
			names = append(names, device.GetName())
		}
		return names
	}
	if got := next(); !slices.Equal(got, []string{"desk"}) {
		t.Error(got)
	}
	n.write("wall", "")
	if got := next(); !slices.Equal(got, []string{"desk", "wall"}) {
		t.Error(got)
	}
	os.Remove(filepath.Join(n.options.blinkers, "desk"))
	if got := next(); !slices.Equal(got, []string{"wall"}) {
		t.Error(got)
	}
	// All of it in one moment.
	os.Rename(n.options.blinkers, n.options.blinkers+".away")
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("without its directory the stream ends, but: %v", err)
	}
}

func TestABrokenBlinkerIsUnhealthyUntilItIsRepaired(t *testing.T) {
	n := newNode(t, "desk")
	n.write("desk", "broken since Monday")
	client, _ := n.start()
	stream, err := client.WatchHealth(t.Context(), &pb.WatchHealthRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, expected := range []pb.HealthStatus{
		pb.HealthStatus_HEALTH_STATUS_UNHEALTHY, pb.HealthStatus_HEALTH_STATUS_HEALTHY,
	} {
		response, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if got := response.GetDevices()[0].GetHealth().GetStatus(); got != expected {
			t.Errorf("got %s, expected %s", got, expected)
		}
		n.write("desk", "")
	}
}

func TestAClaimGetsItsBlinkersAndGivesThemBack(t *testing.T) {
	n := newNode(t, "desk", "wall")
	client, _ := n.start()
	red := claim("a", `{"colour": "red"}`, "desk", "wall")
	for range 2 {
		edits := prepare(n, client, red)[0].GetEdits()
		if len(edits) != 2 {
			t.Fatalf("edits of two devices, not %v", edits)
		}
		env := edits[0].GetEnv()
		if env["BLINKER_MAIN_LIGHT__DESK"] != "/blinkers/desk" ||
			env["BLINKER_COLOUR_MAIN_LIGHT__DESK"] != "red" {
			t.Error(env)
		}
		if got := edits[1].GetMounts()[0].GetHostPath(); got != filepath.Join(n.options.blinkers, "wall") {
			t.Error(got)
		}
		if !isPrepared(n, client, red) {
			t.Error("it is not prepared")
		}
	}
	if isPrepared(n, client, claim("a", `{"colour": "green"}`, "desk")) {
		t.Error("red counts as green")
	}
	// By then the blinkers may be gone.
	os.RemoveAll(n.options.blinkers)
	for range 2 {
		unprepare(n, client, red)
		if held := n.held(); len(held) > 0 {
			t.Errorf("%v are still held", held)
		}
	}
}

func TestACallWaitsForTheOneBeforeForItsClaim(t *testing.T) {
	n := newNode(t, "desk", "wall")
	s := n.service()
	unlock, err := s.locks.lock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := s.UnprepareClaims(t.Context(),
			&pb.UnprepareClaimsRequest{Claims: []*pb.Claim{claim("a", "", "desk")}})
		answered <- err
	}()
	other, err := s.PrepareClaims(t.Context(),
		&pb.PrepareClaimsRequest{Claims: []*pb.Claim{claim("b", "", "wall")}})
	if err != nil || other.GetClaims()[0].GetError() != "" {
		t.Errorf("another claim: %v, %v", other, err)
	}
	// Simulate the effect of a PrepareClaims call that is still in flight.
	if err := s.blinkers.take("desk", holding{ClaimUID: "a"}); err != nil {
		t.Error(err)
	}
	select {
	case <-answered:
		t.Error("it did not wait")
	case <-time.After(20 * time.Millisecond):
	}
	unlock()
	if err := <-answered; err != nil {
		t.Error(err)
	}
	if held := n.held(); !slices.Equal(held, []string{"wall"}) {
		t.Errorf("%v are held", held)
	}
}

func TestACallThatHasEndedBeginsNothing(t *testing.T) {
	n := newNode(t, "desk")
	s := n.service()
	over, end := context.WithCancel(t.Context())
	unlock, err := s.locks.lock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := s.PrepareClaims(over,
			&pb.PrepareClaimsRequest{Claims: []*pb.Claim{claim("a", "", "desk")}})
		answered <- err
	}()
	end()
	if err := <-answered; status.Code(err) != codes.Canceled {
		t.Errorf("expected Canceled, got %v", err)
	}
	unlock()
	if _, err := s.PrepareClaims(over,
		&pb.PrepareClaimsRequest{Claims: []*pb.Claim{claim("a", "", "desk")}}); err == nil {
		t.Error("it was prepared")
	}
	if held := n.held(); len(held) > 0 {
		t.Errorf("%v are held", held)
	}
}

func TestEachClaimHasAResultOfItsOwn(t *testing.T) {
	n := newNode(t, "desk", "wall")
	client, _ := n.start()
	results := prepare(n, client,
		claim("a", "", "desk"), claim("b", "", "desk"), claim("c", "", "roof"), claim("d", "{}", "wall"),
		claim("e", "", "../state/desk"))
	for number, expected := range []string{
		"",
		"request main/light, blinker desk: it still blinks for claim lab/claim-a; " +
			"delete the pod that uses that claim",
		"request main/light, blinker roof: it no longer exists; create its file again",
		"",
		"request main/light, blinker ../state/desk: it no longer exists; create its file again",
	} {
		if got := results[number].GetError(); got != expected {
			t.Errorf("claim %s: got %q, expected %q", results[number].GetUid(), got, expected)
		}
	}
}

func TestWhoOnlyLooksTakesNothing(t *testing.T) {
	n := newNode(t, "desk")
	client, _ := n.start()
	prepare(n, client, claim("a", `{"colour": "red"}`, "desk"))
	admin := claim("b", "", "desk")
	admin.Devices[0].AdminAccess = true

	result := prepare(n, client, admin)[0]

	if result.GetError() != "" || len(result.GetEdits()[0].GetMounts()[0].GetOptions()) > 0 {
		t.Errorf("not mounted read-only: %v", result)
	}
	unprepare(n, client, admin)
	if !isPrepared(n, client, claim("a", `{"colour": "red"}`, "desk")) {
		t.Error("its holder has lost it")
	}
}

func TestACrashLosesNothingAndARebootIsNoticed(t *testing.T) {
	n := newNode(t, "desk")
	client, stop := n.start()
	held := claim("a", `{"colour": "green"}`, "desk")
	prepare(n, client, held)
	stop()
	client, stop = n.start()
	if !isPrepared(n, client, held) {
		t.Error("the claim was lost with the process")
	}
	if failure := prepare(n, client, claim("b", "", "desk"))[0].GetError(); failure == "" {
		t.Error("another claim got the blinker")
	}
	stop()
	os.RemoveAll(n.options.state)
	client, _ = n.start()
	if isPrepared(n, client, held) {
		t.Error("nothing blinks after a reboot, but the claim counts as in order")
	}
	if failure := prepare(n, client, held)[0].GetError(); failure != "" || !isPrepared(n, client, held) {
		t.Errorf("it cannot be prepared again: %s", failure)
	}
}

func TestTheSameCauseGivesTheSameText(t *testing.T) {
	n := newNode(t, "desk")
	client, _ := n.start()
	if _, err := client.GetInfo(t.Context(), &pb.GetInfoRequest{}); err != nil {
		t.Fatal(err)
	}
	os.Remove(n.options.state)
	expected := "request main/light, blinker desk: cannot write to " + n.options.state +
		": no such file or directory"
	for range 2 {
		if got := prepare(n, client, claim("a", "", "desk"))[0].GetError(); got != expected {
			t.Errorf("got %q, expected %q", got, expected)
		}
	}
}

func TestParametersAreReadStrictly(t *testing.T) {
	for parameters, expected := range map[string]string{
		``:                              "white",
		`{}`:                            "white",
		`{"colour": "green"}`:           "green",
		`{"colour": "blue"}`:            `colour is "blue": choose one of white, red, green`,
		`{"colour": null}`:              `colour is null: choose one of white, red, green`,
		`{"colour": ["red"]}`:           `colour is ["red"]: choose one of white, red, green`,
		`{"Colour": "red"}`:             `there is no parameter "Colour": the only one is "colour"`,
		`{"colour": "red", "speed": 1}`: `there is no parameter "speed": the only one is "colour"`,
		`{"b": 1, "a": 1, "c": 1}`:      `there is no parameter "a": the only one is "colour"`,
		`null`:                          `the parameters are not a JSON object: write {"colour": "red"}`,
		`["red"]`:                       `the parameters are not a JSON object: write {"colour": "red"}`,
		`{"colour": "red"}}`:            `the parameters are not a JSON object: write {"colour": "red"}`,
	} {
		got, err := colour(parameters)
		if err != nil {
			got = err.Error()
		}
		if got != expected {
			t.Errorf("%s: got %q, expected %q", parameters, got, expected)
		}
	}
}

func TestASocketThatACrashLeftIsReplaced(t *testing.T) {
	n := newNode(t)
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: n.options.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	left.Close()

	client, stop := n.start()

	// The client might have connected to the old socket first. It retries after a second.
	if _, err := client.GetInfo(t.Context(), &pb.GetInfoRequest{}); err != nil {
		t.Fatal(err)
	}
	found, err := os.Stat(n.options.socket)
	if err != nil || found.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("%v, %v", found, err)
	}
	stop()
	entries, _ := filepath.Glob(filepath.Join(filepath.Dir(n.options.socket), "*.sock"))
	hidden, _ := filepath.Glob(filepath.Join(filepath.Dir(n.options.socket), ".*"))
	if left := append(entries, hidden...); len(left) > 0 {
		t.Errorf("%v are left", left)
	}
}

func TestASuccessorsSocketStays(t *testing.T) {
	n := newNode(t)
	first, err := listen(n.options.socket, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	second, err := listen(n.options.socket, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(n.options.socket); err != nil {
		t.Error("the first has removed what was the second's")
	}
}

func TestPlacesThatAreNoneAreRefused(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "f.sock")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, expected := range map[string]string{
		file: "is not a socket",
		filepath.Join(folder, strings.Repeat("x", 108)):   "choose a shorter -socket",
		filepath.Join("/tmp", "missing-folder", "x.sock"): "does the node plugin run here?",
	} {
		if _, err := listen(path, 0o600); err == nil || !strings.Contains(err.Error(), expected) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestStreamsEndWhenTheBackendStops(t *testing.T) {
	n := newNode(t, "desk")
	client, stop := n.start()
	stream, err := client.WatchDevices(t.Context(), &pb.WatchDevicesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	stop()
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("expected Unavailable, got %v", err)
	}
}

func TestBadArgumentsAreRefused(t *testing.T) {
	for _, arguments := range [][]string{
		{"-poll", "0s"}, {"-blinkers", "relative"}, {"-socket-mode", "01777"}, {"extra"}, {"-unknown"},
	} {
		if _, err := parse(arguments, io.Discard); err == nil {
			t.Errorf("%v was taken", arguments)
		}
	}
	if chosen, err := parse([]string{"-socket-mode", "0660"}, io.Discard); err != nil || chosen.socketMode != 0o660 {
		t.Errorf("%+v, %v", chosen, err)
	}
}
