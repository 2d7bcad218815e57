// Command scripted is a driver that follows the script on its standard input, and writes the requests
// that it gets to its standard output. The suite of the backend contract (tests/unit/homes) runs it.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	backend "drakit.dev/backend"
	backendv1 "drakit.dev/backend/v1"
)

// does is the behavior for calls that concern one device.
type does struct {
	Result  []byte
	Error   *string
	Bug     bool
	Pending bool
	Waits   bool
	Checks  bool
}

// order is a line of the input. Only one of its fields is set.
type order struct {
	List   []byte
	Health []byte
	Fail   string
	Does   map[string]does
	Let    bool
}

// parameters are the same as those of the suite's driver in Python.
type parameters struct {
	Color string `json:"color"`
	Watts int    `json:"watts"`
	At    struct {
		X int `json:"x"`
	} `json:"at"`
	Rooms []struct {
		Name string `json:"name"`
	} `json:"rooms"`
}

type driver struct {
	mutex  sync.Mutex
	does   map[string]does
	let    chan struct{}
	list   *backendv1.WatchDevicesResponse
	health *backendv1.WatchHealthResponse
	fail   error
	news   chan struct{}
}

func (d *driver) say(words ...any) {
	line, _ := json.Marshal(fmt.Sprint(words...))
	fmt.Println(string(line))
}

func (d *driver) take(given order) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	switch {
	case given.List != nil:
		d.list = &backendv1.WatchDevicesResponse{}
		must(proto.Unmarshal(given.List, d.list))
	case given.Health != nil:
		d.health = &backendv1.WatchHealthResponse{}
		must(proto.Unmarshal(given.Health, d.health))
	case given.Fail != "":
		d.fail = errors.New(given.Fail)
	case given.Does != nil:
		d.does = given.Does
	case given.Let:
		close(d.let)
		d.let = make(chan struct{})
	}
	close(d.news)
	d.news = make(chan struct{})
}

func (d *driver) WatchDevices(ctx context.Context, publish func(*backendv1.WatchDevicesResponse)) error {
	for {
		d.mutex.Lock()
		list, fail, news := d.list, d.fail, d.news
		d.fail = nil
		d.mutex.Unlock()
		if fail != nil {
			return fail
		}
		if list != nil {
			publish(list)
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil
		}
	}
}

func (d *driver) WatchHealth(ctx context.Context, publish func(*backendv1.WatchHealthResponse)) error {
	for {
		d.mutex.Lock()
		health, news := d.health, d.news
		d.mutex.Unlock()
		if health != nil {
			publish(health)
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil
		}
	}
}

func (d *driver) called(what string, claim *backendv1.Claim) ([]does, error) {
	var all []does
	var failure error
	for _, device := range claim.GetDevices() {
		d.say(what, " ", device.GetName())
		d.mutex.Lock()
		behavior, ok := d.does[device.GetName()]
		let := d.let
		d.mutex.Unlock()
		if !ok {
			edits := &backendv1.Edits{Env: map[string]string{"GPU": device.GetName()}}
			behavior.Result, _ = proto.Marshal(&backendv1.PreparedClaim{Edits: []*backendv1.Edits{edits}})
			behavior.Checks = true
		}
		if behavior.Waits {
			<-let
		}
		d.say(what, " ", device.GetName(), " ends")
		if behavior.Bug {
			panic("a bug")
		}
		if behavior.Error != nil && failure == nil {
			failure = errors.New(*behavior.Error)
			if behavior.Pending {
				failure = fmt.Errorf("%s: %w", *behavior.Error, backend.ErrReleasePending)
			}
		}
		all = append(all, behavior)
	}
	return all, failure
}

func (d *driver) Prepare(_ context.Context, claim *backendv1.Claim) (*backendv1.PreparedClaim, error) {
	for _, device := range claim.GetDevices() {
		wanted := parameters{Color: "white", Watts: 5}
		if err := backend.DecodeParameters(device.GetParameters(), &wanted); err != nil {
			return nil, err
		}
		shown, _ := json.Marshal(wanted)
		d.say("parameters ", string(shown))
	}
	all, err := d.called("prepare", claim)
	if err != nil {
		return nil, err
	}
	result := &backendv1.PreparedClaim{}
	for _, each := range all {
		must(proto.UnmarshalOptions{Merge: true}.Unmarshal(each.Result, result))
		if len(result.GetDevices()) < len(result.GetEdits()) {
			result.Devices = append(result.Devices, &backendv1.PreparedDevice{})
		}
	}
	return result, nil
}

func (d *driver) Unprepare(_ context.Context, claim *backendv1.Claim) error {
	_, err := d.called("unprepare", claim)
	return err
}

func (d *driver) Check(_ context.Context, claim *backendv1.Claim) (bool, error) {
	all, err := d.called("check", claim)
	for _, each := range all {
		if !each.Checks {
			return false, err
		}
	}
	return true, err
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	d := &driver{let: make(chan struct{}), news: make(chan struct{})}
	go func() {
		lines := bufio.NewReader(os.Stdin)
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				stop()
				return
			}
			var given order
			must(json.Unmarshal(line, &given))
			d.take(given)
			d.say("ok")
		}
	}()
	must(backend.Serve(ctx, d, backend.Options{
		Socket:      os.Args[1],
		Info:        &backendv1.GetInfoResponse{DriverName: os.Args[2]},
		Log:         slog.New(slog.NewTextHandler(os.Stderr, nil)),
		StopTimeout: 10 * time.Second,
	}))
}
