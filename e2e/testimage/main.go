// Helpers for containers that were given a device: each does real input and output on it.
//
// One static program that is called by several names (see the symbolic links of the test image).
package main

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

var tools = map[string]func(arguments []string) error{
	"kvm-version": kvmVersion,
	"blockio":     blockIO,
}

func main() {
	name := filepath.Base(os.Args[0])
	tool, known := tools[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%s: call me by the name of a tool\n", name)
		os.Exit(2)
	}
	if err := tool(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
}

// kvmVersion asks the kernel's KVM for the version of its interface, and prints it.
func kvmVersion([]string) error {
	const getAPIVersion = 0xAE00 // KVM_GET_API_VERSION, <linux/kvm.h>
	device, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer device.Close()
	version, _, errno := syscall.Syscall(syscall.SYS_IOCTL, device.Fd(), getAPIVersion, 0)
	if errno != 0 {
		return fmt.Errorf("ioctl KVM_GET_API_VERSION on /dev/kvm: %w", errno)
	}
	fmt.Println(version)
	return nil
}

// blockIO writes random bytes to the start of a block device and reads them back from the device
// itself: O_DIRECT passes the page cache by, which would know them anyway.
func blockIO(arguments []string) error {
	if len(arguments) != 1 {
		return fmt.Errorf("usage: blockio PATH")
	}
	path := arguments[0]
	written, err := alignedBuffer()
	if err != nil {
		return err
	}
	rand.Read(written)
	if err := writeStart(path, written); err != nil {
		return err
	}
	read, err := alignedBuffer()
	if err != nil {
		return err
	}
	if err := readStart(path, read); err != nil {
		return err
	}
	if !bytes.Equal(written, read) {
		return fmt.Errorf("%s gave back other bytes than were written", path)
	}
	fmt.Printf("%s ok\n", path)
	return nil
}

// alignedBuffer gives 64 KiB at a page's start, as O_DIRECT demands.
func alignedBuffer() ([]byte, error) {
	const length = 64 * 1024
	return syscall.Mmap(
		-1, 0, length, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE,
	)
}

func writeStart(path string, data []byte) error {
	device, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer device.Close()
	var status syscall.Stat_t
	if err := syscall.Fstat(int(device.Fd()), &status); err != nil {
		return err
	}
	if status.Mode&syscall.S_IFMT != syscall.S_IFBLK {
		return fmt.Errorf("%s is not a block device", path)
	}
	if _, err := device.WriteAt(data, 0); err != nil {
		return err
	}
	return device.Sync()
}

func readStart(path string, data []byte) error {
	device, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer device.Close()
	_, err = device.ReadAt(data, 0)
	return err
}
