package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/google/cel-go/common/ast"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
)

// selectTimeout ends the evaluation of one expression for the devices of a request. An ordinary
// expression takes 10 us per device. Kubernetes' cost limit is for a single device, so an expensive
// expression would otherwise delay all others by minutes.
const selectTimeout = time.Second

// maxErrors limits the errors with messages in one response for one expression.
const maxErrors = 16

type evaluator struct {
	cache    *cel.Cache
	features cel.Features

	// verdictCache contains the expressions of verdicts, compiled with verdictFeatures.
	verdictCache    *cel.Cache
	verdictFeatures cel.Features

	// abandoned is whether an abandoned search for devices is still running.
	abandoned bool
}

// forget drops the compiled expressions.
func (e *evaluator) forget() {
	e.cache = cel.NewCache(maxExpressions, e.features)
	e.verdictCache = nil
}

type selectRequest struct {
	Expressions []string `json:"expressions"`
	Devices     []device `json:"devices"`
}

// device has the fields of resource.k8s.io/v1 Device that an expression can read.
type device struct {
	Driver                   string                                                    `json:"driver"`
	AllowMultipleAllocations *bool                                                     `json:"allowMultipleAllocations,omitempty"`
	Attributes               map[resourceapi.QualifiedName]resourceapi.DeviceAttribute `json:"attributes,omitempty"`
	Capacity                 map[resourceapi.QualifiedName]resourceapi.DeviceCapacity  `json:"capacity,omitempty"`
}

type selectAnswer struct {
	// Selections has one entry per expression.
	Selections []selection `json:"selections"`
}

type selection struct {
	// Error is set if the expression does not compile. In that case, there are no outcomes.
	Error string `json:"error,omitempty"`
	// Outcomes has one character per device: t selected, f not selected, e runtime error, u not
	// evaluated within selectTimeout.
	Outcomes string `json:"outcomes,omitempty"`
	// Errors are the different messages of runtime errors, at most maxErrors.
	Errors []string `json:"errors,omitempty"`
	// ErrorOf has the index in Errors for each e in Outcomes, in order, or -1 beyond the limit.
	ErrorOf []int `json:"errorOf,omitempty"`
}

func (e *evaluator) evaluate(ctx context.Context, asked *selectRequest) selectAnswer {
	answer := selectAnswer{Selections: make([]selection, len(asked.Expressions))}
	for i, expression := range asked.Expressions {
		answer.Selections[i] = e.evaluateOne(ctx, expression, asked.Devices)
	}
	return answer
}

func (e *evaluator) evaluateOne(ctx context.Context, expression string, devices []device) selection {
	compiled := e.cache.GetOrCompile(expression)
	if compiled.Error != nil {
		return selection{Error: compiled.Error.Detail}
	}
	found := selection{}
	outcomes := make([]byte, len(devices))
	indexes := map[string]int{}
	ctx, cancel := context.WithTimeout(ctx, selectTimeout)
	defer cancel()
	for i, each := range devices {
		matches, err := matches(ctx, compiled, each)
		switch {
		case ctx.Err() != nil:
			outcomes[i] = 'u'
		case err != nil:
			outcomes[i] = 'e'
			text := err.Error()
			index, known := indexes[text]
			if !known {
				index = -1
				if len(found.Errors) < maxErrors {
					index = len(found.Errors)
					found.Errors = append(found.Errors, text)
				}
				indexes[text] = index
			}
			found.ErrorOf = append(found.ErrorOf, index)
		case matches:
			outcomes[i] = 't'
		default:
			outcomes[i] = 'f'
		}
	}
	found.Outcomes = string(outcomes)
	return found
}

func matches(ctx context.Context, compiled cel.CompilationResult, each device) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	selected, _, err := compiled.DeviceMatches(ctx, cel.Device{
		Driver:                   each.Driver,
		AllowMultipleAllocations: each.AllowMultipleAllocations,
		Attributes:               each.Attributes,
		Capacity:                 each.Capacity,
	})
	return selected, err
}

type readsRequest struct {
	Expressions []string `json:"expressions"`
}

type readsAnswer struct {
	Reads []reads `json:"reads"`
}

// reads names the fields, besides the driver, on which the result of an expression can depend. A full
// name is domain/identifier.
type reads struct {
	Error      string   `json:"error,omitempty"`
	Everything bool     `json:"everything,omitempty"`
	Attributes []string `json:"attributes,omitempty"`
	Capacity   []string `json:"capacity,omitempty"`
	Shared     bool     `json:"allowMultipleAllocations,omitempty"`
}

