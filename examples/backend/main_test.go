package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	backendv1 "drakit.dev/backend/v1"
)

// newBlinkers returns the driver of a node with blinkers.
func newBlinkers(t *testing.T, names ...string) *blinkers {
	t.Helper()
	b := &blinkers{directory: filepath.Join(t.TempDir(), "blinkers"), state: t.TempDir(), poll: time.Millisecond}
	if err := os.Mkdir(b.directory, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		write(t, b, name, "")
	}
	return b
}

func write(t *testing.T, b *blinkers, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(b.directory, name), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func held(t *testing.T, b *blinkers) []string {
	t.Helper()
	entries, err := os.ReadDir(b.state)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func claim(uid, parameters string, names ...string) *backendv1.Claim {
	made := &backendv1.Claim{Namespace: "lab", Name: "claim-" + uid, Uid: uid}
	for _, name := range names {
		made.Devices = append(made.Devices,
			&backendv1.AllocatedDevice{Name: name, Request: "main/light", Parameters: parameters})
	}
	return made
}

// prepare prepares a claim, and returns the error as a string.
func prepare(t *testing.T, b *blinkers, claim *backendv1.Claim) ([]*backendv1.Edits, string) {
	t.Helper()
	prepared, err := b.Prepare(t.Context(), claim)
	if err != nil {
		return nil, err.Error()
	}
	return prepared.GetEdits(), ""
}

func isPrepared(t *testing.T, b *blinkers, claim *backendv1.Claim) bool {
	t.Helper()
	prepared, err := b.Check(t.Context(), claim)
	return prepared && err == nil
}

func TestFilesThatComeAndGoAreDevices(t *testing.T) {
	b := newBlinkers(t, "desk", "Not-A-Label", ".hidden")
	found := make(chan string)
	ended := make(chan error, 1)
	go func() {
		last := ""
		ended <- b.WatchDevices(t.Context(), func(all *backendv1.WatchDevicesResponse) {
			var names []string
			for _, device := range all.GetDevices() {
				names = append(names, device.GetName())
			}
			if text := strings.Join(names, " "); text != last {
				last = text
				found <- text
			}
		})
	}()
	next := func(expected string) {
		t.Helper()
		if got := <-found; got != expected {
			t.Errorf("got %q, expected %q", got, expected)
		}
	}
	next("desk")
	write(t, b, "wall", "")
	next("desk wall")
	os.Remove(filepath.Join(b.directory, "desk"))
	next("wall")
	// All of it in one moment.
	os.Rename(b.directory, b.directory+".away")
	if err := <-ended; !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without its directory the watch ends, but: %v", err)
	}
}

func TestABrokenBlinkerIsUnhealthy(t *testing.T) {
	b := newBlinkers(t, "desk")
	write(t, b, "wall", "broken since Monday")
	for name, expected := range map[string]backendv1.HealthStatus{
		"desk": backendv1.HealthStatus_HEALTH_STATUS_HEALTHY,
		"wall": backendv1.HealthStatus_HEALTH_STATUS_UNHEALTHY,
		"roof": backendv1.HealthStatus_HEALTH_STATUS_UNSPECIFIED,
	} {
		if got := b.health(name); got.GetStatus() != expected {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestAClaimGetsItsBlinkersAndGivesThemBack(t *testing.T) {
	b := newBlinkers(t, "desk", "wall")
	red := claim("a", `{"color": "red"}`, "desk", "wall")
	for range 2 {
		edits, failure := prepare(t, b, red)
		if failure != "" || len(edits) != 2 {
			t.Fatalf("%s: %v", failure, edits)
		}
		env := edits[0].GetEnv()
		if env["BLINKER_MAIN_LIGHT__DESK"] != "/blinkers/desk" || env["BLINKER_COLOR_MAIN_LIGHT__DESK"] != "red" {
			t.Error(env)
		}
		if got := edits[1].GetMounts()[0].GetHostPath(); got != filepath.Join(b.directory, "wall") {
			t.Error(got)
		}
		if !isPrepared(t, b, red) {
			t.Error("it is not prepared")
		}
	}
	if isPrepared(t, b, claim("a", `{"color": "green"}`, "desk")) {
		t.Error("red counts as green")
	}
	// By then the blinkers may be gone.
	os.RemoveAll(b.directory)
	for range 2 {
		if err := b.Unprepare(t.Context(), red); err != nil {
			t.Error(err)
		}
		if left := held(t, b); len(left) > 0 {
			t.Errorf("%v are still held", left)
		}
	}
}

func TestErrorsNameTheBlinkerAndTheRemedy(t *testing.T) {
	b := newBlinkers(t, "desk", "wall")
	for _, step := range []struct {
		claim    *backendv1.Claim
		expected string
	}{
		{claim("a", "", "desk"), ""},
		{claim("b", "", "desk"), "blinker desk still blinks for another claim (a lab/claim-a white); delete its pod"},
		{claim("c", "", "roof"), "request main/light, blinker roof: it no longer exists; create its file again"},
		{claim("d", "{}", "wall"), ""},
		{claim("e", "", "../state/desk"),
			"request main/light, blinker ../state/desk: it no longer exists; create its file again"},
		{claim("f", `{"color": "blue"}`, "wall"),
			`request main/light, blinker wall: color is "blue": choose one of white, red, green`},
		{claim("g", `{"shade": "red"}`, "wall"),
			`request main/light, blinker wall: there is no parameter "shade": choose from color`},
	} {
		for range 2 {
			if _, got := prepare(t, b, step.claim); got != step.expected {
				t.Errorf("claim %s: got %q, expected %q", step.claim.GetUid(), got, step.expected)
			}
		}
	}
}

func TestAdminAccessTakesNothing(t *testing.T) {
	b := newBlinkers(t, "desk")
	prepare(t, b, claim("a", `{"color": "red"}`, "desk"))
	admin := claim("b", "", "desk")
	admin.Devices[0].AdminAccess = true
	edits, failure := prepare(t, b, admin)
	if failure != "" || len(edits[0].GetMounts()[0].GetOptions()) > 0 || !isPrepared(t, b, admin) {
		t.Errorf("not mounted read-only: %s %v", failure, edits)
	}
	if err := b.Unprepare(t.Context(), admin); err != nil {
		t.Error(err)
	}
	if !isPrepared(t, b, claim("a", `{"color": "red"}`, "desk")) {
		t.Error("its holder has lost it")
	}
}

func TestARestartLosesNothingAndARebootIsNoticed(t *testing.T) {
	before := newBlinkers(t, "desk")
	green := claim("a", `{"color": "green"}`, "desk")
	prepare(t, before, green)
	after := &blinkers{directory: before.directory, state: before.state}
	if !isPrepared(t, after, green) {
		t.Error("the claim was lost with the process")
	}
	if _, failure := prepare(t, after, claim("b", "", "desk")); failure == "" {
		t.Error("another claim got the blinker")
	}
	os.RemoveAll(before.state)
	if isPrepared(t, after, green) {
		t.Error("nothing blinks after a reboot, but the claim counts as prepared")
	}
	os.Mkdir(before.state, 0o755)
	if _, failure := prepare(t, after, green); failure != "" || !isPrepared(t, after, green) {
		t.Errorf("it cannot be prepared again: %s", failure)
	}
}

func TestTheHardwareIsReleasedEvenIfPrepareFailedHalfway(t *testing.T) {
	b := newBlinkers(t, "desk", "wall")
	both := claim("a", "", "desk", "roof")
	if _, failure := prepare(t, b, both); failure == "" || !slices.Equal(held(t, b), []string{"desk"}) {
		t.Errorf("%s: %v", failure, held(t, b))
	}
	if err := b.Unprepare(context.Background(), both); err != nil || len(held(t, b)) > 0 {
		t.Errorf("%v: %v", err, held(t, b))
	}
}
