//go:build node

package suite

// The specs that run on a node, with drakit in the place of the test driver: the build adds this package.
import _ "drakit.dev/e2e/upstream/e2e_node"
