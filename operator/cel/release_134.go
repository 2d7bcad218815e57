//go:build kubernetes1.34

package main

// sortsPools is whether the allocator sorts the pools of a node, instead of using the order of a Go map.
const sortsPools = false

// neverOn is a feature of the allocator that the scheduler of the release never enables.
const neverOn = ""

// onlyThisNode returns whether an error concerns only one node.
func onlyThisNode(error) bool { return false }
