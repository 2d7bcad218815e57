// drakit-cel evaluates DRA selectors exactly as the scheduler does, because it contains the scheduler's code.
//
// It reads one JSON object per line from standard input, and writes one JSON object per line to standard output,
// in the same order. Its only state is compiled expressions. It ends when standard input ends, and when a
// question takes too much memory or time. The operator and `kubectl drakit` start it and restart it when it ends;
// see explain/drakit_explain/cel/helper.py for the other side.
//
// Operations:
//
//	{"select": {"expressions": [...], "devices": [...]}}   which devices the expressions select
//	{"reads": {"expressions": [...]}}                      which attributes and capacities they read
//	{"verdict": {"nodes": [...], "claims": [...], ...}}    whether the allocator finds devices on nodes
//	{"release": {}}                                        which release of Kubernetes the code is from
//
// A build contains the code of one minor release of Kubernetes, in its newest patch release. go.mod is for
// 1.36, and go-MINOR.mod for another release that a cluster can have. release_*.go contains the differences.
// Build the program for another release with
//
//	go build -modfile=go-1.37.mod -tags=kubernetes1.37 -o drakit-cel-1.37
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"k8s.io/dynamic-resource-allocation/cel"
)

const (
	// maxLine limits one request. The client splits larger ones.
	maxLine = 32 << 20

	// maxExpressions limits the cached compiled expressions.
	maxExpressions = 256
)

// request is one line of input. Exactly one field is set.
type request struct {
	Select  *selectRequest  `json:"select,omitempty"`
	Reads   *readsRequest   `json:"reads,omitempty"`
	Verdict json.RawMessage `json:"verdict,omitempty"`
	Release *struct{}       `json:"release,omitempty"`
}

type releaseAnswer struct {
	// Kubernetes is a version such as 1.36.3. It is empty if the program was built without module versions.
	Kubernetes string `json:"kubernetes"`
}

// failure is the response to an unusable line.
type failure struct {
	Error string `json:"error"`
}

func main() {
	capacity := flag.Bool("consumable-capacity", true, "feature gate DRAConsumableCapacity")
	lists := flag.Bool("list-attributes", false, "feature gate DRAListTypeAttributes")
	flag.Parse()
	limitMemory()
	features := selectorFeatures(gates{"DRAConsumableCapacity": *capacity, "DRAListTypeAttributes": *lists})
	if err := serve(os.Stdin, os.Stdout, features); err != nil {
		fmt.Fprintln(os.Stderr, "drakit-cel:", err)
		os.Exit(1)
	}
}

func serve(input io.Reader, output io.Writer, features cel.Features) error {
	evaluator := &evaluator{features: features}
	evaluator.forget()
	in := bufio.NewReaderSize(input, 64<<10)
	out := bufio.NewWriter(output)
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	for {
		line, err := readLine(in)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		stop := watchMemory(func() { os.Exit(1) })
		err = encoder.Encode(answer(evaluator, line))
		stop()
		if err != nil {
			return err
		}
		if err := out.Flush(); err != nil {
			return err
		}
		if evaluator.abandoned {
			return errAbandoned
		}
		if liveMemory() > softMemory {
			evaluator.forget()
		}
	}
}

var errAbandoned = errors.New("a search for devices did not end, so the process does")

// readLine returns a line in separate memory, so that a large question leaves no large buffer behind.
func readLine(in *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := in.ReadSlice('\n')
		if len(line)+len(part) > maxLine {
			return nil, fmt.Errorf("a line has more than %d bytes", maxLine)
		}
		line = append(line, part...)
		if err == nil || err == io.EOF && len(line) > 0 {
			return line, nil
		}
		if err != bufio.ErrBufferFull {
			return nil, err
		}
	}
}

// answer never panics, because a bug in a library must not affect more than one response.
func answer(evaluator *evaluator, line []byte) (result any) {
	defer func() {
		if problem := recover(); problem != nil {
			result = failure{Error: fmt.Sprintf("internal error: %v", problem)}
		}
	}()
	var asked request
	if err := json.Unmarshal(line, &asked); err != nil {
		return failure{Error: err.Error()}
	}
	ctx := context.Background()
	var err error
	switch {
	case asked.Select != nil:
		result = evaluator.evaluate(ctx, asked.Select)
	case asked.Reads != nil:
		result = evaluator.reads(asked.Reads)
	case asked.Verdict != nil:
		result, err = evaluator.verdicts(ctx, asked.Verdict)
	case asked.Release != nil:
		result = releaseAnswer{Kubernetes: kubernetesVersion()}
	default:
		err = errors.New("no operation")
	}
	if err != nil {
		return failure{Error: short(err.Error())}
	}
	return result
}

// linked is the kubernetesVersion of a program for several releases, which renames the allocator's module.
var linked string

// kubernetesVersion is the version of the allocator's module, as a version of Kubernetes.
func kubernetesVersion() string {
	if linked != "" {
		return linked
	}
	built, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, module := range built.Deps {
		if module.Path == "k8s.io/dynamic-resource-allocation" {
			return strings.Replace(module.Version, "v0.", "1.", 1)
		}
	}
	return ""
}
