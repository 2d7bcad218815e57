package backend

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/net/http2"
)

// maxSocketPath is the kernel's limit (sun_path, without its final zero).
const maxSocketPath = 107

// maxRefused limits how many users a socket reports as refused.
const maxRefused = 16

// ownSocket is a listening socket that accepts only some users, and removes its path when it is closed.
type ownSocket struct {
	*net.UnixListener
	path, hidden string

	// file has the inode of the socket. While it is open, no other socket gets its number.
	file *os.File
	own  fs.FileInfo

	peers   []uint32
	refused []uint32
	log     *slog.Logger

	previous *predecessor
	removing sync.Once
}

// listen creates the socket at path, and replaces an existing one: a leftover of a crash, or the
// socket of the previous process in a rolling update, which keeps its connections. Only processes of
// the users in peers can connect.
//
// A rename puts the socket in place, so it is never visible with other permissions, and the path always
// exists. Before the rename, its name begins with a dot, and the node plugin ignores it.
func listen(path string, mode fs.FileMode, peers []uint32, log *slog.Logger) (*ownSocket, error) {
	name := filepath.Base(path)
	if !strings.HasSuffix(name, ".sock") || strings.HasPrefix(name, ".") {
		return nil, fmt.Errorf(
			"the node plugin does not find the socket %q: choose a name that ends in .sock and does not begin with a dot",
			path)
	}
	hidden := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%08x", rand.Uint32()))
	if longest := max(len(path), len(hidden)); longest > maxSocketPath {
		return nil, fmt.Errorf(
			"the path of socket %s has %d bytes, and the kernel takes %d: choose a shorter one",
			path, longest, maxSocketPath)
	}
	found, err := os.Lstat(path)
	if err == nil && found.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("%s exists and is not a socket: remove it, or choose another path", path)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("cannot listen in %s (does the node plugin run here?): %w",
			filepath.Dir(path), err)
	}
	// Go would remove the hidden name, which no longer exists.
	listener.SetUnlinkOnClose(false)
	s := &ownSocket{UnixListener: listener, path: path, hidden: hidden, peers: peers, log: log}
	if err := s.publish(mode); err != nil {
		return nil, errors.Join(err, os.Remove(hidden), s.Close())
	}
	return s, nil
}

func (s *ownSocket) publish(mode fs.FileMode) (err error) {
	if s.file, s.own, err = setMode(s.hidden, mode); err != nil {
		return err
	}
	s.previous = findPredecessor(s.path)
	return os.Rename(s.hidden, s.path)
}

// Accept returns the next connection of a process whose user is allowed.
func (s *ownSocket) Accept() (net.Conn, error) {
	for {
		connection, err := s.AcceptUnix()
		if err != nil {
			return nil, err
		}
		user, err := peerUser(connection)
		if err == nil && slices.Contains(s.peers, user) {
			return connection, nil
		}
		connection.Close()
		if len(s.refused) < maxRefused && !slices.Contains(s.refused, user) {
			s.refused = append(s.refused, user)
			s.log.Warn("connection refused: add the user to Options.PeerUIDs if the node plugin runs as it",
				"uid", user, "error", err)
		}
	}
}

// remove removes the socket, unless another instance has replaced it. Its connections continue.
func (s *ownSocket) remove() (err error) {
	s.removing.Do(func() {
		if !s.isAt(s.path) {
			return
		}
		// Another instance can put its socket in place at this moment.
		if err = os.Rename(s.path, s.hidden); err != nil {
			return
		}
		if s.isAt(s.hidden) {
			err = os.Remove(s.hidden)
		} else {
			err = os.Rename(s.hidden, s.path)
		}
	})
	return err
}

func (s *ownSocket) isAt(path string) bool {
	found, err := os.Lstat(path)
	return err == nil && s.own != nil && os.SameFile(found, s.own)
}

// Close removes the socket, and stops listening. gRPC can call it more than once.
func (s *ownSocket) Close() error {
	err := errors.Join(s.remove(), s.UnixListener.Close())
	s.file.Close()
	s.previous.close()
	return err
}

// predecessor is the process whose socket was replaced, while it still serves. In a rolling update,
// the node plugin uses it until it stops, so its successor waits without a connection.
type predecessor struct {
	connection net.Conn
	gone       chan struct{}
}

// findPredecessor connects to the process that listens at path. It returns nil if there is none.
func findPredecessor(path string) *predecessor {
	connection, err := net.Dial("unix", path)
	if err != nil {
		return nil
	}
	p := &predecessor{connection, make(chan struct{})}
	go p.wait()
	return p
}

// wait reads from the connection until the server ends it. The connection uses HTTP/2 without requests,
// because a server closes connections on which no protocol starts.
func (p *predecessor) wait() {
	defer close(p.gone)
	defer p.connection.Close()
	framer := http2.NewFramer(p.connection, p.connection)
	_, err := p.connection.Write([]byte(http2.ClientPreface))
	for err = errors.Join(err, framer.WriteSettings()); err == nil; {
		var frame http2.Frame
		frame, err = framer.ReadFrame()
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				err = framer.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !frame.IsAck() {
				err = framer.WritePing(true, frame.Data)
			}
		case *http2.GoAwayFrame:
			return
		}
	}
}

// serves returns whether the process still serves the node plugin.
func (p *predecessor) serves() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.gone:
		return false
	default:
		return true
	}
}

func (p *predecessor) close() {
	if p != nil {
		p.connection.Close()
	}
}
