package backend

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// maxSocketPath is the kernel's limit (sun_path, without its final zero).
const maxSocketPath = 107

// ownSocket is a listening socket that removes its path when it is closed.
type ownSocket struct {
	*net.UnixListener
	path string
	own  fs.FileInfo
	once sync.Once
}

// listen creates the socket at path, and replaces an existing one: a leftover of a crash, or the
// socket of the previous process in a rolling update, which keeps its connections.
//
// A rename puts the socket in place. So it is never visible with other permissions, and the path
// always exists. Before the rename, its name begins with a dot, and the node plugin ignores it.
func listen(path string, mode fs.FileMode) (*ownSocket, error) {
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
	own, err := publish(hidden, path, mode)
	if err != nil {
		return nil, errors.Join(err, os.Remove(hidden), listener.Close())
	}
	return &ownSocket{UnixListener: listener, path: path, own: own}, nil
}

func publish(hidden, path string, mode fs.FileMode) (fs.FileInfo, error) {
	if err := os.Chmod(hidden, mode); err != nil {
		return nil, err
	}
	own, err := os.Lstat(hidden)
	if err != nil {
		return nil, err
	}
	return own, os.Rename(hidden, path)
}

// Close stops listening, and removes the socket unless another instance has replaced it.
func (s *ownSocket) Close() (err error) {
	// gRPC can call Close more than once. Remove the socket only once, because another instance's
	// socket can reuse the inode number.
	s.once.Do(func() {
		if found, missing := os.Lstat(s.path); missing == nil && os.SameFile(found, s.own) {
			err = os.Remove(s.path)
		}
		err = errors.Join(err, s.UnixListener.Close())
	})
	return err
}