func (e *evaluator) reads(asked *readsRequest) readsAnswer {
	answer := readsAnswer{Reads: make([]reads, len(asked.Expressions))}
	for i, expression := range asked.Expressions {
		compiled := e.cache.GetOrCompile(expression)
		if compiled.Error != nil {
			answer.Reads[i] = reads{Error: compiled.Error.Detail}
			continue
		}
		parsed, issues := compiled.Environment.Parse(expression)
		if issues != nil && issues.Err() != nil {
			answer.Reads[i] = reads{Everything: true}
			continue
		}
		answer.Reads[i] = readsOf(parsed.NativeRep().Expr())
	}
	return answer
}

// readsOf walks an expression. It understands device.attributes["domain"].name and its variants, and
// device.attributes["domain"] by itself, which reads the whole domain ("domain/*"). With any other use
// of the variable, the result can depend on everything.
func readsOf(root ast.Expr) reads {
	walker := &readsWalker{attributes: map[string]bool{}, capacity: map[string]bool{}}
	walker.walk(root)
	if walker.everything {
		return reads{Everything: true}
	}
	return reads{
		Attributes: sorted(walker.attributes),
		Capacity:   sorted(walker.capacity),
		Shared:     walker.shared,
	}
}

type readsWalker struct {
	attributes map[string]bool
	capacity   map[string]bool
	shared     bool
	everything bool
}

func (w *readsWalker) walk(expr ast.Expr) {
	if w.everything || expr == nil {
		return
	}
	if w.known(expr) {
		return
	}
	switch expr.Kind() {
	case ast.IdentKind:
		if expr.AsIdent() == "device" {
			w.everything = true
		}
	case ast.SelectKind:
		w.walk(expr.AsSelect().Operand())
	case ast.CallKind:
		call := expr.AsCall()
		if call.FunctionName() == "@in" && len(call.Args()) == 2 && w.contains(call.Args()[0], call.Args()[1]) {
			return
		}
		if call.IsMemberFunction() {
			w.walk(call.Target())
		}
		for _, arg := range call.Args() {
			w.walk(arg)
		}
	case ast.ListKind:
		for _, element := range expr.AsList().Elements() {
			w.walk(element)
		}
	case ast.MapKind:
		for _, entry := range expr.AsMap().Entries() {
			w.walk(entry.AsMapEntry().Key())
			w.walk(entry.AsMapEntry().Value())
		}
	case ast.ComprehensionKind:
		all := expr.AsComprehension()
		for _, part := range []ast.Expr{all.IterRange(), all.AccuInit(), all.LoopCondition(), all.LoopStep(), all.Result()} {
			w.walk(part)
		}
	case ast.StructKind:
		w.everything = true
	}
}

// known recognizes the reads that name one field of the device.
func (w *readsWalker) known(expr ast.Expr) bool {
	operand, name, ok := member(expr)
	if !ok {
		return false
	}
	if isDevice(operand) {
		switch name {
		case "driver":
			return true
		case "allowMultipleAllocations":
			w.shared = true
			return true
		}
		return false
	}
	if field, domain, ok := domainOf(operand); ok {
		return w.read(field, domain+"/"+name)
	}
	if field, domain, ok := domainOf(expr); ok {
		return w.read(field, domain+"/*")
	}
	return false
}

// contains recognizes "name" in device.attributes["domain"].
func (w *readsWalker) contains(key, container ast.Expr) bool {
	field, domain, ok := domainOf(container)
	if !ok || key.Kind() != ast.LiteralKind {
		return false
	}
	name, isString := key.AsLiteral().Value().(string)
	return isString && w.read(field, domain+"/"+name)
}

func (w *readsWalker) read(field, full string) bool {
	switch field {
	case "attributes":
		w.attributes[full] = true
	case "capacity":
		w.capacity[full] = true
	default:
		return false
	}
	return true
}

// domainOf splits device.attributes["domain"] and device.capacity["domain"].
func domainOf(expr ast.Expr) (field, domain string, ok bool) {
	domains, domain, ok := member(expr)
	if !ok {
		return "", "", false
	}
	device, field, ok := member(domains)
	if !ok || !isDevice(device) {
		return "", "", false
	}
	return field, domain, true
}

// member splits x.name, has(x.name) and x["name"].
func member(expr ast.Expr) (operand ast.Expr, name string, ok bool) {
	switch expr.Kind() {
	case ast.SelectKind:
		selected := expr.AsSelect()
		return selected.Operand(), selected.FieldName(), true
	case ast.CallKind:
		call := expr.AsCall()
		if call.FunctionName() != "_[_]" || len(call.Args()) != 2 {
			return nil, "", false
		}
		key := call.Args()[1]
		if key.Kind() != ast.LiteralKind {
			return nil, "", false
		}
		text, isString := key.AsLiteral().Value().(string)
		if !isString || strings.Contains(text, "\x00") {
			return nil, "", false
		}
		return call.Args()[0], text, true
	}
	return nil, "", false
}

func isDevice(expr ast.Expr) bool {
	return expr.Kind() == ast.IdentKind && expr.AsIdent() == "device"
}

func sorted(names map[string]bool) []string {
	var all []string
	for name := range names {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}
