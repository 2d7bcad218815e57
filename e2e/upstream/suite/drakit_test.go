//go:build drakit

package suite

// The same specs, with drakit in the place of the test driver: the build adds this package.
import _ "drakit.dev/e2e/upstream/dra"
