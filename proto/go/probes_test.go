package backend

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	backendv1 "drakit.dev/backend/v1"
)

func getInfo(s *server) {
	s.Helper()
	if _, err := s.client().GetInfo(s.Context(), &backendv1.GetInfoRequest{}); err != nil {
		s.Fatal(err)
	}
}

func TestReadinessFollowsTheConnectionAndTheLogHasTheReason(t *testing.T) {
	shorten(t, &connectTimeout, 20*time.Millisecond)
	driver := newLamps()
	s := serve(t, driver, 0)
	missing := fmt.Sprintf("no node plugin has connected to %s: add an entry for its directory, with driver "+
		"lamps.example.com, to backends.allowed in the values of drakit's release, and check that the node plugin "+
		"runs on this node", s.socket)
	refused := "a node plugin has requested the driver's name, but does not watch its devices: " +
		"the Event BackendRefused on the Node has the reason"
	logged := func(reason string, times int) {
		t.Helper()
		eventually(t, func() string {
			count := 0
			for _, line := range s.log.lines(t, "driver is not connected") {
				if line["reason"] == reason && line["level"] == "WARN" {
					count++
				}
			}
			return fmt.Sprint(count)
		}, fmt.Sprint(times))
	}
	s.expectProbe("/readyz", missing)
	logged(missing, 1)
	getInfo(s)
	s.expectProbe("/readyz", refused)
	s.expect("/metrics", "\ndrakit_driver_connected 0")
	stream := watch(s)
	s.expectProbe("/readyz", "the driver has not listed its devices yet")
	driver.lists <- []string{"desk"}
	expectNames(s, stream, "desk")
	s.expectProbe("/readyz", "")
	s.expect("/metrics", "\ndrakit_driver_connected 1")
	// The stream ends, and the node plugin does not come back, for example because its entry was removed.
	driver.lists <- nil
	if _, err := stream.Recv(); status.Code(err) != codes.Aborted {
		t.Error(err)
	}
	s.expectProbe("/readyz", "the devices cannot be read: cannot read /dev/lamps")
	driver.lists <- []string{"desk"}
	s.expectProbe("/readyz", missing)
	logged(missing, 2)
	s.expectProbe("/livez", "")
}

func TestASuccessorIsReadyWhileTheNodePluginUsesItsPredecessor(t *testing.T) {
	drivers := []*lamps{newLamps(), newLamps()}
	first := serve(t, drivers[0], 0)
	getInfo(first)
	s := serveAt(t, drivers[1], first.socket, 0)
	s.expectProbe("/readyz", "no node plugin has connected")
	// The node plugin finds the new socket at once, but uses the first process until it stops.
	getInfo(s)
	s.expectProbe("/readyz", "the driver has not listed its devices yet")
	drivers[1].lists <- []string{"desk"}
	s.expectProbe("/readyz", "")
	if err := first.end(); err != nil {
		t.Error(err)
	}
	s.expectProbe("/readyz", "a node plugin has requested the driver's name")
	expectNames(s, watch(s), "desk")
	s.expectProbe("/readyz", "")
}

func TestMetricsCountCallsByMethodAndResult(t *testing.T) {
	driver := newLamps()
	driver.prepare = func(_ context.Context, claim *backendv1.Claim) error {
		if claim.GetUid() == "broken" {
			return errors.New("the lamp is broken")
		}
		return nil
	}
	driver.undo = func(*backendv1.Claim) error { return ErrReleasePending }
	s := serve(t, driver, 0)
	for _, uids := range [][]string{{"a"}, {"b", "c"}, {"d", "broken"}} {
		s.client().PrepareClaims(t.Context(), &backendv1.PrepareClaimsRequest{Claims: claims(uids...)})
	}
	s.client().UnprepareClaims(t.Context(), &backendv1.UnprepareClaimsRequest{Claims: claims("a")})
	s.client().CheckClaims(t.Context(), &backendv1.CheckClaimsRequest{Claims: claims("a")}) // unimplemented
	// Durations differ.
	got := regexp.MustCompile(`(_sum\{.*\}) .*`).ReplaceAllString(s.get("/metrics"), "$1 x")
	got = regexp.MustCompile(`.*_bucket\{.*le="(0|1|60|300).*\n`).ReplaceAllString(got, "")
	if expected := `200 # HELP drakit_driver_calls_total Calls by the node plugin. A call with a claim that fails is an error.
# TYPE drakit_driver_calls_total counter
drakit_driver_calls_total{method="PrepareClaims",result="error"} 1
drakit_driver_calls_total{method="PrepareClaims",result="success"} 2
drakit_driver_calls_total{method="UnprepareClaims",result="success"} 1
# HELP drakit_driver_call_seconds Duration of calls, with their wait for earlier calls.
# TYPE drakit_driver_call_seconds histogram
drakit_driver_call_seconds_bucket{method="PrepareClaims",le="+Inf"} 3
drakit_driver_call_seconds_sum{method="PrepareClaims"} x
drakit_driver_call_seconds_count{method="PrepareClaims"} 3
drakit_driver_call_seconds_bucket{method="UnprepareClaims",le="+Inf"} 1
drakit_driver_call_seconds_sum{method="UnprepareClaims"} x
drakit_driver_call_seconds_count{method="UnprepareClaims"} 1
# HELP drakit_driver_connected Whether a node plugin watches the devices.
# TYPE drakit_driver_connected gauge
drakit_driver_connected 0`; got != expected {
		t.Error(got)
	}
}

func TestStreamsAndCallsAreLimited(t *testing.T) {
	driver := newLamps()
	s := serve(t, driver, 0)
	stream := watch(s)
	driver.lists <- []string{"desk"}
	expectNames(s, stream, "desk")
	for range maxStreams - 1 {
		expectNames(s, watch(s), "desk")
	}
	if _, err := watch(s).Recv(); status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
	begun, release := make(chan struct{}, maxCalls), make(chan struct{})
	driver.prepare = func(context.Context, *backendv1.Claim) error { begun <- struct{}{}; <-release; return nil }
	client, returned := s.client(), make(chan error, maxCalls)
	for number := range maxCalls {
		go func() {
			request := &backendv1.PrepareClaimsRequest{Claims: claims(fmt.Sprint(number))}
			_, err := client.PrepareClaims(t.Context(), request)
			returned <- err
		}()
	}
	for range maxCalls {
		<-begun
	}
	if _, err := client.GetInfo(t.Context(), &backendv1.GetInfoRequest{}); status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
	close(release)
	for range maxCalls {
		if err := <-returned; err != nil {
			t.Error(err)
		}
	}
}
