package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

var (
	// A device's name must be a DNS label. Other files are skipped.
	validName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

	colours = []string{"white", "red", "green"}
)

// blinkers are the files of a directory. If the content of a file begins with "broken", its blinker is
// unhealthy.
//
// A file of the same name in the state directory contains the claim that holds a blinker, and its colour.
// It represents the state that a real driver sets in hardware. No state is in memory, so a crash loses
// nothing, and two instances can run during a rolling update.
type blinkers struct {
	directory string
	state     string
}

// holding is the content of a file in the state directory.
type holding struct {
	ClaimUID string `json:"claimUID"`
	Claim    string `json:"claim"`
	Colour   string `json:"colour"`
}

func openBlinkers(directory, state string) (*blinkers, error) {
	for _, folder := range []string{directory, state} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return nil, fmt.Errorf("cannot make the directory %s: %w", folder, err)
		}
	}
	return &blinkers{directory: directory, state: state}, nil
}

// list returns the names of all blinkers, sorted.
func (b *blinkers) list() ([]string, error) {
	entries, err := os.ReadDir(b.directory)
	if err != nil {
		return nil, err
	}
	names := []string{}
	for _, entry := range entries {
		if entry.Type().IsRegular() && validName.MatchString(entry.Name()) {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

func (b *blinkers) path(name string) string {
	return filepath.Join(b.directory, name)
}

func (b *blinkers) exists(name string) bool {
	// The name comes from a request: reject "../..".
	if !validName.MatchString(name) {
		return false
	}
	found, err := os.Lstat(b.path(name))
	return err == nil && found.Mode().IsRegular()
}

// broken reports whether a blinker is broken. It returns an error if the file cannot be read.
func (b *blinkers) broken(name string) (bool, error) {
	file, err := os.Open(b.path(name))
	if err != nil {
		return false, err
	}
	defer file.Close()
	// Read only the beginning: the file is not trusted.
	start, err := io.ReadAll(io.LimitReader(file, int64(len("broken"))))
	return string(start) == "broken", err
}

// take makes a blinker blink for a claim. It is idempotent.
func (b *blinkers) take(name string, wanted holding) error {
	content, err := json.Marshal(wanted)
	if err != nil {
		return err
	}
	held, err := b.holder(name)
	if err != nil {
		return err
	}
	if held != nil && held.ClaimUID != wanted.ClaimUID {
		return fmt.Errorf("it still blinks for claim %s; delete the pod that uses that claim", held.Claim)
	}
	err = b.write(name, content, held != nil)
	if errors.Is(err, fs.ErrExist) {
		return errors.New("another claim has just taken it")
	}
	// Only the innermost error: the others name a temporary file, and Kubernetes deduplicates Events only
	// if their text is the same.
	for errors.Unwrap(err) != nil {
		err = errors.Unwrap(err)
	}
	if err != nil {
		return fmt.Errorf("cannot write to %s: %w", b.state, err)
	}
	return nil
}

// write creates a file of the state directory atomically.
func (b *blinkers) write(name string, content []byte, replace bool) error {
	file, err := os.CreateTemp(b.state, ".new-")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := file.Write(content); err != nil {
		return err
	}
	// A link fails if another instance was faster. A rename would replace its claim.
	publish := os.Link
	if replace {
		publish = os.Rename
	}
	return publish(file.Name(), filepath.Join(b.state, name))
}

// holder returns the claim that holds a blinker, or nil.
func (b *blinkers) holder(name string) (*holding, error) {
	content, err := os.ReadFile(filepath.Join(b.state, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	held := &holding{}
	if err := json.Unmarshal(content, held); err != nil {
		return nil, fmt.Errorf("%s is damaged: remove it", filepath.Join(b.state, name))
	}
	return held, nil
}

// release releases all blinkers of a claim. It reads them from the disk instead of the request, because a
// prepare may have failed halfway, and blinkers may no longer exist.
func (b *blinkers) release(claimUID string) error {
	entries, err := os.ReadDir(b.state)
	if err != nil {
		return err
	}
	var failed []error
	for _, entry := range entries {
		if !validName.MatchString(entry.Name()) {
			continue
		}
		held, err := b.holder(entry.Name())
		if err == nil && held != nil && held.ClaimUID == claimUID {
			err = os.Remove(filepath.Join(b.state, entry.Name()))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// colour reads the parameters of a claim. Users write them, and do not notice ignored fields. So anything
// but {"colour": "<a known colour>"} is an error.
func colour(parameters string) (string, error) {
	if parameters == "" {
		return colours[0], nil
	}
	// Into a map, because encoding/json matches the fields of a struct case-insensitively.
	var given map[string]any
	if err := json.Unmarshal([]byte(parameters), &given); err != nil || given == nil {
		return "", errors.New(`the parameters are not a JSON object: write {"colour": "red"}`)
	}
	// Sorted, so that the same parameters give the same error.
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if key != "colour" {
			return "", fmt.Errorf(`there is no parameter %q: the only one is "colour"`, key)
		}
	}
	value, ok := given["colour"]
	if !ok {
		return colours[0], nil
	}
	if text, ok := value.(string); ok && slices.Contains(colours, text) {
		return text, nil
	}
	written, _ := json.Marshal(value)
	return "", fmt.Errorf("colour is %s: choose one of %s", written, strings.Join(colours, ", "))
}
