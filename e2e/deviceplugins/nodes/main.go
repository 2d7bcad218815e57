// A device plugin whose devices and answers are what a file says, for tests: device nodes, variables
// and annotations, health, NUMA nodes and PreStartContainer, which Kubernetes' sample has none of.
//
// The half that talks to the kubelet is Kubernetes' own stub; it logs every call.
package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	plugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
)

// maxStreams is more than the streams that a stub collects while all tests run.
const maxStreams = 64

// Resource is what the file says of one resource name.
type Resource struct {
	PreStart bool              `json:"preStart"`
	Devices  map[string]Device `json:"devices"`
}

// Device says how a device is, and what a container gets for it.
type Device struct {
	Health      string            `json:"health"`
	NUMA        *int64            `json:"numa"`
	Node        string            `json:"node"`
	Mount       string            `json:"mount"` // read-only
	Env         map[string]string `json:"env"`
	Annotations map[string]string `json:"annotations"`
}

func main() {
	ctx := context.Background()
	path := os.Args[1]
	resources, stamp := read(path)
	updates := map[string]func([]*api.Device){}
	for name, resource := range resources {
		updates[name] = serve(ctx, name, resource, path)
	}
	for range time.Tick(200 * time.Millisecond) {
		now, newer := read(path)
		if newer == stamp {
			continue
		}
		stamp = newer
		for name, resource := range now {
			if update, ok := updates[name]; ok {
				klog.InfoS("Updated", "resource", name)
				update(listed(resource))
			}
		}
	}
}

// serve starts and registers the plugin of one resource; what it gives back tells of changes.
func serve(ctx context.Context, name string, resource Resource, path string) func([]*api.Device) {
	logger := klog.FromContext(ctx)
	socket := filepath.Join(api.DevicePluginPath, filepath.Base(name)+".sock")
	stub := plugin.NewDevicePluginStub(logger, listed(resource), socket, name, resource.PreStart, false)
	stub.SetAllocFunc(func(request *api.AllocateRequest, _ map[string]*api.Device) (*api.AllocateResponse, error) {
		resources, _ := read(path)
		return allocated(resources[name], request), nil
	})
	if err := stub.Start(ctx); err != nil {
		panic(err)
	}
	if err := stub.Register(ctx, api.KubeletSocket, name, api.DevicePluginPath); err != nil {
		panic(err)
	}
	go stub.Watch(ctx, api.KubeletSocket, name, api.DevicePluginPath)
	lists := make(chan []*api.Device, 16)
	go func() {
		for devices := range lists {
			// One stream takes each update, and the stub never ends a stream: after each restart of
			// its server, one more dead stream takes its turn.
			for range maxStreams {
				stub.Update(devices)
			}
		}
	}()
	return func(devices []*api.Device) { lists <- devices }
}

func listed(resource Resource) []*api.Device {
	var devices []*api.Device
	for id, device := range resource.Devices {
		listed := &api.Device{ID: id, Health: device.Health}
		if listed.Health == "" {
			listed.Health = api.Healthy
		}
		if device.NUMA != nil {
			listed.Topology = &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: *device.NUMA}}}
		}
		devices = append(devices, listed)
	}
	return devices
}

func allocated(resource Resource, request *api.AllocateRequest) *api.AllocateResponse {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		answer := &api.ContainerAllocateResponse{Envs: map[string]string{}, Annotations: map[string]string{}}
		for _, id := range container.DevicesIds {
			device := resource.Devices[id]
			if device.Node != "" {
				node := &api.DeviceSpec{HostPath: device.Node, ContainerPath: device.Node, Permissions: "rw"}
				answer.Devices = append(answer.Devices, node)
			}
			if device.Mount != "" {
				mount := &api.Mount{HostPath: device.Mount, ContainerPath: device.Mount, ReadOnly: true}
				answer.Mounts = append(answer.Mounts, mount)
			}
			for key, value := range device.Env {
				answer.Envs[key] = value
			}
			for key, value := range device.Annotations {
				answer.Annotations[key] = value
			}
		}
		response.ContainerResponses = append(response.ContainerResponses, answer)
	}
	return response
}

// read gives what the file says, and when it was written.
func read(path string) (map[string]Resource, time.Time) {
	var resources map[string]Resource
	// The time first: a file that is replaced meanwhile is read again.
	status, err := os.Stat(path)
	if err != nil {
		panic(err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	if err := json.Unmarshal(content, &resources); err != nil {
		panic(err)
	}
	return resources, status.ModTime()
}
