package nodeplugin

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	backendv1 "drakit.dev/e2e/upstream/backendv1"
)

// latest hands a message to every stream, and a new one whenever it changes.
type latest[T any] struct {
	mutex   sync.Mutex
	message T
	changed chan struct{}
}

func newLatest[T any](message T) *latest[T] {
	return &latest[T]{message: message, changed: make(chan struct{})}
}

func (l *latest[T]) update(change func(T) T) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.message = change(l.message)
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *latest[T]) follow(done <-chan struct{}, send func(T) error) error {
	for {
		l.mutex.Lock()
		message, changed := l.message, l.changed
		l.mutex.Unlock()
		if err := send(message); err != nil {
			return err
		}
		select {
		case <-done:
			return nil
		case <-changed:
		}
	}
}

// Inventory is what the backend lists.
type Inventory struct {
	*latest[*backendv1.WatchDevicesResponse]
}

// NewInventory returns one without devices.
func NewInventory() *Inventory {
	return &Inventory{newLatest(&backendv1.WatchDevicesResponse{})}
}

// Set replaces the devices.
func (i *Inventory) Set(devices *backendv1.WatchDevicesResponse) {
	i.update(func(*backendv1.WatchDevicesResponse) *backendv1.WatchDevicesResponse { return devices })
}

// Follow sends the devices, and again after each change.
func (i *Inventory) Follow(stream grpc.ServerStreamingServer[backendv1.WatchDevicesResponse]) error {
	return i.follow(stream.Context().Done(), stream.Send)
}

// Health is the health of the devices that the spec has reported.
type Health struct {
	*latest[map[string]*backendv1.DeviceHealth]
	node string
}

// NewHealth returns one without reports.
func NewHealth(node string) *Health {
	return &Health{newLatest(map[string]*backendv1.DeviceHealth{}), node}
}

// Set reports a device.
func (h *Health) Set(pool, name, status, message string) {
	report := &backendv1.DeviceHealth{
		Name:   name,
		Pool:   BackendPool(h.node, pool),
		Health: &backendv1.Health{Message: message},
	}
	switch status {
	case "Healthy":
		report.Health.Status = backendv1.HealthStatus_HEALTH_STATUS_HEALTHY
	case "Unhealthy":
		report.Health.Status = backendv1.HealthStatus_HEALTH_STATUS_UNHEALTHY
	}
	h.update(func(reports map[string]*backendv1.DeviceHealth) map[string]*backendv1.DeviceHealth {
		changed := maps.Clone(reports) // a stream may be sending the previous ones
		changed[pool+"/"+name] = report
		return changed
	})
}

// Follow sends the reports, and again after each change.
func (h *Health) Follow(stream grpc.ServerStreamingServer[backendv1.WatchHealthResponse]) error {
	return h.follow(stream.Context().Done(), func(reports map[string]*backendv1.DeviceHealth) error {
		message := &backendv1.WatchHealthResponse{}
		for _, report := range reports {
			message.Devices = append(message.Devices, report)
		}
		return stream.Send(message)
	})
}

// BackendPool returns a pool's name as backends know it.
func BackendPool(node, pool string) string {
	if pool == node {
		return ""
	}
	return strings.TrimPrefix(pool, node+"/")
}

// Devices translates what a driver publishes. A field that backends do not have is an error: the spec
// must not run without it.
func Devices(node string, resources resourceslice.DriverResources) (*backendv1.WatchDevicesResponse, error) {
	answer := &backendv1.WatchDevicesResponse{}
	for name, pool := range resources.Pools {
		if pool.NodeSelector != nil || pool.AllNodes {
			return nil, fmt.Errorf("pool %s is not the node's: backends publish only devices of their node", name)
		}
		for _, slice := range pool.Slices {
			if err := checkFields(slice, "Devices", "SharedCounters"); err != nil {
				return nil, fmt.Errorf("pool %s: %w", name, err)
			}
			for _, counters := range slice.SharedCounters {
				answer.CounterSets = append(answer.CounterSets, &backendv1.CounterSet{
					Name:     counters.Name,
					Counters: amounts(counters.Counters),
					Pool:     BackendPool(node, name),
				})
			}
			for _, device := range slice.Devices {
				translated, err := translate(device)
				if err != nil {
					return nil, fmt.Errorf("device %s of pool %s: %w", device.Name, name, err)
				}
				translated.Pool = BackendPool(node, name)
				answer.Devices = append(answer.Devices, translated)
			}
		}
	}
	return answer, nil
}

