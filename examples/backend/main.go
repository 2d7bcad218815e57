// An example backend for drakit: a driver in Go that runs in a separate process.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"drakit.dev/backend"
	backendv1 "drakit.dev/backend/v1"
)

var isLabel = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`).MatchString
var isColor = regexp.MustCompile(`^(white|red|green)$`).MatchString
var notEnv = regexp.MustCompile(`[^A-Z0-9]`)

// blinkers are the files of a directory. A file that begins with "broken" is an unhealthy blinker. The
// state directory stands for the state of hardware: it has a symbolic link for each blinker that blinks,
// because the kernel creates a link together with its target, which is "<UID> <claim> <color>".
type blinkers struct {
	directory, state string
	poll             time.Duration
}

func (b *blinkers) WatchDevices(ctx context.Context, publish func(*backendv1.WatchDevicesResponse)) error {
	return backend.Poll(ctx, b.poll, func() (*backendv1.WatchDevicesResponse, error) {
		entries, err := os.ReadDir(b.directory)
		all := &backendv1.WatchDevicesResponse{}
		for _, entry := range entries {
			if entry.Type().IsRegular() && isLabel(entry.Name()) {
				all.Devices = append(all.Devices, &backendv1.Device{Name: entry.Name(), Health: b.health(entry.Name())})
			}
		}
		return all, err
	}, publish)
}

func (b *blinkers) health(name string) *backendv1.Health {
	file, err := os.Open(filepath.Join(b.directory, name))
	if err != nil {
		return &backendv1.Health{Message: "blinker " + name + " cannot be read"} // unknown
	}
	defer file.Close()
	start := make([]byte, len("broken"))
	if count, _ := file.Read(start); string(start[:count]) != "broken" {
		return &backendv1.Health{Status: backendv1.HealthStatus_HEALTH_STATUS_HEALTHY}
	}
	message := "blinker " + name + " is broken; repair it, and empty its file"
	return &backendv1.Health{Status: backendv1.HealthStatus_HEALTH_STATUS_UNHEALTHY, Message: message, Broken: true}
}

func (b *blinkers) Prepare(_ context.Context, claim *backendv1.Claim) (*backendv1.PreparedClaim, error) {
	prepared := &backendv1.PreparedClaim{}
	for _, device := range claim.GetDevices() {
		name, inside := device.GetName(), "/blinkers/"+device.GetName()
		wanted, color, err := b.wanted(claim, device)
		if err != nil {
			return nil, fmt.Errorf("request %s, blinker %s: %w", device.GetRequest(), name, err)
		}
		// A container can have several requests and devices, and the last of two equal variables would win.
		suffix := notEnv.ReplaceAllString(strings.ToUpper(device.GetRequest()+"__"+name), "_")
		mount := &backendv1.Mount{HostPath: filepath.Join(b.directory, name), ContainerPath: inside}
		edits := &backendv1.Edits{Env: map[string]string{"BLINKER_" + suffix: inside}, Mounts: []*backendv1.Mount{mount}}
		prepared.Edits = append(prepared.Edits, edits)
		if device.GetAdminAccess() {
			continue // read-only, because another claim may hold the blinker
		}
		edits.Env["BLINKER_COLOR_"+suffix] = color
		mount.Options = []string{"rw", "nosuid", "nodev", "noexec", "bind"}
		link := filepath.Join(b.state, name)
		if held, _ := os.Readlink(link); strings.HasPrefix(held, claim.GetUid()+" ") {
			os.Remove(link)
		} else if held != "" {
			return nil, fmt.Errorf("blinker %s still blinks for another claim (%s); delete its pod", name, held)
		}
		if err := os.Symlink(wanted, link); err != nil {
			return nil, err
		}
	}
	return prepared, nil
}

// wanted returns the target of the link for a device of a claim, and the color.
func (b *blinkers) wanted(claim *backendv1.Claim, device *backendv1.AllocatedDevice) (string, string, error) {
	given := struct {
		Color string `json:"color"`
	}{"white"}
	if err := backend.DecodeParameters(device.GetParameters(), &given); err != nil {
		return "", "", err
	}
	if !isColor(given.Color) {
		return "", "", fmt.Errorf("color is %q: choose one of white, red, green", given.Color)
	}
	file, err := os.Lstat(filepath.Join(b.directory, device.GetName()))
	if err != nil || !file.Mode().IsRegular() || !isLabel(device.GetName()) {
		return "", "", errors.New("it no longer exists; create its file again")
	}
	link := fmt.Sprintf("%s %s/%s %s", claim.GetUid(), claim.GetNamespace(), claim.GetName(), given.Color)
	return link, given.Color, nil
}

// Check returns whether all blinkers of a claim still blink as the claim requests.
func (b *blinkers) Check(_ context.Context, claim *backendv1.Claim) (bool, error) {
	for _, device := range claim.GetDevices() {
		wanted, _, err := b.wanted(claim, device)
		held, _ := os.Readlink(filepath.Join(b.state, device.GetName()))
		if err != nil || (held != wanted && !device.GetAdminAccess()) {
			return false, err
		}
	}
	return true, nil
}

func (b *blinkers) Unprepare(_ context.Context, claim *backendv1.Claim) error {
	links, err := filepath.Glob(filepath.Join(b.state, "*")) // Prepare may have failed halfway
	for _, link := range links {
		if held, _ := os.Readlink(link); strings.HasPrefix(held, claim.GetUid()+" ") {
			err = errors.Join(err, os.Remove(link))
		}
	}
	return err
}

func main() {
	driver := &blinkers{}
	name := flag.String("driver-name", "blinkers.example.com", "`name` of the driver")
	socket := flag.String("socket", "/run/drakit/blinkers.sock", "`path` of the socket")
	flag.StringVar(&driver.directory, "blinkers", "/var/lib/blinkers", "`directory` of the blinkers on the host")
	flag.StringVar(&driver.state, "state", "/run/blinkers", "`directory` of the state, which a reboot clears")
	flag.DurationVar(&driver.poll, "poll", time.Second, "polling interval")
	probes := flag.Int("probe-port", 0, "`port` of the probes and metrics; none by default")
	flag.Parse()
	os.MkdirAll(driver.state, 0o755) // without it, Prepare returns an error
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	info := &backendv1.GetInfoResponse{DriverName: *name, Version: "0.1.0", MetadataFiles: true}
	if err := backend.Serve(ctx, driver, backend.Options{Socket: *socket, Info: info, ProbePort: *probes}); err != nil {
		log.Fatal(err)
	}
}
