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
// and names in a different case are errors, at any depth. Types with a method UnmarshalJSON are not
// checked. The caller checks the ranges of values.
func DecodeParameters(parameters string, target any) error {
	if parameters == "" {
		return nil
	}
	var given map[string]any
	if err := json.Unmarshal([]byte(parameters), &given); err != nil || given == nil {
		return errors.New("the parameters are not a JSON object")
	}
	if err := checkParameter("", given, reflect.TypeOf(target)); err != nil {
		return err
	}
	err := json.NewDecoder(bytes.NewReader([]byte(parameters))).Decode(target)
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

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// checkParameter checks the names in a value for a type, and that nothing is null. The decoder checks
// the rest.
func checkParameter(path string, given any, of reflect.Type) error {
	if given == nil {
		return fmt.Errorf("the parameter %s is null: omit it, or give it a value", path)
	}
	for of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	if reflect.PointerTo(of).Implements(unmarshaler) {
		return nil
	}
	switch given := given.(type) {
	case []any:
		if of.Kind() != reflect.Slice && of.Kind() != reflect.Array {
			return nil
		}
		for number, each := range given {
			if err := checkParameter(fmt.Sprintf("%s[%d]", path, number), each, of.Elem()); err != nil {
				return err
			}
		}
	case map[string]any:
		if of.Kind() != reflect.Struct && of.Kind() != reflect.Map {
			return nil
		}
		// Sorted, so that the same parameters give the same error.
		for _, name := range slices.Sorted(maps.Keys(given)) {
			inside := strings.TrimPrefix(path+"."+name, ".")
			field, known := fieldType(of, name)
			if field == nil {
				return fmt.Errorf("there is no parameter %q: choose from %s", inside, strings.Join(known, ", "))
			}
			if err := checkParameter(inside, given[name], field); err != nil {
				return err
			}
		}
	}
	return nil
}

// fieldType returns the type of a value by its name in JSON. If a struct has no such field, it returns
// the names of its fields instead.
func fieldType(of reflect.Type, wanted string) (reflect.Type, []string) {
	if of.Kind() == reflect.Map {
		return of.Elem(), nil
	}
	var names []string
	for _, field := range reflect.VisibleFields(of) {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if field.Anonymous && name == "" || !isInlined(of, field.Index) {
			continue
		}
		if name == "" {
			name = field.Name
		}
		if field.IsExported() && name != "-" {
			if name == wanted {
				return field.Type, nil
			}
			names = append(names, name)
		}
	}
	return nil, names
}

// isInlined returns whether JSON shows a field in the object of the struct itself. The fields of an
// embedded struct with a JSON name are in an object of that name.
func isInlined(of reflect.Type, index []int) bool {
	for depth := 1; depth < len(index); depth++ {
		name, _, _ := strings.Cut(of.FieldByIndex(index[:depth]).Tag.Get("json"), ",")
		if name != "" {
			return false
		}
	}
	return true
}
