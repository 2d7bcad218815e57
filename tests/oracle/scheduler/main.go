// drakit-scheduler says what Kubernetes' scheduler finds for pods with claims, because it is the
// scheduler with its default plugins: the referee of explain/drakit_explain/trial.py.
//
// It reads one JSON object a line from standard input and writes one JSON object a line to standard
// output, in the same order. It ends when standard input ends. Each world gets a scheduler and a fake
// API server of its own. The worlds of a line have the same feature gates, because these are global.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/latest"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

const (
	// maxLine bounds one question.
	maxLine = 64 << 20

	// worldsAtOnce are scheduled together: most of the time of a world is waiting for informers.
	worldsAtOnce = 16

	// filterTimeout ends the search on a node; by default, the plugin's filter has 10 s.
	filterTimeout = 3 * time.Second

	// worldTimeout is more than all nodes need.
	worldTimeout = 60 * time.Second
)

// question is one line of input.
type question struct {
	// Gates are all feature gates that differ from the default in any line.
	Gates  map[string]bool `json:"gates"`
	Worlds []*world        `json:"worlds"`
}

// world is a cluster, and a pod that waits for a node.
type world struct {
	Pod     *corev1.Pod                  `json:"pod"`
	Nodes   []*corev1.Node               `json:"nodes"`
	Claims  []*resourceapi.ResourceClaim `json:"claims"`
	Classes []*resourceapi.DeviceClass   `json:"classes"`
	Slices  []*resourceapi.ResourceSlice `json:"slices"`
	// Rules are DeviceTaintRules, of a version that the release of Kubernetes reads.
	Rules []json.RawMessage `json:"rules"`
}

// answer is the scheduler's answer for one world.
type answer struct {
	// Verdict is "fits", "unschedulable" or "error". An error ends the attempt on all nodes.
	Verdict string `json:"verdict"`
	Text    string `json:"text,omitempty"`
	// PreFilter is the status of what is checked once for the pod; nil if it is successful.
	PreFilter *status `json:"preFilter,omitempty"`
	// Nodes are the statuses of the filters by node; none if the pod does not get there.
	Nodes map[string]status `json:"nodes,omitempty"`
}

type status struct {
	// Code is "Success", "Unschedulable", "UnschedulableAndUnresolvable" or "Error".
	Code string `json:"code"`
	// Plugin is the one that decided.
	Plugin string `json:"plugin,omitempty"`
	Text   string `json:"text,omitempty"`
}

type failure struct {
	Error string `json:"error"`
}

func main() {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	encoder := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		if err := encoder.Encode(answerLine(lines.Bytes())); err != nil {
			fmt.Fprintln(os.Stderr, "drakit-scheduler:", err)
			os.Exit(1)
		}
	}
}

func answerLine(line []byte) any {
	var asked question
	if err := json.Unmarshal(line, &asked); err != nil {
		return failure{Error: err.Error()}
	}
	if err := utilfeature.DefaultMutableFeatureGate.SetFromMap(asked.Gates); err != nil {
		return failure{Error: err.Error()}
	}
	answers := make([]any, len(asked.Worlds))
	slots := make(chan struct{}, worldsAtOnce)
	var running sync.WaitGroup
	for index, each := range asked.Worlds {
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			if found, err := schedule(each); err != nil {
				answers[index] = failure{Error: err.Error()}
			} else {
				answers[index] = found
			}
		})
	}
	running.Wait()
	return map[string]any{"answers": answers}
}

func (w *world) objects() ([]runtime.Object, error) {
	var all []runtime.Object
	for _, each := range w.Nodes {
		all = append(all, each)
	}
	for _, each := range w.Claims {
		all = append(all, each)
	}
	for _, each := range w.Classes {
		all = append(all, each)
	}
	for _, each := range w.Slices {
		all = append(all, each)
	}
	for _, each := range w.Rules {
		rule, _, err := scheme.Codecs.UniversalDeserializer().Decode(each, nil, nil)
		if err != nil {
			return nil, err
		}
		all = append(all, rule)
	}
	return all, nil
}

func schedule(w *world) (*answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), worldTimeout)
	defer cancel()
	objects, err := w.objects()
	if err != nil {
		return nil, err
	}
	client := fake.NewClientset(objects...)
	factory := informers.NewSharedInformerFactory(client, 0)
	profiles, err := defaultProfiles()
	if err != nil {
		return nil, err
	}
	sched, err := scheduler.New(ctx, client, factory, nil, recorders, scheduler.WithProfiles(profiles...))
	if err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	defer cancel()
	if err := synced(ctx, factory, sched); err != nil {
		return nil, err
	}
	profile := sched.Profiles[corev1.DefaultSchedulerName]
	snapshot, ok := profile.SnapshotSharedLister().(*internalcache.Snapshot)
	if !ok {
		return nil, errors.New("the scheduler's snapshot is of another type")
	}
	if err := sched.Cache.UpdateSnapshot(klog.Background(), snapshot); err != nil {
		return nil, err
	}
	info, err := framework.NewPodInfo(w.Pod)
	if err != nil {
		return nil, err
	}
	err = attempt(ctx, sched, profile, info)
	found := &answer{Verdict: "fits"}
	if err != nil {
		found.Verdict, found.Text = "error", err.Error()
		if unfit := new(framework.FitError); errors.As(err, &unfit) {
			found.Verdict = "unschedulable"
		}
	}
	if err := found.ask(ctx, profile, w.Pod); err != nil {
		return nil, err
	}
	return found, ctx.Err()
}

// defaultProfiles are those of a scheduler without a configuration, but for the timeout.
func defaultProfiles() ([]config.KubeSchedulerProfile, error) {
	defaults, err := latest.Default()
	if err != nil {
		return nil, err
	}
	for _, profile := range defaults.Profiles {
		for _, plugin := range profile.PluginConfig {
			if args, ok := plugin.Args.(*config.DynamicResourcesArgs); ok {
				args.FilterTimeout = &metav1.Duration{Duration: filterTimeout}
			}
		}
	}
	return defaults.Profiles, nil
}

// ask runs the filters once more, because an attempt tells at most one error.
func (a *answer) ask(ctx context.Context, profile framework.Framework, pod *corev1.Pod) error {
	state := framework.NewCycleState()
	restricted, before, _ := profile.RunPreFilterPlugins(ctx, state, pod)
	if !before.IsSuccess() {
		a.PreFilter = statusOf(before)
		return nil
	}
	nodes, err := profile.SnapshotSharedLister().NodeInfos().List()
	if err != nil {
		return err
	}
	a.Nodes = make(map[string]status, len(nodes))
	for _, node := range nodes {
		name := node.Node().Name
		if !restricted.AllNodes() && !restricted.NodeNames.Has(name) {
			a.Nodes[name] = status{Code: fwk.UnschedulableAndUnresolvable.String(), Plugin: "PreFilter"}
			continue
		}
		a.Nodes[name] = *statusOf(profile.RunFilterPluginsWithNominatedPods(ctx, state, pod, node))
	}
	return nil
}

func statusOf(found *fwk.Status) *status {
	if found == nil { // no plugin objects
		return &status{Code: fwk.Success.String()}
	}
	return &status{Code: found.Code().String(), Plugin: found.Plugin(), Text: found.Message()}
}

// synced waits until the scheduler has seen all objects.
func synced(ctx context.Context, factory informers.SharedInformerFactory, sched *scheduler.Scheduler) error {
	factory.WaitForCacheSync(ctx.Done())
	return sched.WaitForHandlersSync(ctx)
}
