// The driver that the benchmark compares with drakit: the least that a driver on Kubernetes' own
// Go package kubeletplugin must do. It publishes devices, and writes and removes a CDI file for
// each claim. It has no checkpoint, and does not check whether a device is in use: the package
// leaves both to the driver.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// The name of the driver and the vendor of its CDI devices.
var name string

type driver struct{ cdi string }

func (d driver) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		devices, err := d.prepare(claim)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

func (d driver) prepare(claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	var specs []any
	var devices []kubeletplugin.Device
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != name {
			continue
		}
		id := fmt.Sprintf("%s-%s", claim.UID, result.Device)
		specs = append(specs, map[string]any{"name": id, "containerEdits": map[string]any{
			"env":         []string{"BENCH_DEVICE=" + result.Device},
			"deviceNodes": []any{map[string]any{"path": "/dev/" + result.Device, "hostPath": "/dev/null", "type": "c"}},
		}})
		devices = append(devices, kubeletplugin.Device{
			Requests: []string{result.Request}, PoolName: result.Pool, DeviceName: result.Device,
			CDIDeviceIDs: []string{name + "/claim=" + id},
		})
	}
	spec, err := json.Marshal(map[string]any{"cdiVersion": "0.6.0", "kind": name + "/claim", "devices": specs})
	if err != nil {
		return nil, err
	}
	temporary := filepath.Join(d.cdi, "."+string(claim.UID))
	if err := os.WriteFile(temporary, spec, 0o644); err != nil {
		return nil, err
	}
	return devices, os.Rename(temporary, d.file(claim.UID))
}

func (d driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		results[claim.UID] = nil
		if err := os.Remove(d.file(claim.UID)); err != nil && !os.IsNotExist(err) {
			results[claim.UID] = err
		}
	}
	return results, nil
}

func (d driver) HandleError(_ context.Context, err error, message string) {
	log.Fatalf("%s: %v", message, err)
}

func (d driver) file(uid types.UID) string { return filepath.Join(d.cdi, string(uid)+".json") }

func main() {
	node := flag.String("node", "", "the name of the Node")
	kubeconfig := flag.String("kubeconfig", "", "the kubeconfig of the API server")
	root := flag.String("root", "", "the folder of the kubelet's sockets")
	cdi := flag.String("cdi", "", "the folder of the CDI files")
	count := flag.Int("devices", 8, "the number of devices")
	flag.StringVar(&name, "name", "", "the name of the driver")
	flag.Parse()
	if err := run(*node, *kubeconfig, *root, *cdi, *count); err != nil {
		log.Fatal(err)
	}
}

func run(node, kubeconfig, root, cdi string, count int) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.QPS = -1 // The default of 5 requests per second would be most of what is measured.
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	context, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	data := filepath.Join(root, "plugins", name)
	if err := os.MkdirAll(data, 0o700); err != nil {
		return err
	}
	helper, err := kubeletplugin.Start(context, driver{cdi: cdi},
		kubeletplugin.DriverName(name),
		kubeletplugin.NodeName(node),
		kubeletplugin.KubeClient(client),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(root, "plugins_registry")),
		kubeletplugin.PluginDataDirectoryPath(data),
	)
	if err != nil {
		return err
	}
	defer helper.Stop()
	var devices []resourceapi.Device
	for number := range count {
		devices = append(devices, resourceapi.Device{Name: fmt.Sprintf("device-%d", number)})
	}
	slices := []resourceslice.Slice{{Devices: devices}}
	pools := map[string]resourceslice.Pool{node: {Slices: slices}}
	if err := helper.PublishResources(context, resourceslice.DriverResources{Pools: pools}); err != nil {
		return err
	}
	<-context.Done()
	return nil
}
