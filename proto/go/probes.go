package backend

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/net/netutil"
)

const (
	// probeTimeout limits how long a request to the probe port takes.
	probeTimeout = 5 * time.Second

	// maxProbes limits the connections to the probe port, which any pod can reach.
	maxProbes = 16
)

// connectTimeout is the time after which a missing node plugin is logged. It is a variable for tests.
var connectTimeout = 10 * time.Second

// connectionStatus describes the connections of node plugins.
type connectionStatus struct {
	mutex sync.Mutex

	// requested is whether a node plugin has called GetInfo since the last stream of devices ended.
	// watching counts the streams of devices, and listed those on which devices were sent.
	requested        bool
	watching, listed int
}

func (c *connectionStatus) requestedName() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.requested = true
}

// watch records a stream of devices. Call onSent when devices were sent, and ended when it ends.
func (c *connectionStatus) watch() (onSent, ended func()) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.watching++
	sent := false
	onSent = func() {
		c.mutex.Lock()
		defer c.mutex.Unlock()
		if !sent {
			sent = true
			c.listed++
		}
	}
	ended = func() {
		c.mutex.Lock()
		defer c.mutex.Unlock()
		c.watching--
		if sent {
			c.listed--
		}
		c.requested = c.requested && c.watching > 0
	}
	return onSent, ended
}

func (c *connectionStatus) read() (requested bool, watching, listed int) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.requested, c.watching, c.listed
}

// notConnected returns why no node plugin uses this process, or an empty string. A successor in an update
// needs no connection while its predecessor serves.
func (s *service) notConnected() string {
	requested, watching, _ := s.status.read()
	switch {
	case watching > 0 || requested && s.socket.previous.serves():
		return ""
	case requested:
		return "a node plugin has requested the driver's name, but does not watch its devices: " +
			"the Event BackendRefused on the Node has the reason"
	}
	return fmt.Sprintf("no node plugin has connected to %s: add an entry for its directory, with driver %s, to "+
		"backends.allowed in the values of drakit's release, and check that the node plugin runs on this node",
		s.socket.path, s.info.GetDriverName())
}

// notReady returns why pods cannot get the devices yet, or an empty string.
func (s *service) notReady() string {
	_, known, err, _ := s.devices.read()
	_, watching, listed := s.status.read()
	problem := s.notConnected()
	_, hasPolicies := s.driver.(PolicyApplier)
	switch {
	case s.stopping.Err() != nil:
		return "the backend is stopping"
	case err != nil:
		return "the devices cannot be read: " + sentence(err)
	case problem != "":
		return problem
	case !known && (watching > 0 || !hasPolicies):
		return "the driver has not listed its devices yet"
	case watching > 0 && listed == 0:
		return "no node plugin has received the devices yet"
	}
	return ""
}

// logConnection logs once if no node plugin has used this process for a while, and again if that
// happens after a later connection.
func (s *service) logConnection(ctx context.Context, timeout time.Duration) {
	ticker := time.NewTicker(timeout / 10)
	defer ticker.Stop()
	since, logged := time.Now(), false
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		problem := s.notConnected()
		if problem == "" {
			since, logged = time.Now(), false
		} else if !logged && time.Since(since) >= timeout {
			s.log.Warn("driver is not connected", "reason", problem)
			logged = true
		}
	}
}

// serveProbes serves the probes and metrics on a port, until the result is closed.
func (s *service) serveProbes(port int) (io.Closer, error) {
	listener, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
	if err != nil {
		return nil, fmt.Errorf("cannot listen on the probe port: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", s.probe("unhealthy", s.calls.notAlive))
	mux.HandleFunc("GET /readyz", s.probe("not ready", s.notReady))
	mux.HandleFunc("GET /metrics", func(response http.ResponseWriter, _ *http.Request) {
		connected := 0
		if _, watching, _ := s.status.read(); watching > 0 {
			connected = 1
		}
		response.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		fmt.Fprintf(response, "%s# HELP drakit_driver_connected Whether a node plugin watches the devices.\n"+
			"# TYPE drakit_driver_connected gauge\ndrakit_driver_connected %d\n", s.calls.metrics(), connected)
	})
	server := &http.Server{
		Handler: mux, ReadTimeout: probeTimeout, WriteTimeout: probeTimeout, IdleTimeout: probeTimeout,
		MaxHeaderBytes: 8192,
	}
	go server.Serve(netutil.LimitListener(listener, maxProbes))
	return server, nil
}

// probe serves a probe whose check returns a problem, or an empty string. Any pod can read the response,
// so it is only a status. The log has the reason.
func (s *service) probe(failed string, check func() string) http.HandlerFunc {
	var mutex sync.Mutex
	logged := ""
	return func(response http.ResponseWriter, request *http.Request) {
		mutex.Lock()
		problem := check()
		if before := logged; problem != before {
			if logged = problem; problem == "" {
				s.log.Info("probe succeeds again", "probe", request.URL.Path)
			} else {
				s.log.Warn("probe fails", "probe", request.URL.Path, "reason", problem)
			}
		}
		mutex.Unlock()
		if problem != "" {
			http.Error(response, failed, http.StatusServiceUnavailable)
			return
		}
		io.WriteString(response, "ok\n")
	}
}
