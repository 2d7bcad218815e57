// The kubelet of a release that speaks only version v1beta1 of its DRA API to drivers.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	os.Exit(cli.Run(kubelet.NewKubeletCommand()))
}
