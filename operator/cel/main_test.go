package main

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
)

func ask(t *testing.T, lines ...string) []map[string]any {
	t.Helper()
	var out bytes.Buffer
	input := strings.NewReader(strings.Join(lines, "\n") + "\n")
	if err := serve(input, &out, selectorFeatures(gates{"DRAConsumableCapacity": true})); err != nil {
		t.Fatal(err)
	}
	var answers []map[string]any
	decoder := json.NewDecoder(&out)
	for decoder.More() {
		var each map[string]any
		if err := decoder.Decode(&each); err != nil {
			t.Fatal(err)
		}
		answers = append(answers, each)
	}
	return answers
}

const devices = `[
	{"driver": "a", "attributes": {"model": {"string": "x"}}, "capacity": {"memory": {"value": "20Gi"}}},
	{"driver": "a"},
	{"driver": "b", "attributes": {"a/model": {"string": "y"}}, "allowMultipleAllocations": true}]`

func TestSelect(t *testing.T) {
	for _, test := range []struct{ expression, outcomes, text string }{
		{`device.driver == "a"`, "ttf", ""},
		{`device.attributes["a"].model == "x"`, "tef", "no such key: model"},
		{`"model" in device.attributes["a"] && device.attributes["a"].model == "y"`, "fft", ""},
		{`device.attributes["unknown"].model == "x"`, "eee", "no such key: model"},
		{`device.capacity["a"].memory.compareTo(quantity("10Gi")) > 0`, "tee", "no such key: memory"},
		{`device.allowMultipleAllocations`, "fft", ""},
	} {
		t.Run(test.expression, func(t *testing.T) {
			quoted, _ := json.Marshal(test.expression)
			line := `{"select": {"expressions": [` + string(quoted) + `], "devices": ` + devices + `}}`
			answer := ask(t, strings.ReplaceAll(line, "\n", ""))[0]
			selection := answer["selections"].([]any)[0].(map[string]any)
			if selection["outcomes"] != test.outcomes {
				t.Errorf("got %v", selection)
			}
			if test.text != "" && selection["errors"].([]any)[0] != test.text {
				t.Errorf("got %v", selection["errors"])
			}
		})
	}
}

func TestAnExpressionThatDoesNotCompile(t *testing.T) {
	answer := ask(t, `{"select": {"expressions": ["device.foo"], "devices": [{"driver": "a"}]}}`)[0]
	selection := answer["selections"].([]any)[0].(map[string]any)
	if !strings.Contains(selection["error"].(string), "undefined field 'foo'") || selection["outcomes"] != nil {
		t.Errorf("got %v", selection)
	}
}

func TestReads(t *testing.T) {
	for expression, want := range map[string]map[string]any{
		`device.driver == "a"`: {},
		`device.attributes["a"].model == "x" && device.capacity["b"]["m"].isGreaterThan(quantity("1"))`: {
			"attributes": []any{"a/model"}, "capacity": []any{"b/m"}},
		`"q" in device.attributes["a"]`:                   {"attributes": []any{"a/q"}},
		`has(device.attributes["a"].z)`:                   {"attributes": []any{"a/z"}},
		`cel.bind(d, device.attributes["a"], d.b && d.c)`: {"attributes": []any{"a/*"}},
		`device.attributes["a"].exists(k, k == "model")`:  {"attributes": []any{"a/*"}},
		`device.attributes.exists(d, d == "x")`:           {"everything": true},
		`device.attributes[device.driver].model == "x"`:   {"everything": true},
		`device.allowMultipleAllocations && true`:         {"allowMultipleAllocations": true},
	} {
		t.Run(expression, func(t *testing.T) {
			quoted, _ := json.Marshal(expression)
			answer := ask(t, `{"reads": {"expressions": [`+string(quoted)+`]}}`)[0]
			got := answer["reads"].([]any)[0].(map[string]any)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestALineThatCannotBeUsedCostsOneAnswer(t *testing.T) {
	answers := ask(t, "nonsense", `{"x": 1}`, `{"reads": {"expressions": []}}`)
	if len(answers) != 3 || answers[0]["error"] == nil || answers[1]["error"] == nil || answers[2]["error"] != nil {
		t.Errorf("got %v", answers)
	}
}

func TestAnExpensiveExpressionCostsItselfOnly(t *testing.T) {
	const numbers = `[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31]`
	expression := numbers + `.all(a, ` + numbers + `.all(b, ` + numbers + `.all(c, a + b + c >= 0)))`
	quoted, _ := json.Marshal(expression)
	device := `{"driver": "a", "attributes": {"model": {"string": "x"}}}`
	many := "[" + strings.Repeat(device+",", 1999) + device + "]"
	line := func(expression string) string {
		return `{"select": {"expressions": [` + expression + `], "devices": ` + many + `}}`
	}
	began := time.Now()
	answers := ask(t, line(string(quoted)), line(`"device.driver == \"a\""`))
	outcomes := answers[0]["selections"].([]any)[0].(map[string]any)["outcomes"].(string)
	if len(outcomes) != 2000 || !strings.HasSuffix(outcomes, "u") {
		t.Errorf("got %d outcomes that end with %q", len(outcomes), outcomes[len(outcomes)-1:])
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	cheap := answers[1]["selections"].([]any)[0].(map[string]any)["outcomes"]
	if cheap != strings.Repeat("t", 2000) {
		t.Errorf("got %v", cheap)
	}
}
