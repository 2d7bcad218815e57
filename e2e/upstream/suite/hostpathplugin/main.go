// The proxy between a socket on a node and the suite, under the name by which the suite calls it.
//
// The suite reaches the TCP port by port forwarding, and keeps idle connections there. Each client
// of the socket (the kubelet) gets one of them. The program's other faces (a CSI driver) are not
// needed.
package main

import (
	"flag"
	"io"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	endpoint := flag.String("endpoint", "", "path of the socket")
	proxied := flag.String("proxy-endpoint", "", "tcp://:PORT")
	flag.Int("v", 0, "ignored")
	flag.Parse()
	if err := serve(*endpoint, strings.TrimPrefix(*proxied, "tcp://")); err != nil {
		log.Fatal(err)
	}
}

func serve(path, address string) error {
	port, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	// The client of the socket may not have made its directory yet.
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	// A socket of a predecessor that was killed.
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	socket, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	for {
		client, err := socket.Accept()
		if err != nil {
			return err
		}
		server, err := port.Accept()
		if err != nil {
			return err
		}
		go join(client, server)
	}
}

// join copies in both directions, until one side ends.
func join(client, server net.Conn) {
	ended := make(chan struct{}, 2)
	for _, pair := range [][2]net.Conn{{client, server}, {server, client}} {
		go func() {
			_, _ = io.Copy(pair[0], pair[1])
			ended <- struct{}{}
		}()
	}
	<-ended
	client.Close()
	server.Close()
}
