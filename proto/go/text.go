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

// withValidText replaces invalid UTF-8 in text that only people read.
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

// maxSize is the size of a device or counter set that the node plugin accepts.
const maxSize = 64 * 1024

// unsendable returns why a device or counter set cannot be sent, or an empty string.
func unsendable(message proto.Message) string {
	if field := invalidText(message); field != "" {
		return fmt.Sprintf("the field %s has text that is not UTF-8; this is a bug in the driver", field)
	}
	if proto.Size(message) > maxSize {
		return fmt.Sprintf("it is larger than %d KiB; this is a bug in the driver", maxSize/1024)
	}
	return ""
}

// sendableDevices returns a copy of a list without the devices and counter sets that cannot be sent.
// The copy rejects them. Devices are still there, so it also names them as withdrawn: their pods are
// not evicted.
func sendableDevices(log *slog.Logger, given *backendv1.WatchDevicesResponse) *backendv1.WatchDevicesResponse {
	list := &backendv1.WatchDevicesResponse{}
	proto.Merge(list, given)
	for number, name := range list.GetWithdrawn() {
		list.Withdrawn[number] = validText(name)
	}
	refused := func(message proto.Message, pool, name string) bool {
		problem := unsendable(message)
		if problem == "" {
			return false
		}
		withdrawn := validText(pool + "/" + name)
		name = strings.TrimPrefix(withdrawn, "/")
		if _, ok := message.(*backendv1.CounterSet); ok {
			problem = "as a counter set, " + problem
		} else if !slices.Contains(list.GetWithdrawn(), withdrawn) {
			list.Withdrawn = append(list.Withdrawn, withdrawn)
		}
		log.Error("device cannot be published", "device", name, "error", problem)
		list.Rejected = append(list.Rejected,
			&backendv1.RejectedDevice{Device: name, Reason: "Invalid", Message: problem})
		return true
	}
	refusedDevice := func(device *backendv1.Device) bool {
		return refused(device, device.GetPool(), device.GetName())
	}
	list.Devices = slices.DeleteFunc(list.GetDevices(), refusedDevice)
	if list.GetFallback() != nil {
		list.Fallback.Devices = slices.DeleteFunc(list.GetFallback().GetDevices(), refusedDevice)
	}
	list.CounterSets = slices.DeleteFunc(list.GetCounterSets(), func(set *backendv1.CounterSet) bool {
		return refused(set, set.GetPool(), set.GetName())
	})
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
