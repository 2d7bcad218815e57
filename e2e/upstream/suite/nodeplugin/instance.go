// Package nodeplugin runs drakit's node plugin for the specs, a pod for each driver and node, and
// translates between Kubernetes' types and those of drakit's backends.
//
// The pod is that of the chart: its DaemonSet, which runs on no node, is the template.
package nodeplugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	backendv1 "drakit.dev/e2e/upstream/backendv1"
)

const (
	// NamespaceVariable names the namespace of the release whose DaemonSet is the template.
	NamespaceVariable = "DRAKIT_NAMESPACE"

	// LogsVariable names the folder for the logs of the node plugins, and for what went wrong with
	// them, in files *.problem.
	LogsVariable = "DRAKIT_LOGS"

	// FaultVariable names a Python program that runs the node plugin with a fault. It can be empty.
	FaultVariable = "DRAKIT_FAULT"

	// ReleasedDirectory is the directory of backends in the release. Each driver has its own.
	ReleasedDirectory = "/var/lib/kubelet/plugins/drakit-suite"

	// entry is the backend's name in the configuration, and the name of its directory.
	entry = "suite"

	configKey = "nodeplugin.yaml"
	faultKey  = "fault.py"

	readyTimeout = time.Minute
	// The chart gives the plugin 60 s to end.
	goneTimeout  = 90 * time.Second
	pollInterval = 200 * time.Millisecond
	logInterval  = 2 * time.Second

	// registeredMessage is what the node plugin logs at each registration.
	registeredMessage = "the kubelet registered the driver"
)

// Instance is a node plugin that hosts one driver on one node.
type Instance struct {
	cluster   kubernetes.Interface
	namespace string
	name      string
	driver    string
	directory string
	server    *grpc.Server
	serving   sync.WaitGroup
	stopped   chan struct{}
	stop      sync.Once
}

// Start creates the pod. Its backend has to listen on Socket.
func Start(ctx context.Context, cluster kubernetes.Interface, driver, node string) (*Instance, error) {
	namespace := os.Getenv(NamespaceVariable)
	found, err := cluster.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	if namespace == "" || len(found.Items) != 1 {
		return nil, fmt.Errorf("the namespace %s=%q has %d DaemonSets, not the one of a release of drakit", NamespaceVariable, namespace, len(found.Items))
	}
	instance := &Instance{
		cluster:   cluster,
		namespace: namespace,
		name:      "plugin-" + rand.String(8),
		driver:    driver,
		stopped:   make(chan struct{}),
	}
	instance.directory = path.Join(path.Dir(ReleasedDirectory), driver, instance.name)
	return instance, instance.create(ctx, &found.Items[0], node)
}

func (i *Instance) create(ctx context.Context, template *appsv1.DaemonSet, node string) error {
	config, err := i.cluster.CoreV1().ConfigMaps(i.namespace).Get(ctx, template.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	text, err := configured(config.Data[configKey], i.driver, i.directory)
	if err != nil {
		return err
	}
	own := &v1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: i.name},
		Data:       map[string]string{configKey: text},
	}
	pod := i.pod(template, node)
	if fault := os.Getenv(FaultVariable); fault != "" {
		program, err := os.ReadFile(fault)
		if err != nil {
			return err
		}
		own.Data[faultKey] = string(program)
		pod.Spec.Containers[0].Command = []string{"/opt/drakit/bin/python3", "/etc/drakit/" + faultKey}
	}
	if _, err := i.cluster.CoreV1().ConfigMaps(i.namespace).Create(ctx, own, metav1.CreateOptions{}); err != nil {
		return err
	}
	if _, err = i.cluster.CoreV1().Pods(i.namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return errors.Join(err, i.deleteConfig(ctx))
	}
	return nil
}

// configured returns the release's configuration for another driver and directory of backends.
func configured(released, driver, directory string) (string, error) {
	var config map[string]any
	if err := yaml.Unmarshal([]byte(released), &config); err != nil {
		return "", err
	}
	backends, _ := config["backends"].(map[string]any)
	allowed, _ := backends["allowed"].(map[string]any)
	backend, ok := allowed[entry].(map[string]any)
	if !ok || backends["directory"] != ReleasedDirectory {
		return "", fmt.Errorf("the release does not have the backend %q in the directory %s", entry, ReleasedDirectory)
	}
	backends["directory"] = directory
	backend["driver"] = driver
	// The release has it only so that its admission policy allows any driver.
	delete(config, "drivers")
	text, err := yaml.Marshal(config)
	return string(text), err
}

