package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"
)

type object = map[string]any

func node(name string) object { return object{"metadata": object{"name": name}} }

func class(expression string) object {
	selector := object{"cel": object{"expression": expression}}
	return object{"metadata": object{"name": "c"}, "spec": object{"selectors": []object{selector}}}
}

func slice(node, pool string, devices ...object) object {
	return object{
		"metadata": object{"name": node + "-" + pool},
		"spec": object{
			"driver": "a", "nodeName": node, "devices": devices,
			"pool": object{"name": pool, "generation": 1, "resourceSliceCount": 1},
		},
	}
}

func claim(requests ...object) object {
	return object{
		"metadata": object{"name": "new", "namespace": "lab"},
		"spec":     object{"devices": object{"requests": requests}},
	}
}

func exact(name string, count int) object {
	exactly := object{"deviceClassName": "c", "allocationMode": "ExactCount", "count": count}
	return object{"name": name, "exactly": exactly}
}

// world has nodes n1 and n2, of which only n1 has a device.
func world(changes object) object {
	asked := object{
		"nodes":   []object{node("n1"), node("n2")},
		"classes": []object{class(`device.driver == "a"`)},
		"slices":  []object{slice("n1", "p", object{"name": "d"})},
		"claims":  []object{claim(exact("r", 1))},
		"gates":   object{"DRAPrioritizedList": true},
	}
	for key, value := range changes {
		asked[key] = value
	}
	return asked
}

func line(t *testing.T, asked object) string {
	t.Helper()
	text, err := json.Marshal(object{"verdict": asked})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// outcomes returns the outcome and the message of each verdict.
func outcomes(t *testing.T, answer object) (outcomes, texts []string) {
	t.Helper()
	if answer["error"] != nil {
		t.Fatalf("got %v", answer)
	}
	for _, each := range answer["verdicts"].([]any) {
		found := each.(object)
		text, _ := found["text"].(string)
		outcomes, texts = append(outcomes, found["outcome"].(string)), append(texts, text)
	}
	return outcomes, texts
}

func TestVerdicts(t *testing.T) {
	device := object{"driver": "a", "pool": "p", "device": "d", "request": "r"}
	share := object{"driver": "a", "pool": "p", "device": "d", "request": "r", "shareID": "s"}
	admin := object{"driver": "a", "pool": "p", "device": "d", "request": "r", "adminAccess": true}
	consumable := object{"DRAConsumableCapacity": true}
	shared := []object{slice("n1", "p", object{"name": "d", "allowMultipleAllocations": true})}
	for name, test := range map[string]struct {
		changes object
		want    []string
		text    string
	}{
		"the-device-is-free":    {object{}, []string{"allocated", "unavailable"}, ""},
		"the-device-is-in-use":  {object{"inUse": []object{device}}, []string{"unavailable", "unavailable"}, ""},
		"an-admin-uses-it":      {object{"inUse": []object{admin}}, []string{"allocated", "unavailable"}, ""},
		"a-share-is-in-use":     {object{"slices": shared, "inUse": []object{share}, "gates": consumable}, []string{"allocated", "unavailable"}, ""},
		"shares-are-turned-off": {object{"slices": shared, "inUse": []object{share}}, []string{"unavailable", "unavailable"}, ""},
		"a-selector-fails": {
			object{"classes": []object{class(`device.attributes["a"].model == "x"`)}},
			[]string{"fatal", "unavailable"}, "no such key: model",
		},
		"a-feature-is-off": {
			object{"claims": []object{claim(object{"name": "r", "firstAvailable": []object{
				{"name": "s", "deviceClassName": "c", "allocationMode": "ExactCount", "count": 1}}})}, "gates": object{}},
			[]string{"fatal", "fatal"}, "the DRAPrioritizedList feature is disabled",
		},
		"no-node": {object{"nodes": []object{}}, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			found, texts := outcomes(t, ask(t, line(t, world(test.changes)))[0])
			if !reflect.DeepEqual(found, test.want) {
				t.Errorf("got %v (%v), want %v", found, texts, test.want)
			}
			if len(texts) > 0 && (!strings.Contains(texts[0], test.text) || test.text == "" && texts[0] != "") {
				t.Errorf("got the text %q, want %q", texts[0], test.text)
			}
		})
	}
}

func TestFieldsThatThisReleaseDoesNotHave(t *testing.T) {
	device := object{"name": "d", "fromTheFuture": 1, "Attributes": object{}}
	answer := ask(t, line(t, world(object{"slices": []object{slice("n1", "p", device)}})))[0]
	want := []any{`unknown field "slices[0].spec.devices[0].Attributes"`, `unknown field "slices[0].spec.devices[0].fromTheFuture"`}
	if !reflect.DeepEqual(answer["unknown"], want) {
		t.Errorf("got %v", answer["unknown"])
	}
}

func TestAQuestionBeyondALimitIsRefused(t *testing.T) {
	nodes := make([]object, maxNodes+1)
	for i := range nodes {
		nodes[i] = node(fmt.Sprint("n", i))
	}
	large := node(strings.Repeat("n", maxVerdict))
	for _, each := range []object{{"nodes": nodes}, {"nodes": []object{large}}, {"nodes": 1}} {
		answers := ask(t, line(t, world(each)), line(t, world(nil)))
		if answers[0]["error"] == nil {
			t.Errorf("got %v", answers[0])
		}
		if found, _ := outcomes(t, answers[1]); found[0] != "allocated" {
			t.Errorf("the next question: got %v", found)
		}
	}
}

