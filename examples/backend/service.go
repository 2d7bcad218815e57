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

	pb "drakit.dev/backend/v1"
)

// service implements drakit.backend.v1. Its only state is the calls in progress. So the node plugin can
// repeat calls, several node plugins can connect, and the backend can restart at any time.
type service struct {
	// Answers Unimplemented to methods that later versions of the contract add.
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

// message is a pointer to a generated message M.
type message[M any] interface {
	*M
	proto.Message
}

// follow sends the result of look now, and again whenever it changes.
//
// An error of look ends the stream, and the devices count as stopped, because their state is unknown. The
// node plugin reconnects.
func follow[M any, P message[M]](
	s *service, stream grpc.ServerStreamingServer[M], look func() (P, error),
) error {
	ticker := time.NewTicker(s.poll)
	defer ticker.Stop()
	var sent P
	for {
		seen, err := look()
		if err != nil {
			return status.Errorf(codes.Unavailable, "cannot read the blinkers: %v", err)
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
			// Unknown health is neither healthy nor a reason to taint the device.
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
		s.logResult("prepare claim", claim, result.Error)
		response.Claims = append(response.Claims, result)
	}
	return response, nil
}

// prepare takes all blinkers of a claim. If it fails halfway, it leaves the blinkers taken: the node plugin
// calls Prepare again, or Unprepare.
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
		return nil, errors.New("it no longer exists; create its file again")
	}
	inside := "/blinkers/" + device.GetName()
	edits := &pb.Edits{
		Env: map[string]string{variable("BLINKER", device): inside},
		// Without options a mount is read-only.
		Mounts: []*pb.Mount{{HostPath: s.blinkers.path(device.GetName()), ContainerPath: inside}},
	}
	if device.GetAdminAccess() {
		// Another claim may hold it, and must not be affected.
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
		s.logResult("unprepare claim", claim, result.Error)
		response.Claims = append(response.Claims, result)
	}
	return response, nil
}

func (s *service) CheckClaims(
	_ context.Context, request *pb.CheckClaimsRequest,
) (*pb.CheckClaimsResponse, error) {
	response := &pb.CheckClaimsResponse{}
	for _, claim := range request.GetClaims() {
		result := &pb.CheckedClaim{Uid: claim.GetUid(), Prepared: true}
		for _, device := range claim.GetDevices() {
			result.Prepared = result.Prepared && s.isPrepared(claim, device)
		}
		response.Claims = append(response.Claims, result)
	}
	return response, nil
}

func (s *service) isPrepared(claim *pb.Claim, device *pb.AllocatedDevice) bool {
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

func (s *service) logResult(action string, claim *pb.Claim, failure string) {
	about := []any{"claim", claim.GetNamespace() + "/" + claim.GetName(), "claim_uid", claim.GetUid()}
	if failure != "" {
		s.log.Warn("cannot "+action, append(about, "error", failure)...)
		return
	}
	s.log.Info(action, about...)
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

// variable returns an environment variable's name from request and device. A container can have several of
// both, and the last of two equal names would win.
func variable(prefix string, device *pb.AllocatedDevice) string {
	name := strings.ToUpper(prefix + "_" + device.GetRequest() + "__" + device.GetName())
	return notInVariables.ReplaceAllString(name, "_")
}
