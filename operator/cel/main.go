// drakit-cel evaluates DRA selectors exactly as the scheduler does, because it is the scheduler's code.
//
// It reads one JSON object a line from standard input and writes one JSON object a line to standard
// output, in the same order. It keeps no state but compiled expressions. It ends when standard input
// ends. The operator and `kubectl drakit` start it and restart it when it ends; see
// explain/drakit_explain/cel/helper.py for the other side.
//
// Operations:
//
//	{"select": {"expressions": [...], "devices": [...]}}   which devices the expressions select
//	{"reads": {"expressions": [...]}}                      which attributes and capacities they read
//	{"allocate": {...}}                                    whether the allocator finds devices on a node
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

	"k8s.io/dynamic-resource-allocation/cel"
)

const (
	// maxLine bounds one request; the client splits larger ones.
	maxLine = 32 << 20

	// maxExpressions bounds the compiled expressions that are kept.
	maxExpressions = 1024
)

// request is one line of input; exactly one field is set.
type request struct {
	Select   *selectRequest   `json:"select,omitempty"`
	Reads    *readsRequest    `json:"reads,omitempty"`
	Allocate *allocateRequest `json:"allocate,omitempty"`
}

// failure is the answer to a line that cannot be used.
type failure struct {
	Error string `json:"error"`
}

func main() {
	capacity := flag.Bool("consumable-capacity", true, "feature gate DRAConsumableCapacity")
	lists := flag.Bool("list-attributes", false, "feature gate DRAListTypeAttributes")
	flag.Parse()
	features := cel.Features{EnableConsumableCapacity: *capacity, EnableListTypeAttributes: *lists}
	if err := serve(os.Stdin, os.Stdout, features); err != nil {
		fmt.Fprintln(os.Stderr, "drakit-cel:", err)
		os.Exit(1)
	}
}

func serve(input io.Reader, output io.Writer, features cel.Features) error {
	evaluator := &evaluator{cache: cel.NewCache(maxExpressions, features), features: features}
	lines := bufio.NewScanner(input)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	out := bufio.NewWriter(output)
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	for lines.Scan() {
		if err := encoder.Encode(answer(evaluator, lines.Bytes())); err != nil {
			return err
		}
		if err := out.Flush(); err != nil {
			return err
		}
	}
	return lines.Err()
}

// answer never panics for an input: a bug of a library must not cost more than one answer.
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
	case asked.Allocate != nil:
		result, err = evaluator.allocate(ctx, asked.Allocate)
	default:
		err = errors.New("no operation")
	}
	if err != nil {
		return failure{Error: err.Error()}
	}
	return result
}
