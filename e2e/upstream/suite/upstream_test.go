//go:build !drakit && !node

package suite

import _ "k8s.io/kubernetes/test/e2e/dra"