func (i *Instance) pod(template *appsv1.DaemonSet, node string) *v1.Pod {
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: i.name, Labels: map[string]string{"app": "drakit-under-test"}},
		Spec:       *template.Spec.Template.Spec.DeepCopy(),
	}
	pod.Spec.NodeName = node
	pod.Spec.NodeSelector = nil
	for n := range pod.Spec.Volumes {
		volume := &pod.Spec.Volumes[n]
		if volume.ConfigMap != nil && volume.ConfigMap.Name == template.Name {
			volume.ConfigMap.Name = i.name
		}
		if volume.HostPath != nil && volume.HostPath.Path == ReleasedDirectory {
			volume.HostPath.Path = i.directory
		}
	}
	for n := range pod.Spec.Containers {
		for m := range pod.Spec.Containers[n].VolumeMounts {
			if mount := &pod.Spec.Containers[n].VolumeMounts[m]; mount.MountPath == ReleasedDirectory {
				mount.MountPath = i.directory
			}
		}
	}
	return pod
}

// Socket is the path on the node on which the backend has to listen.
func (i *Instance) Socket() string {
	return path.Join(i.directory, entry, "b.sock")
}

// Serve serves the backend until Stop.
func (i *Instance) Serve(listener net.Listener, backend backendv1.BackendServer) {
	i.server = grpc.NewServer()
	backendv1.RegisterBackendServer(i.server, backend)
	i.serving.Go(func() { _ = i.server.Serve(listener) })
}

// WaitReady returns when the pod is ready: its driver is registered with the kubelet.
func (i *Instance) WaitReady(ctx context.Context) error {
	return wait.PollUntilContextTimeout(ctx, pollInterval, readyTimeout, true, func(ctx context.Context) (bool, error) {
		pod, err := i.cluster.CoreV1().Pods(i.namespace).Get(ctx, i.name, metav1.GetOptions{})
		if err != nil {
			return false, nil // asked again
		}
		return slices.ContainsFunc(pod.Status.Conditions, func(condition v1.PodCondition) bool {
			return condition.Type == v1.PodReady && condition.Status == v1.ConditionTrue
		}), nil
	})
}

// FollowRegistrations calls a function for each registration after the first one, until Stop.
func (i *Instance) FollowRegistrations(ctx context.Context, registered func()) {
	for known := 1; ; {
		select {
		case <-i.stopped:
			return
		case <-time.After(logInterval):
		}
		// While the kubelet is stopped, there is no log: asked again.
		log, err := i.log(ctx)
		for count := bytes.Count(log, []byte(registeredMessage)); err == nil && known < count; known++ {
			registered()
		}
	}
}

// Stopped is closed when Stop has begun.
func (i *Instance) Stopped() <-chan struct{} {
	return i.stopped
}

// Stop deletes the pod, waits until it has ended, and then ends the backend. What goes wrong, and a
// container that was restarted, is a problem of the run, not of the spec.
func (i *Instance) Stop() {
	i.stop.Do(func() {
		close(i.stopped)
		problem := errors.Join(i.restarts(), i.keepLog(), i.deletePod())
		if i.server != nil {
			i.server.Stop()
			// The server closes the listener.
			i.serving.Wait()
		}
		if problem = errors.Join(problem, i.deleteConfig(context.Background())); problem != nil {
			i.report(problem)
		}
	})
}

// report writes a problem to the folder of the logs.
func (i *Instance) report(problem error) {
	text := fmt.Sprintf("node plugin %s of driver %s: %v\n", i.name, i.driver, problem)
	if err := os.WriteFile(i.file("problem"), []byte(text), 0o644); err != nil {
		panic(err)
	}
}

func (i *Instance) file(kind string) string {
	return filepath.Join(os.Getenv(LogsVariable), i.driver+"-"+i.name+"."+kind)
}

func (i *Instance) deleteConfig(ctx context.Context) error {
	return i.cluster.CoreV1().ConfigMaps(i.namespace).Delete(ctx, i.name, metav1.DeleteOptions{})
}

// restarts returns an error if a container of the pod has been restarted.
func (i *Instance) restarts() error {
	pod, err := i.cluster.CoreV1().Pods(i.namespace).Get(context.Background(), i.name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, status := range pod.Status.ContainerStatuses {
		if status.RestartCount > 0 {
			return fmt.Errorf("container %s was restarted: %v", status.Name, status.LastTerminationState.Terminated)
		}
	}
	return nil
}

func (i *Instance) keepLog() error {
	log, err := i.log(context.Background())
	if err != nil {
		return err
	}
	return os.WriteFile(i.file("log"), log, 0o644)
}

func (i *Instance) log(ctx context.Context) ([]byte, error) {
	return i.cluster.CoreV1().Pods(i.namespace).GetLogs(i.name, &v1.PodLogOptions{}).DoRaw(ctx)
}

func (i *Instance) deletePod() error {
	ctx := context.Background()
	pods := i.cluster.CoreV1().Pods(i.namespace)
	if err := pods.Delete(ctx, i.name, metav1.DeleteOptions{}); err != nil {
		return err
	}
	return wait.PollUntilContextTimeout(ctx, pollInterval, goneTimeout, true, func(ctx context.Context) (bool, error) {
		_, err := pods.Get(ctx, i.name, metav1.GetOptions{})
		return apierrors.IsNotFound(err), nil // any other error: asked again
	})
}