func translate(device resourceapi.Device) (*backendv1.Device, error) {
	known := []string{"name", "attributes", "capacity", "consumesCounters", "allowMultipleAllocations", "taints"}
	if err := checkFields(device, known...); err != nil {
		return nil, err
	}
	translated := &backendv1.Device{
		Name:                     device.Name,
		Attributes:               map[string]*backendv1.Attribute{},
		Capacity:                 map[string]*backendv1.Capacity{},
		Consumes:                 map[string]*backendv1.CounterAmounts{},
		AllowMultipleAllocations: ptr.Deref(device.AllowMultipleAllocations, false),
	}
	for name, attribute := range device.Attributes {
		value, err := translateAttribute(attribute)
		if err != nil {
			return nil, fmt.Errorf("attribute %s: %w", name, err)
		}
		translated.Attributes[string(name)] = value
	}
	for name, capacity := range device.Capacity {
		if err := checkFields(capacity, "value", "requestPolicy"); err != nil {
			return nil, err
		}
		translated.Capacity[string(name)] = translateCapacity(capacity)
	}
	for _, consumption := range device.ConsumesCounters {
		if err := checkFields(consumption, "counterSet", "counters"); err != nil {
			return nil, err
		}
		translated.Consumes[consumption.CounterSet] = &backendv1.CounterAmounts{Counters: amounts(consumption.Counters)}
	}
	for _, taint := range device.Taints {
		if err := checkFields(taint, "key", "value", "effect"); err != nil {
			return nil, err
		}
		effect, known := map[resourceapi.DeviceTaintEffect]backendv1.TaintEffect{
			resourceapi.DeviceTaintEffectNone:       backendv1.TaintEffect_TAINT_EFFECT_NONE,
			resourceapi.DeviceTaintEffectNoSchedule: backendv1.TaintEffect_TAINT_EFFECT_NO_SCHEDULE,
			resourceapi.DeviceTaintEffectNoExecute:  backendv1.TaintEffect_TAINT_EFFECT_NO_EXECUTE,
		}[taint.Effect]
		if !known {
			return nil, fmt.Errorf("taint %s has the unknown effect %s", taint.Key, taint.Effect)
		}
		translated.Taints = append(translated.Taints, &backendv1.Taint{Key: taint.Key, Value: taint.Value, Effect: effect})
	}
	return translated, nil
}

// checkFields returns an error if a field is set that is not translated, in any release.
func checkFields(object any, translated ...string) error {
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}
	var fields map[string]any
	if err := json.Unmarshal(text, &fields); err != nil {
		return err
	}
	for field, value := range fields {
		if value != nil && !slices.Contains(translated, field) {
			return fmt.Errorf("backends have no field for %s", field)
		}
	}
	return nil
}

func translateAttribute(attribute resourceapi.DeviceAttribute) (*backendv1.Attribute, error) {
	switch {
	case attribute.StringValue != nil:
		return &backendv1.Attribute{Value: &backendv1.Attribute_String_{String_: *attribute.StringValue}}, nil
	case attribute.IntValue != nil:
		return &backendv1.Attribute{Value: &backendv1.Attribute_Int{Int: *attribute.IntValue}}, nil
	case attribute.BoolValue != nil:
		return &backendv1.Attribute{Value: &backendv1.Attribute_Bool{Bool: *attribute.BoolValue}}, nil
	case attribute.VersionValue != nil:
		return &backendv1.Attribute{Value: &backendv1.Attribute_Version{Version: *attribute.VersionValue}}, nil
	default:
		return nil, fmt.Errorf("a value of this type is not translated: %v", attribute)
	}
}

func translateCapacity(capacity resourceapi.DeviceCapacity) *backendv1.Capacity {
	translated := &backendv1.Capacity{Value: capacity.Value.String()}
	policy := capacity.RequestPolicy
	if policy == nil {
		return translated
	}
	if policy.Default != nil {
		translated.Default = policy.Default.String()
	}
	for _, value := range policy.ValidValues {
		translated.ValidValues = append(translated.ValidValues, value.String())
	}
	if valid := policy.ValidRange; valid != nil {
		translated.ValidRange = &backendv1.CapacityRange{}
		if valid.Min != nil {
			translated.ValidRange.Min = valid.Min.String()
		}
		if valid.Max != nil {
			translated.ValidRange.Max = valid.Max.String()
		}
		if valid.Step != nil {
			translated.ValidRange.Step = valid.Step.String()
		}
	}
	return translated
}

func amounts(counters map[string]resourceapi.Counter) map[string]string {
	found := map[string]string{}
	for name, counter := range counters {
		found[name] = counter.Value.String()
	}
	return found
}
