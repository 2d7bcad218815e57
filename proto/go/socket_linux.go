package backend

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// setMode sets the permission bits of a new socket, and returns it opened.
//
// A process that can write to the directory can replace the socket with a link to any file. Therefore,
// the mode is set through a descriptor. A descriptor opened with O_PATH does not support fchmod, so the
// mode is set through its path in /proc.
func setMode(path string, mode fs.FileMode) (*os.File, fs.FileInfo, error) {
	descriptor, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("cannot open the new socket %s: %w", path, err)
	}
	file := os.NewFile(uintptr(descriptor), path)
	found, err := file.Stat()
	if err == nil && !isOurs(found) {
		err = fmt.Errorf("the new socket %s was replaced: let only the backend's user write to its directory", path)
	}
	if err == nil {
		err = os.Chmod(fmt.Sprintf("/proc/self/fd/%d", descriptor), mode)
	}
	if err != nil {
		return nil, nil, errors.Join(err, file.Close())
	}
	return file, found, nil
}

// isOurs returns whether a file is a socket of this user, and not another name of an older one.
func isOurs(found fs.FileInfo) bool {
	status, ok := found.Sys().(*syscall.Stat_t)
	return ok && found.Mode().Type() == fs.ModeSocket && int(status.Uid) == os.Geteuid() && status.Nlink == 1
}

// peerUser returns the ID of the user of the process at the other end of a connection.
func peerUser(connection *net.UnixConn) (uint32, error) {
	raw, err := connection.SyscallConn()
	if err != nil {
		return 0, err
	}
	var credentials *unix.Ucred
	var failure error
	err = raw.Control(func(descriptor uintptr) {
		credentials, failure = unix.GetsockoptUcred(int(descriptor), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, failure); err != nil {
		return 0, err
	}
	return credentials.Uid, nil
}
