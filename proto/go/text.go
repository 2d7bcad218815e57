package backend

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	backendv1 "drakit.dev/backend/v1"
)

// Protocol Buffers cannot encode text that is not UTF-8, such as a serial number that firmware never
// wrote. One such value must not end the stream of all devices, or fail the other claims of a call.

// invalidText returns the path of a field whose text is not UTF-8, or an empty string.
func invalidText(message proto.Message) string {
	found := ""
	eachText("", message.ProtoReflect(), func(path, text string) string {
		// Messages have no order, but the same cause must give the same text.
		if !utf8.ValidString(text) && (found == "" || path < found) {
			found = path
		}
		return text
	})
	return found
}

// withValidText replaces what is not UTF-8 in text that only people read.
func withValidText[M proto.Message](message M) M {
	eachText("", message.ProtoReflect(), func(_, text string) string { return validText(text) })
	return message
}

func validText(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }

// eachText visits each text in a message. visit returns the text that replaces it, but not in a map.
func eachText(path string, message protoreflect.Message, visit func(path, text string) string) {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		path, isText := path+string(field.Name()), field.Kind() == protoreflect.StringKind
		switch {
		case field.IsMap():
			value.Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
				path := path + "[" + validText(key.String()) + "]"
				visit(path, key.String())
				switch field.MapValue().Kind() {
				case protoreflect.StringKind:
					visit(path, value.String())
				case protoreflect.MessageKind:
					eachText(path+".", value.Message(), visit)
				}
				return true
			})
		case field.IsList() && isText:
			for number := range value.List().Len() {
				text := visit(path, value.List().Get(number).String())
				value.List().Set(number, protoreflect.ValueOfString(text))
			}
		case field.IsList() && field.Kind() == protoreflect.MessageKind:
			for number := range value.List().Len() {
				eachText(path+".", value.List().Get(number).Message(), visit)
			}
		case field.Kind() == protoreflect.MessageKind:
			eachText(path+".", value.Message(), visit)
		case isText:
			message.Set(field, protoreflect.ValueOfString(visit(path, value.String())))
		}
		return true
	})
}

// sendableDevices returns a copy of a list of devices without those that cannot be sent. They are still
// there, so the copy reports them, and names them as withdrawn: their pods are not evicted.
func sendableDevices(log *slog.Logger, given *backendv1.WatchDevicesResponse) *backendv1.WatchDevicesResponse {
	list := &backendv1.WatchDevicesResponse{}
	proto.Merge(list, given)
	for number, name := range list.GetWithdrawn() {
		list.Withdrawn[number] = validText(name)
	}
	reported := map[string]bool{}
	sendable := func(devices []*backendv1.Device) []*backendv1.Device {
		var left []*backendv1.Device
		for _, device := range devices {
			field := invalidText(device)
			if field == "" {
				left = append(left, device)
				continue
			}
			name := validText(device.GetName())
			problem := fmt.Sprintf("the field %s has text that is not UTF-8; this is a bug in the driver", field)
			log.Error("device cannot be published", "device", name, "pool", validText(device.GetPool()), "error", problem)
			if !slices.Contains(list.GetWithdrawn(), name) {
				list.Withdrawn = append(list.Withdrawn, name)
			}
			if !reported[name] {
				reported[name] = true
				list.Rejected = append(list.Rejected,
					&backendv1.RejectedDevice{Device: name, Reason: "Other", Message: problem})
			}
		}
		return left
	}
	list.Devices = sendable(list.GetDevices())
	if list.GetFallback() != nil {
		list.Fallback.Devices = sendable(list.GetFallback().GetDevices())
	}
	var sets []*backendv1.CounterSet
	for _, set := range list.GetCounterSets() {
		if field := invalidText(set); field == "" {
			sets = append(sets, set)
		} else {
			log.Error("counter set cannot be published", "counter_set", validText(set.GetName()),
				"error", fmt.Sprintf("the field %s has text that is not UTF-8; this is a bug in the driver", field))
		}
	}
	list.CounterSets = sets
	for _, each := range list.GetRejected() {
		withValidText(each)
	}
	for _, each := range list.GetPolicies() {
		withValidText(each)
	}
	list.PartitionTypeAttribute = validText(list.GetPartitionTypeAttribute())
	return list
}

// sendableHealth returns a copy of a list of health in which all text can be sent.
func sendableHealth(given *backendv1.WatchHealthResponse) *backendv1.WatchHealthResponse {
	list := &backendv1.WatchHealthResponse{}
	proto.Merge(list, given)
	return withValidText(list)
}

// sendableClaim returns a copy of the result of a claim, which fails if it cannot be sent.
func sendableClaim(given *backendv1.PreparedClaim) *backendv1.PreparedClaim {
	claim := &backendv1.PreparedClaim{}
	proto.Merge(claim, given)
	claim.Error = validText(claim.GetError())
	if field := invalidText(claim); field != "" {
		problem := fmt.Sprintf("the driver returned text that is not UTF-8 in the field %s; this is a bug in the driver", field)
		return &backendv1.PreparedClaim{Uid: validText(claim.GetUid()), Error: problem}
	}
	return claim
}
