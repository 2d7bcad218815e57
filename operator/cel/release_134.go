//go:build kubernetes1.34

package main

// sortsPools: the allocator tries the pools of a node in an order, not that of a Go map.
const sortsPools = false

// neverOn is a feature of the allocator that the scheduler of the release never turns on.
const neverOn = ""

// onlyThisNode tells whether an error concerns only one node.
func onlyThisNode(error) bool { return false }
