package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "drakit.dev/examples/backend/backendv1"
)

// service speaks drakit.backend.v1. It has no state of its own but which calls are going on, so it does not
// matter how often the node plugin calls, how many of them are connected, and when we were started last.
type service struct {
	// Answers Unimplemented to the methods that the contract will get later.
	pb.UnimplementedBackendServer

	driver   string
	blinkers *blinkers
	locks    locks
	poll     time.Duration
	stopping context.Context
	log      *slog.Logger
}

func (s *service) GetInfo(_ context.Context, request *pb.GetInfoRequest) (*pb.GetInfoResponse, error) {
	s.log.Info("node plugin connected",
		"node", request.GetNodeName(), "plugin_version", request.GetPluginVersion())
	return &pb.GetInfoResponse{DriverName: s.driver, Version: version}, nil
}

func (s *service) WatchDevices(
	_ *pb.WatchDevicesRequest, stream grpc.ServerStreamingServer[pb.WatchDevicesResponse],
) error {
	return follow(s, stream, s.devices)
}

func (s *service) WatchHealth(
	_ *pb.WatchHealthRequest, stream grpc.ServerStreamingServer[pb.WatchHealthResponse],
) error {
	return follow(s, stream, s.health)
}

// message is the pointer to a generated message M.
type message[M any] interface {
	*M
	proto.Message
}

// follow sends what look sees: now, and again whenever it is different from what was sent last.
//
// An error of look ends the stream, so that our devices count as stopped: better than to go on with
// devices of which nobody knows whether they are there. The node plugin comes again by itself.
func follow[M any, P message[M]](
	s *service, stream grpc.ServerStreamingServer[M], look func() (P, error),
) error {
	ticker := time.NewTicker(s.poll)
	defer ticker.Stop()
	var sent P
	for {
		seen, err := look()
		if err != nil {
			return status.Errorf(codes.Unavailable, "cannot look at the blinkers: %v", err)
		}
		if sent == nil || !proto.Equal(sent, seen) {
			if err := stream.Send(seen); err != nil {
				return err
			}
			sent = seen
		}
		select {
		case <-ticker.C:
		case <-stream.Context().Done():
			return nil
		case <-s.stopping.Done():
			return status.Error(codes.Unavailable, "the backend is being stopped")
		}
	}
}

func (s *service) devices() (*pb.WatchDevicesResponse, error) {
	names, err := s.blinkers.list()
	if err != nil {
		return nil, err
	}
	all := &pb.WatchDevicesResponse{}
	for _, name := range names {
		all.Devices = append(all.Devices, &pb.Device{
			Name: name,
			Attributes: map[string]*pb.Attribute{
				"driverVersion": {Value: &pb.Attribute_Version{Version: version}},
			},
		})
	}
	return all, nil
}

func (s *service) health() (*pb.WatchHealthResponse, error) {
	names, err := s.blinkers.list()
	if err != nil {
		return nil, err
	}
	all := &pb.WatchHealthResponse{}
	for _, name := range names {
		health := &pb.Health{Status: pb.HealthStatus_HEALTH_STATUS_HEALTHY}
		if broken, err := s.blinkers.broken(name); err != nil {
			// Nobody can tell: that is neither healthy nor a reason to keep pods away.
			health = &pb.Health{Message: fmt.Sprintf("blinker %s cannot be read", name)}
		} else if broken {
			health = &pb.Health{
				Status:  pb.HealthStatus_HEALTH_STATUS_UNHEALTHY,
				Message: fmt.Sprintf("blinker %s is broken; repair it, and empty its file", name),
				Broken:  true,
			}
		}
		all.Devices = append(all.Devices, &pb.DeviceHealth{Name: name, Health: health})
	}
	return all, nil
}

func (s *service) PrepareClaims(
	ctx context.Context, request *pb.PrepareClaimsRequest,
) (*pb.PrepareClaimsResponse, error) {
	response := &pb.PrepareClaimsResponse{}
	for _, claim := range request.GetClaims() {
		unlock, err := s.locks.lock(ctx, claim.GetUid())
		if err != nil {
			return nil, status.FromContextError(err).Err()
		}
		result := &pb.PreparedClaim{Uid: claim.GetUid()}
		if edits, err := s.prepare(claim); err != nil {
			result.Error = err.Error()
		} else {
			result.Edits = edits
		}
		unlock()
		s.tell("claim prepared", claim, result.Error)
		response.Claims = append(response.Claims, result)
	}
	return response, nil
}

