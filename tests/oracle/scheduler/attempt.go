//go:build !kubernetes1.34 && !kubernetes1.35

package main

import (
	"context"

	"k8s.io/client-go/tools/events"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/profile"
)

// attempt looks for a node for the pod.
func attempt(
	ctx context.Context, sched *scheduler.Scheduler, profile framework.Framework, pod *framework.PodInfo,
) error {
	queued := &framework.QueuedPodInfo{PodInfo: pod}
	_, err := sched.SchedulePod(ctx, profile, framework.NewCycleState(), queued)
	return err
}

var recorders profile.RecorderFactory = func(string) events.EventRecorderLogger {
	return &events.FakeRecorder{}
}
