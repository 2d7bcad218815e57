//go:build kubernetes1.35

package main

import (
	"errors"

	"k8s.io/dynamic-resource-allocation/structured"
)

// See release_134.go.

const sortsPools = false

const neverOn = ""

func onlyThisNode(err error) bool { return errors.Is(err, structured.ErrFailedAllocationOnNode) }