// manyWays is a claim for which the allocator tries each order of devices: 13 need the same value, and 12
// have it.
func manyWays() object {
	var devices, requests []object
	for i := range 24 {
		attributes := object{"v": object{"int": i % 2}}
		devices = append(devices, object{"name": fmt.Sprint("d", i), "attributes": attributes})
	}
	for i := range 13 {
		requests = append(requests, exact(fmt.Sprint("r", i), 1))
	}
	body := claim(requests...)
	spec := body["spec"].(object)["devices"].(object)
	spec["constraints"] = []object{{"matchAttribute": "a/v"}}
	return world(object{
		"claims": []object{body},
		"slices": []object{slice("n1", "p", devices...)},
		"gates":  object{"DRAConsumableCapacity": true},
	})
}

func TestASearchWithoutEndIsUndecided(t *testing.T) {
	began := time.Now()
	answers := ask(t, line(t, manyWays()), line(t, world(nil)))
	if took := time.Since(began); took > verdictTimeout+time.Second {
		t.Errorf("it took %s", took)
	}
	if found, texts := outcomes(t, answers[0]); !reflect.DeepEqual(found, []string{"undecided", "undecided"}) {
		t.Errorf("got %v, %v", found, texts)
	}
	if found, _ := outcomes(t, answers[1]); found[0] != "allocated" {
		t.Errorf("the next question: got %v", found)
	}
}

func TestAPanicOfTheAllocatorIsUndecided(t *testing.T) {
	answers := ask(t, line(t, world(object{"claims": []any{nil}})), line(t, world(nil)))
	found, texts := outcomes(t, answers[0])
	if !reflect.DeepEqual(found, []string{"undecided", "undecided"}) || !strings.Contains(texts[1], "the allocator panics") {
		t.Errorf("got %v, %v", found, texts)
	}
	if found, _ := outcomes(t, answers[1]); found[0] != "allocated" {
		t.Errorf("the next question: got %v", found)
	}
}

// slow is a selector that costs 10 ms, and hides that it was interrupted.
func slow() object {
	const numbers = `[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31]`
	return class(numbers + `.all(a, ` + numbers + `.all(b, ` + numbers + `.all(c, a + b + c >= 0))) && false`)
}

func TestASearchThatCannotBeInterruptedEndsTheProcessAfterItsAnswer(t *testing.T) {
	var devices []object
	for i := range 10000 {
		devices = append(devices, object{"name": fmt.Sprint("d", i)})
	}
	asked := world(object{"classes": []object{slow()}, "slices": []object{slice("n1", "p", devices...)}})
	var out bytes.Buffer
	began := time.Now()
	err := serve(strings.NewReader(line(t, asked)+"\n"), &out, selectorFeatures(nil))
	if took := time.Since(began); err != errAbandoned || took > verdictTimeout+verdictGrace+time.Second {
		t.Errorf("got %v after %s", err, took)
	}
	var answer object
	if err := json.Unmarshal(out.Bytes(), &answer); err != nil {
		t.Fatal(err)
	}
	if found, _ := outcomes(t, answer); !reflect.DeepEqual(found, []string{"undecided", "undecided"}) {
		t.Errorf("got %v", found)
	}
}

func TestTextsAreShort(t *testing.T) {
	expression := `device.attributes["a"].` + strings.Repeat("é", 2*maxText)
	_, texts := outcomes(t, ask(t, line(t, world(object{"classes": []object{class(expression)}})))[0])
	if len(texts[0]) > maxText+3 || !utf8.ValidString(texts[0]) || !strings.HasSuffix(texts[0], "...") {
		t.Errorf("got %q", texts[0])
	}
}

func TestTheRelease(t *testing.T) {
	answer := ask(t, `{"release": {}}`)[0]
	if version, ok := answer["kubernetes"].(string); !ok || version != "" && !strings.HasPrefix(version, "1.3") {
		t.Errorf("got %v", answer)
	}
}

func TestAQuestionThatTakesTooMuchMemoryEndsTheProcess(t *testing.T) {
	var ended atomic.Bool
	stop := watchMemory(func() { ended.Store(true) })
	defer debug.FreeOSMemory() // for the tests after this one
	defer stop()
	var kept [][]byte
	for range 1000 {
		part := make([]byte, 1<<20)
		for i := range part {
			part[i] = 1
		}
		kept = append(kept, part)
		if ended.Load() {
			break
		}
	}
	if !ended.Load() || len(kept) > hardMemory>>20+64 {
		t.Errorf("%d MiB", len(kept))
	}
}

func TestEachFeatureHasItsGates(t *testing.T) {
	on := gates{}
	for _, needed := range featureGates {
		for _, gate := range needed {
			on[gate] = true
		}
	}
	for _, features := range []any{selectorFeatures(on), allocatorFeatures(on)} {
		fields := reflect.ValueOf(features)
		for i := range fields.NumField() {
			if name := fields.Type().Field(i).Name; !fields.Field(i).Bool() && name != neverOn {
				t.Errorf("feature %s has no gates", name)
			}
		}
	}
}
