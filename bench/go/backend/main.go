// The backend that the benchmark compares with other drivers: its own work costs nothing.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os/signal"
	"syscall"

	"drakit.dev/backend"
	backendv1 "drakit.dev/backend/v1"
)

type driver struct{ devices int }

func (d driver) WatchDevices(ctx context.Context, publish func(*backendv1.WatchDevicesResponse)) error {
	all := &backendv1.WatchDevicesResponse{}
	for number := range d.devices {
		all.Devices = append(all.Devices, &backendv1.Device{Name: fmt.Sprintf("device-%d", number)})
	}
	publish(all)
	<-ctx.Done()
	return nil
}

func (d driver) Prepare(_ context.Context, claim *backendv1.Claim) (*backendv1.PreparedClaim, error) {
	prepared := &backendv1.PreparedClaim{}
	for _, device := range claim.Devices {
		prepared.Edits = append(prepared.Edits, &backendv1.Edits{
			Env:         map[string]string{"BENCH_DEVICE": device.Name},
			DeviceNodes: []*backendv1.DeviceNode{{Path: "/dev/" + device.Name, HostPath: "/dev/null", Type: "c"}},
		})
	}
	return prepared, nil
}

func (d driver) Unprepare(context.Context, *backendv1.Claim) error { return nil }

func main() {
	socket := flag.String("socket", "", "the socket to serve")
	name := flag.String("name", "", "the name of the driver")
	devices := flag.Int("devices", 8, "the number of devices")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	options := backend.Options{Socket: *socket, Info: &backendv1.GetInfoResponse{DriverName: *name}}
	if err := backend.Serve(ctx, driver{*devices}, options); err != nil {
		log.Fatal(err)
	}
}
