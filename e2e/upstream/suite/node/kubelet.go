// What the specs of a node need of the rest of their package, for a node of a cluster with systemd.
//
// The build puts this file beside k8s.io/kubernetes/test/e2e_node/dra_test.go. The specs run on the node.
package e2enode

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"time"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"
	"github.com/onsi/gomega/gstruct"
	"github.com/onsi/gomega/types"

	"k8s.io/client-go/kubernetes"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/kubernetes/test/e2e/framework"
	e2emetrics "k8s.io/kubernetes/test/e2e/framework/metrics"
	e2enode "k8s.io/kubernetes/test/e2e/framework/node"
)

const (
	// nodeVariable names the node that the specs run on.
	nodeVariable = "DRAKIT_NODE"

	healthURL      = "http://127.0.0.1:10248/healthz"
	kubeletTimeout = 2 * time.Minute
)

func getNodeName(context.Context, *framework.Framework) string {
	return os.Getenv(nodeVariable)
}

func restartKubelet(ctx context.Context, _ bool) {
	systemctl(ctx, "restart")
	waitHealthy(ctx, true)
}

// mustStopKubelet stops the kubelet, and returns a function that starts it again.
func mustStopKubelet(ctx context.Context, f *framework.Framework) func(ctx context.Context) {
	systemctl(ctx, "stop")
	waitHealthy(ctx, false)
	return func(ctx context.Context) {
		systemctl(ctx, "start")
		waitHealthy(ctx, true)
		ready := e2enode.WaitForNodeToBeReady(ctx, f.ClientSet, getNodeName(ctx, f), kubeletTimeout)
		gomega.Expect(ready).To(gomega.BeTrueBecause("the kubelet was started"))
	}
}

func systemctl(ctx context.Context, action string) {
	ginkgo.By(action + " the kubelet")
	output, err := exec.CommandContext(ctx, "systemctl", action, "kubelet").CombinedOutput()
	framework.ExpectNoError(err, "systemctl %s kubelet: %s", action, output)
}

func waitHealthy(ctx context.Context, healthy bool) {
	gomega.Eventually(ctx, func() bool {
		response, err := http.Get(healthURL)
		if err != nil {
			return false
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK
	}).WithTimeout(kubeletTimeout).Should(gomega.Equal(healthy))
}

func getKubeletMetrics(ctx context.Context) (e2emetrics.KubeletMetrics, error) {
	config, err := framework.LoadConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	text, err := client.CoreV1().RESTClient().Get().Resource("nodes").Name(os.Getenv(nodeVariable)).SubResource("proxy").Suffix("metrics").DoRaw(ctx)
	if err != nil {
		return nil, err
	}
	metrics := e2emetrics.NewKubeletMetrics()
	return metrics, testutil.ParseMetrics(string(text), (*testutil.Metrics)(&metrics))
}

func timelessSample(value any) types.GomegaMatcher {
	return gstruct.PointTo(gstruct.MatchAllFields(gstruct.Fields{
		"Metric":    gstruct.Ignore(),
		"Value":     gomega.BeNumerically("==", value),
		"Timestamp": gstruct.Ignore(),
		"Histogram": gstruct.Ignore(),
	}))
}
