package cel

import (
	"encoding/json"
	"os"
	"testing"
)

// TestDump writes the table of TestCEL to the file that $DUMP names.
func TestDump(t *testing.T) {
	cases := map[string]any{}
	for name, each := range testcases {
		gates := map[string]bool{}
		if each.features != nil {
			gates["consumable_capacity"] = each.features.EnableConsumableCapacity
			gates["list_attributes"] = each.features.EnableListTypeAttributes
		}
		cases[name] = map[string]any{
			"gates":      gates,
			"expression": each.expression,
			"device": map[string]any{
				"driver":                   each.driver,
				"allowMultipleAllocations": each.allowMultipleAllocations != nil && *each.allowMultipleAllocations,
				"attributes":               each.attributes,
				"capacity":                 each.capacity,
			},
			"compileError": each.expectCompileError,
			"matchError":   each.expectMatchError,
			"match":        each.expectMatch,
		}
	}
	text, err := json.Marshal(cases)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(os.Getenv("DUMP"), text, 0o644); err != nil {
		t.Fatal(err)
	}
}
