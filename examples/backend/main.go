// An example backend of drakit: a driver in Go, which runs as a separate program beside the node plugin.
//
// Its devices are "blinkers", files of a directory. blinkers.go implements them, service.go implements the
// backend contract, and socket.go creates the socket in the registration directory. For your own hardware,
// replace blinkers.go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc"

	backendv1 "drakit.dev/backend/v1"
)

const version = "0.1.0"

// stopTimeout limits how long calls in progress delay the shutdown. It is shorter than the 30 seconds after
// which the kubelet kills a pod.
const stopTimeout = 20 * time.Second

type options struct {
	driver     string
	socket     string
	blinkers   string
	state      string
	socketMode uint
	poll       time.Duration
}

func parse(arguments []string, output io.Writer) (options, error) {
	var chosen options
	flags := flag.NewFlagSet("blinkers", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.StringVar(&chosen.driver, "driver-name", "blinkers.example.com", "the driver's `name`")
	flags.StringVar(&chosen.socket, "socket",
		"/var/lib/kubelet/plugins/drakit.dev/backends/blinkers.sock",
		"`path` of the socket, in the registration directory of the node plugin")
	flags.StringVar(&chosen.blinkers, "blinkers", "/var/lib/blinkers",
		"the `directory` whose files are the blinkers; a path on the host, because containers mount the files")
	flags.StringVar(&chosen.state, "state", "/run/blinkers",
		"the `directory` of the records of which claim holds which blinker; a reboot may clear it, a restart must not")
	flags.UintVar(&chosen.socketMode, "socket-mode", 0o600,
		"permission `bits` of the socket; any process that can connect can prepare any claim")
	flags.DurationVar(&chosen.poll, "poll", time.Second, "the polling interval for the blinkers")
	if err := flags.Parse(arguments); err != nil {
		return options{}, err
	}
	switch {
	case flags.NArg() > 0:
		return options{}, fmt.Errorf("there is no argument %q; see -help", flags.Arg(0))
	case chosen.poll < time.Millisecond:
		return options{}, fmt.Errorf("-poll is %s: give a time of at least 1ms", chosen.poll)
	case chosen.socketMode > 0o777:
		return options{}, fmt.Errorf("-socket-mode is %#o: give at most 0777", chosen.socketMode)
	case !filepath.IsAbs(chosen.blinkers):
		// The container runtime mounts them, and does not know the working directory.
		return options{}, fmt.Errorf("-blinkers is %q: give an absolute path", chosen.blinkers)
	}
	return chosen, nil
}

// serve serves until the context ends, and then waits for calls in progress.
func serve(ctx context.Context, chosen options, log *slog.Logger) error {
	blinkers, err := openBlinkers(chosen.blinkers, chosen.state)
	if err != nil {
		return err
	}
	listener, err := listen(chosen.socket, os.FileMode(chosen.socketMode))
	if err != nil {
		return err
	}
	// Streams do not end by themselves, and GracefulStop would wait for them.
	stopping, stopStreams := context.WithCancel(context.Background())
	defer stopStreams()
	server := grpc.NewServer()
	backendv1.RegisterBackendServer(server, &service{
		driver: chosen.driver, blinkers: blinkers, poll: chosen.poll, stopping: stopping, log: log,
	})
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	log.Info("serving", "driver", chosen.driver, "socket", chosen.socket, "version", version)

	select {
	case err := <-ended:
		return fmt.Errorf("the server ended by itself: %w", err)
	case <-ctx.Done():
	}
	log.Info("stopping", "driver", chosen.driver)
	stopStreams()
	late := time.AfterFunc(stopTimeout, server.Stop)
	defer late.Stop()
	server.GracefulStop()
	return <-ended
}

func main() {
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	chosen, err := parse(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		log.Error("bad arguments", "error", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := serve(ctx, chosen, log); err != nil {
		log.Error("the backend failed", "error", err)
		os.Exit(1)
	}
}
