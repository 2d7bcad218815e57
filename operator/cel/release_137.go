//go:build kubernetes1.37 || kubernetes1.38

package main

import (
	"errors"

	"k8s.io/dynamic-resource-allocation/structured"
)

// See release_134.go.

const sortsPools = true

const neverOn = ""

func onlyThisNode(err error) bool { return errors.Is(err, structured.ErrFailedAllocationOnNode) }