// prepare takes all blinkers of a claim. Where it fails halfway it leaves what it has done: the claim is
// prepared again, or unprepared.
func (s *service) prepare(claim *pb.Claim) ([]*pb.Edits, error) {
	all := []*pb.Edits{}
	for _, device := range claim.GetDevices() {
		edits, err := s.prepareDevice(claim, device)
		if err != nil {
			return nil, fmt.Errorf("request %s, blinker %s: %w", device.GetRequest(), device.GetName(), err)
		}
		all = append(all, edits)
	}
	return all, nil
}

func (s *service) prepareDevice(claim *pb.Claim, device *pb.AllocatedDevice) (*pb.Edits, error) {
	wanted, err := wantedBy(claim, device)
	if err != nil {
		return nil, err
	}
	if !s.blinkers.exists(device.GetName()) {
		return nil, errors.New("it was taken away; put it back")
	}
	inside := "/blinkers/" + device.GetName()
	edits := &pb.Edits{
		Env: map[string]string{variable("BLINKER", device): inside},
		// Without options a mount is read-only.
		Mounts: []*pb.Mount{{HostPath: s.blinkers.path(device.GetName()), ContainerPath: inside}},
	}
	if device.GetAdminAccess() {
		// Somebody else may hold it, and must not notice.
		return edits, nil
	}
	if err := s.blinkers.take(device.GetName(), wanted); err != nil {
		return nil, err
	}
	edits.Env[variable("BLINKER_COLOUR", device)] = wanted.Colour
	edits.Mounts[0].Options = []string{"rw", "nosuid", "nodev", "noexec", "bind"}
	return edits, nil
}

func (s *service) UnprepareClaims(
	ctx context.Context, request *pb.UnprepareClaimsRequest,
) (*pb.UnprepareClaimsResponse, error) {
	response := &pb.UnprepareClaimsResponse{}
	for _, claim := range request.GetClaims() {
		unlock, err := s.locks.lock(ctx, claim.GetUid())
		if err != nil {
			return nil, status.FromContextError(err).Err()
		}
		result := &pb.UnpreparedClaim{Uid: claim.GetUid()}
		if err := s.blinkers.release(claim.GetUid()); err != nil {
			result.Error = err.Error()
		}
		unlock()
		s.tell("claim unprepared", claim, result.Error)
		response.Claims = append(response.Claims, result)
	}
	return response, nil
}

func (s *service) CheckClaims(
	_ context.Context, request *pb.CheckClaimsRequest,
) (*pb.CheckClaimsResponse, error) {
	response := &pb.CheckClaimsResponse{}
	for _, claim := range request.GetClaims() {
		result := &pb.CheckedClaim{Uid: claim.GetUid(), InOrder: true}
		for _, device := range claim.GetDevices() {
			result.InOrder = result.InOrder && s.inOrder(claim, device)
		}
		response.Claims = append(response.Claims, result)
	}
	return response, nil
}

func (s *service) inOrder(claim *pb.Claim, device *pb.AllocatedDevice) bool {
	if !s.blinkers.exists(device.GetName()) {
		return false
	}
	if device.GetAdminAccess() {
		return true
	}
	wanted, err := wantedBy(claim, device)
	if err != nil {
		return false
	}
	held, err := s.blinkers.holder(device.GetName())
	return err == nil && held != nil && *held == wanted
}

func (s *service) tell(done string, claim *pb.Claim, failure string) {
	about := []any{"claim", claim.GetNamespace() + "/" + claim.GetName(), "claim_uid", claim.GetUid()}
	if failure != "" {
		s.log.Warn("not done: "+done, append(about, "error", failure)...)
		return
	}
	s.log.Info(done, about...)
}

func wantedBy(claim *pb.Claim, device *pb.AllocatedDevice) (holding, error) {
	chosen, err := colour(device.GetParameters())
	return holding{
		ClaimUID: claim.GetUid(),
		Claim:    claim.GetNamespace() + "/" + claim.GetName(),
		Colour:   chosen,
	}, err
}

var notInVariables = regexp.MustCompile(`[^A-Z0-9]`)

// variable names an environment variable after request and device: a container can have several of both,
// and the same variable twice would be the last one's.
func variable(prefix string, device *pb.AllocatedDevice) string {
	name := strings.ToUpper(prefix + "_" + device.GetRequest() + "__" + device.GetName())
	return notInVariables.ReplaceAllString(name, "_")
}
