// Reads device metadata files (KEP-5304) with Kubernetes' own package, as a program in a container
// does, and prints their content as JSON.
//
//	read-metadata claim CLAIM REQUEST [DRIVER]
//	read-metadata template POD-CLAIM REQUEST [DRIVER]
//	read-metadata validate FILE
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	read, err := read(arguments)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(read)
}

func read(arguments []string) (any, error) {
	switch {
	case len(arguments) == 3 && arguments[0] == "claim":
		return devicemetadata.ReadResourceClaimMetadata(arguments[1], arguments[2])
	case len(arguments) == 4 && arguments[0] == "claim":
		return devicemetadata.ReadResourceClaimMetadataWithDriverName(
			arguments[3], arguments[1], arguments[2])
	case len(arguments) == 3 && arguments[0] == "template":
		return devicemetadata.ReadResourceClaimTemplateMetadata(arguments[1], arguments[2])
	case len(arguments) == 4 && arguments[0] == "template":
		return devicemetadata.ReadResourceClaimTemplateMetadataWithDriverName(
			arguments[3], arguments[1], arguments[2])
	case len(arguments) == 2 && arguments[0] == "validate":
		return validate(arguments[1])
	}
	return nil, errors.New("usage: read-metadata claim|template NAME REQUEST [DRIVER], or validate FILE")
}

// validate reads every version of a file as a reader that knows no other, and checks each.
func validate(path string) (any, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	found := map[string]metadata.DeviceMetadata{}
	decoder := json.NewDecoder(file)
	for decoder.More() {
		var (
			read    metadata.DeviceMetadata
			version schema.GroupVersionKind
			invalid error
		)
		// Each call reads one object, because both versions are known.
		if err := devicemetadata.DecodeMetadataFromStream(decoder, &read,
			devicemetadata.DecodeMetadataWithValidationResult(&invalid),
			devicemetadata.DecodeMetadataStoreGVKResult(&version)); err != nil {
			return nil, err
		}
		if invalid != nil {
			return nil, invalid
		}
		found[version.Version] = read
	}
	return found, nil
}
