package backend

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// DecodeParameters decodes the parameters of a device (AllocatedDevice.Parameters) into the struct
// that target points to. A field without a parameter keeps its value, so set the defaults before.
//
// Users write parameters, and do not notice a field that is ignored. Therefore, unknown fields, null
// and names in a different case are errors. The caller checks the ranges of values.
func DecodeParameters(parameters string, target any) error {
	if parameters == "" {
		return nil
	}
	var given map[string]json.RawMessage
	if err := json.Unmarshal([]byte(parameters), &given); err != nil || given == nil {
		return errors.New("the parameters are not a JSON object")
	}
	known := parameterNames(target)
	// Sorted, so that the same parameters give the same error.
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if !slices.Contains(known, name) {
			return fmt.Errorf("there is no parameter %q: choose from %s", name, strings.Join(known, ", "))
		}
		if string(given[name]) == "null" {
			return fmt.Errorf("the parameter %s is null: omit it, or give it a value", name)
		}
	}
	decoder := json.NewDecoder(bytes.NewReader([]byte(parameters)))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(target)
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		return fmt.Errorf("the parameter %s is of type %s, but must be of type %s",
			wrong.Field, wrong.Value, wrong.Type)
	}
	if err != nil {
		return fmt.Errorf("the parameters are invalid: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	return nil
}

// parameterNames returns the names of the fields of a struct in JSON.
func parameterNames(target any) []string {
	var names []string
	for _, field := range reflect.VisibleFields(reflect.TypeOf(target).Elem()) {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "" {
			name = field.Name
		}
		if field.IsExported() && !field.Anonymous && name != "-" {
			names = append(names, name)
		}
	}
	return names
}
