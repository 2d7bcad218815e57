// drakit in the place of Kubernetes' test driver.
//
// The build puts this file into a copy of k8s.io/kubernetes/test/e2e/dra/test-driver/app, whose file of the
// same name serves the kubelet with Kubernetes' own helper. This one runs drakit's node plugin in a pod, and
// is its backend. So registration, gRPC calls, ResourceSlices, CDI files and health are drakit's, and the
// specs, which are unchanged, judge them.
//
// What the specs read (calls, prepared claims) is recorded in the backend. A call of PrepareClaims is
// recorded as the call of the kubelet that caused it.
package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	cgoresource "k8s.io/client-go/kubernetes/typed/resource/v1"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	backendv1 "drakit.dev/e2e/upstream/backendv1"
	"drakit.dev/e2e/upstream/nodeplugin"
)

const (
	getInfoMethod              = "/pluginregistration.Registration/GetInfo"
	registrationMethod         = "/pluginregistration.Registration/NotifyRegistrationStatus"
	prepareMethod              = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
	unprepareMethod            = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources"
	healthControlChannelLength = 10
)

// Options has the fields that the specs of any release set. drakit serves health, in all versions.
type Options struct {
	EnableHealthService   bool
	DisableHealthV1       bool
	DisableHealthV1alpha1 bool
}

type DeviceHealthUpdate struct {
	PoolName   string
	DeviceName string
	Health     string
	Message    string
}

type GRPCCall struct {
	FullMethod string
	Request    any
	Response   any
	Err        error
}

// ClaimID has no namespace: the UID is unique.
type ClaimID struct {
	Name string
	UID  types.UID
}

// FileOperations: only the resources to publish are of use here. drakit writes the CDI files.
type FileOperations struct {
	Create          func(name string, content []byte) error
	Remove          func(name string) error
	HandleError     func(ctx context.Context, err error, msg string)
	DriverResources *resourceslice.DriverResources
}

// Options that take the place of options of Kubernetes' helper, see EDITS in program.py.
type (
	unaryOption    struct{ grpc.UnaryServerInterceptor }
	listenerOption func(ctx context.Context, endpoint string) (net.Listener, error)
	clusterOption  struct{ kubernetes.Interface }
	metadataOption bool
)

// WithInterceptor adds an interceptor of the calls that the specs count and let fail.
func WithInterceptor(interceptor grpc.UnaryServerInterceptor) any {
	return unaryOption{interceptor}
}

// WithBackendListener sets how to listen on a socket of the node.
func WithBackendListener(listen func(ctx context.Context, endpoint string) (net.Listener, error)) any {
	return listenerOption(listen)
}

// WithCluster sets the client that runs the pod of the node plugin: it has all permissions.
func WithCluster(client kubernetes.Interface) any {
	return clusterOption{client}
}

// WithMetadata sets whether the backend requests metadata files.
func WithMetadata(enabled bool) any {
	return metadataOption(enabled)
}

// ExamplePlugin is drakit's node plugin for one driver on one node, and its backend.
type ExamplePlugin struct {
	backendv1.UnimplementedBackendServer

	resourceClient cgoresource.ResourceV1Interface
	driverName     string
	nodeName       string
	interceptors   []grpc.UnaryServerInterceptor
	metadata       bool
	instance       *nodeplugin.Instance

	mutex    sync.Mutex
	prepared map[ClaimID]bool
	calls    []GRPCCall
	failures map[string]error // by method

	blockedPrepare   sync.Mutex
	blockedUnprepare sync.Mutex

	devices *nodeplugin.Inventory
	health  *nodeplugin.Health

	HealthControlChan chan DeviceHealthUpdate
}

// StartPlugin runs the node plugin on a node. It returns before the kubelet has registered it.
func StartPlugin(ctx context.Context, _, driverName string, kubeClient kubernetes.Interface, nodeName string, fileOps FileOperations, opts ...any) (*ExamplePlugin, error) {
	ex := &ExamplePlugin{
		resourceClient:    draclient.New(kubeClient),
		driverName:        driverName,
		nodeName:          nodeName,
		prepared:          map[ClaimID]bool{},
		failures:          map[string]error{},
		devices:           nodeplugin.NewInventory(),
		health:            nodeplugin.NewHealth(nodeName),
		HealthControlChan: make(chan DeviceHealthUpdate, healthControlChannelLength),
	}
	// What the specs of a node have, which run on it.
	listen, cluster := listenerOption(listenHere), kubeClient
	for _, opt := range opts {
		switch opt := opt.(type) {
		case unaryOption:
			ex.interceptors = append(ex.interceptors, opt.UnaryServerInterceptor)
		case listenerOption:
			listen = opt
		case clusterOption:
			cluster = opt.Interface
		case metadataOption:
			ex.metadata = bool(opt)
		case Options, TestOption, kubeletplugin.Option:
			// The node plugin decides for itself what these set.
		default:
			return nil, fmt.Errorf("unexpected option type %T", opt)
		}
	}
	ex.interceptors = append(ex.interceptors, ex.record)
	if resources := fileOps.DriverResources; resources != nil {
		if err := ex.PublishResources(ctx, *resources); err != nil {
			return nil, err
		}
	}
	// The specs cancel the context before they stop the plugin. A node plugin whose backend is gone
	// would taint its devices.
	ctx = context.WithoutCancel(ctx)
	instance, err := nodeplugin.Start(ctx, cluster, driverName, nodeName)
	if err != nil {
		return nil, fmt.Errorf("start drakit's node plugin: %w", err)
	}
	listener, err := listen(ctx, instance.Socket())
	if err != nil {
		instance.Stop()
		return nil, fmt.Errorf("listen for drakit's node plugin: %w", err)
	}
	ex.instance = instance
	instance.Serve(listener, ex)
	go ex.followHealth(ctx)
	go func() {
		if err := instance.WaitReady(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "drakit's node plugin is not ready")
			return
		}
		// It is ready when the kubelet has registered it. A kubelet that restarts registers it again.
		ex.registered()
		instance.FollowRegistrations(ctx, ex.registered)
	}()
	return ex, nil
}

func (ex *ExamplePlugin) registered() {
	ex.mutex.Lock()
	defer ex.mutex.Unlock()
	ex.calls = append(ex.calls, GRPCCall{FullMethod: getInfoMethod}, GRPCCall{FullMethod: registrationMethod})
}

func listenHere(_ context.Context, endpoint string) (net.Listener, error) {
	if err := os.MkdirAll(path.Dir(endpoint), 0o750); err != nil {
		return nil, err
	}
	return net.Listen("unix", endpoint)
}

// Stop ends the node plugin as the kubelet does when its pod is deleted, and then the backend.
func (ex *ExamplePlugin) Stop() {
	ex.instance.Stop()
}

// PublishResources replaces the devices.
func (ex *ExamplePlugin) PublishResources(_ context.Context, resources resourceslice.DriverResources) error {
	devices, err := nodeplugin.Devices(ex.nodeName, resources)
	if err != nil {
		return err
	}
	ex.devices.Set(devices)
	return nil
}

func (ex *ExamplePlugin) GetPreparedResources() []ClaimID {
	ex.mutex.Lock()
	defer ex.mutex.Unlock()
	return slices.Collect(maps.Keys(ex.prepared))
}

func (ex *ExamplePlugin) GetGRPCCalls() []GRPCCall {
	ex.mutex.Lock()
	defer ex.mutex.Unlock()
	return slices.Clone(ex.calls)
}

func (ex *ExamplePlugin) ResetGRPCCalls() {
	ex.mutex.Lock()
	defer ex.mutex.Unlock()
	ex.calls = nil
}

func (ex *ExamplePlugin) CountCalls(methodSuffix string) int {
	count := 0
	for _, call := range ex.GetGRPCCalls() {
		if strings.HasSuffix(call.FullMethod, methodSuffix) {
			count++
		}
	}
	return count
}

// BlockNodePrepareResources lets calls wait until the returned function is called.
func (ex *ExamplePlugin) BlockNodePrepareResources() func() {
	ex.blockedPrepare.Lock()
	return ex.blockedPrepare.Unlock
}

func (ex *ExamplePlugin) BlockNodeUnprepareResources() func() {
	ex.blockedUnprepare.Lock()
	return ex.blockedUnprepare.Unlock
}

// SetNodePrepareResourcesFailureMode lets calls fail until the returned function is called.
func (ex *ExamplePlugin) SetNodePrepareResourcesFailureMode() func() {
	return ex.setFailure(prepareMethod)
}

func (ex *ExamplePlugin) SetNodeUnprepareResourcesFailureMode() func() {
	return ex.setFailure(unprepareMethod)
}

func (ex *ExamplePlugin) setFailure(method string) func() {
	set := func(err error) {
		ex.mutex.Lock()
		defer ex.mutex.Unlock()
		ex.failures[method] = err
	}
	set(fmt.Errorf("the spec lets %s fail", path.Base(method)))
	return func() { set(nil) }
}

func (ex *ExamplePlugin) failure(method string) error {
	ex.mutex.Lock()
	defer ex.mutex.Unlock()
	return ex.failures[method]
}

// SetGetInfoError is for specs that do not apply: no call of the registration can fail in the backend.
func (ex *ExamplePlugin) SetGetInfoError(error) {
	panic("the registration of drakit's node plugin cannot be made to fail")
}

// SetNotifyRegistrationStatusError is as SetGetInfoError.
func (ex *ExamplePlugin) SetNotifyRegistrationStatusError(err error) {
	ex.SetGetInfoError(err)
}

func (ex *ExamplePlugin) UpdateStatus(ctx context.Context, claim *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, error) {
	return ex.resourceClient.ResourceClaims(claim.Namespace).UpdateStatus(ctx, claim, metav1.UpdateOptions{})
}

// UnprepareClaim is for specs in which the kubelet does not unprepare a claim.
func (ex *ExamplePlugin) UnprepareClaim(_ context.Context, claim *resourceapi.ResourceClaim) error {
	ex.forget(ClaimID{Name: claim.Name, UID: claim.UID})
	return nil
}

func (ex *ExamplePlugin) forget(id ClaimID) {
	ex.mutex.Lock()
	defer ex.mutex.Unlock()
	delete(ex.prepared, id)
}

// record is the innermost interceptor, as in Kubernetes' test driver.
func (ex *ExamplePlugin) record(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	ex.mutex.Lock()
	index := len(ex.calls)
	call := GRPCCall{FullMethod: info.FullMethod, Request: req}
	ex.calls = append(ex.calls, call)
	ex.mutex.Unlock()

	call.Response, call.Err = handler(ctx, req)

	ex.mutex.Lock()
	defer ex.mutex.Unlock()
	ex.calls[index] = call
	return call.Response, call.Err
}

// intercepted calls a handler through the interceptors of the specs, the first one outermost.
func (ex *ExamplePlugin) intercepted(ctx context.Context, method string, req any, handler grpc.UnaryHandler) (any, error) {
	info := &grpc.UnaryServerInfo{Server: ex, FullMethod: method}
	for _, interceptor := range slices.Backward(ex.interceptors) {
		inner := handler
		handler = func(ctx context.Context, req any) (any, error) {
			return interceptor(ctx, req, info, inner)
		}
	}
	return handler(ctx, req)
}

// ---------------------------------------------------------------- the backend

func (ex *ExamplePlugin) GetInfo(context.Context, *backendv1.GetInfoRequest) (*backendv1.GetInfoResponse, error) {
	return &backendv1.GetInfoResponse{DriverName: ex.driverName, MetadataFiles: ex.metadata}, nil
}

func (ex *ExamplePlugin) WatchDevices(_ *backendv1.WatchDevicesRequest, stream grpc.ServerStreamingServer[backendv1.WatchDevicesResponse]) error {
	return ex.devices.Follow(stream)
}

func (ex *ExamplePlugin) WatchHealth(_ *backendv1.WatchHealthRequest, stream grpc.ServerStreamingServer[backendv1.WatchHealthResponse]) error {
	return ex.health.Follow(stream)
}

func (ex *ExamplePlugin) followHealth(ctx context.Context) {
	for {
		select {
		case <-ex.instance.Stopped():
			return
		case update := <-ex.HealthControlChan:
			klog.FromContext(ctx).V(3).Info("health update", "update", update)
			ex.health.Set(update.PoolName, update.DeviceName, update.Health, update.Message)
		}
	}
}

// kubeletClaims returns claims as the kubelet names them in its calls.
func kubeletClaims(claims []*backendv1.Claim) []*drapb.Claim {
	named := make([]*drapb.Claim, len(claims))
	for i, claim := range claims {
		named[i] = &drapb.Claim{Namespace: claim.Namespace, Name: claim.Name, Uid: claim.Uid}
	}
	return named
}

func (ex *ExamplePlugin) PrepareClaims(ctx context.Context, req *backendv1.PrepareClaimsRequest) (*backendv1.PrepareClaimsResponse, error) {
	answer := &backendv1.PrepareClaimsResponse{}
	request := &drapb.NodePrepareResourcesRequest{Claims: kubeletClaims(req.Claims)}
	_, err := ex.intercepted(ctx, prepareMethod, request, func(ctx context.Context, _ any) (any, error) {
		ex.blockedPrepare.Lock()
		defer ex.blockedPrepare.Unlock()
		if err := ex.failure(prepareMethod); err != nil {
			return nil, err
		}
		recorded := &drapb.NodePrepareResourcesResponse{Claims: map[string]*drapb.NodePrepareResourceResponse{}}
		for _, claim := range req.Claims {
			prepared, err := ex.prepareClaim(ctx, claim)
			if err != nil {
				answer.Claims = append(answer.Claims, &backendv1.PreparedClaim{Uid: claim.Uid, Error: err.Error()})
				recorded.Claims[claim.Uid] = &drapb.NodePrepareResourceResponse{Error: err.Error()}
				continue
			}
			answer.Claims = append(answer.Claims, prepared)
			recorded.Claims[claim.Uid] = &drapb.NodePrepareResourceResponse{}
		}
		return recorded, nil
	})
	return answer, err
}

func (ex *ExamplePlugin) UnprepareClaims(ctx context.Context, req *backendv1.UnprepareClaimsRequest) (*backendv1.UnprepareClaimsResponse, error) {
	answer := &backendv1.UnprepareClaimsResponse{}
	request := &drapb.NodeUnprepareResourcesRequest{Claims: kubeletClaims(req.Claims)}
	_, err := ex.intercepted(ctx, unprepareMethod, request, func(context.Context, any) (any, error) {
		ex.blockedUnprepare.Lock()
		defer ex.blockedUnprepare.Unlock()
		if err := ex.failure(unprepareMethod); err != nil {
			return nil, err
		}
		recorded := &drapb.NodeUnprepareResourcesResponse{Claims: map[string]*drapb.NodeUnprepareResourceResponse{}}
		for _, claim := range req.Claims {
			ex.forget(ClaimID{Name: claim.Name, UID: types.UID(claim.Uid)})
			answer.Claims = append(answer.Claims, &backendv1.UnpreparedClaim{Uid: claim.Uid})
			recorded.Claims[claim.Uid] = &drapb.NodeUnprepareResourceResponse{}
		}
		return recorded, nil
	})
	return answer, err
}

// prepareClaim returns the environment variables that the specs look for: those of the parameters, with
// the prefix admin_ if they are the class's and user_ if they are the claim's, and one for the request.
// With metadata files, it also returns the attributes that the specs read in them.
func (ex *ExamplePlugin) prepareClaim(ctx context.Context, claim *backendv1.Claim) (*backendv1.PreparedClaim, error) {
	id := ClaimID{Name: claim.Name, UID: types.UID(claim.Uid)}
	stored, err := ex.resourceClient.ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get claim: %w", err)
	}
	if stored.UID != id.UID || stored.Status.Allocation == nil {
		return nil, fmt.Errorf("drakit prepares claim %s, but the stored one has UID %s and allocation %v", claim.Uid, stored.UID, stored.Status.Allocation)
	}
	var results []resourceapi.DeviceRequestAllocationResult
	for _, result := range stored.Status.Allocation.Devices.Results {
		if result.Driver == ex.driverName {
			results = append(results, result)
		}
	}
	if len(results) != len(claim.Devices) {
		return nil, fmt.Errorf("drakit prepares %d devices of claim %s, which has %d", len(claim.Devices), claim.Name, len(results))
	}
	prepared := &backendv1.PreparedClaim{Uid: claim.Uid}
	for i, result := range results {
		env, err := ex.environment(stored, result, claim.Devices[i])
		if err != nil {
			return nil, err
		}
		prepared.Edits = append(prepared.Edits, &backendv1.Edits{Env: env})
		if ex.metadata {
			prepared.Devices = append(prepared.Devices, &backendv1.PreparedDevice{Attributes: map[string]*backendv1.Attribute{
				"driverName": text(ex.driverName),
				"pool":       text(result.Pool),
				"device":     text(result.Device),
			}})
		}
	}
	ex.mutex.Lock()
	defer ex.mutex.Unlock()
	ex.prepared[id] = true
	return prepared, nil
}

func text(value string) *backendv1.Attribute {
	return &backendv1.Attribute{Value: &backendv1.Attribute_String_{String_: value}}
}

// environment checks what drakit passed on against the claim itself: device, share and parameters.
func (ex *ExamplePlugin) environment(claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult, device *backendv1.AllocatedDevice) (map[string]string, error) {
	pool := nodeplugin.BackendPool(ex.nodeName, result.Pool)
	shareID := ""
	if result.ShareID != nil {
		shareID = string(*result.ShareID)
	}
	adminAccess := result.AdminAccess != nil && *result.AdminAccess
	if device.Name != result.Device || device.Pool != pool || device.Request != result.Request || device.GetShareId() != shareID || device.AdminAccess != adminAccess {
		return nil, fmt.Errorf("drakit prepares %v for the result %v of claim %s", device, result, claim.Name)
	}
	for name, amount := range result.ConsumedCapacity {
		if got, err := resource.ParseQuantity(device.ConsumedCapacity[string(name)]); err != nil || got.Cmp(amount) != 0 {
			return nil, fmt.Errorf("drakit passes the capacity %v of claim %s on as %v", result.ConsumedCapacity, claim.Name, device.ConsumedCapacity)
		}
	}
	env := map[string]string{}
	passed := device.Configs
	for _, config := range resourceclaim.ConfigForResult(claim.Status.Allocation.Devices.Config, result) {
		if config.Opaque.Driver != ex.driverName {
			continue
		}
		if len(passed) == 0 {
			return nil, fmt.Errorf("drakit omits the config %s of claim %s", config.Opaque.Parameters.Raw, claim.Name)
		}
		var wanted, got map[string]string
		if err := errors.Join(json.Unmarshal(config.Opaque.Parameters.Raw, &wanted), json.Unmarshal([]byte(passed[0]), &got)); err != nil {
			return nil, fmt.Errorf("parameters of claim %s: %w", claim.Name, err)
		}
		if !maps.Equal(wanted, got) {
			return nil, fmt.Errorf("drakit passes the config %v of claim %s on as %v", wanted, claim.Name, got)
		}
		passed = passed[1:]
		prefix := "user_"
		if config.Source == resourceapi.AllocationConfigSourceClass {
			prefix = "admin_"
		}
		for key, value := range wanted {
			env[prefix+key] = value
		}
	}
	if len(passed) != 0 {
		return nil, fmt.Errorf("drakit adds the configs %v to claim %s", passed, claim.Name)
	}
	name := "claim_" + claim.Name + "_" + resourceclaim.BaseRequestRef(result.Request)
	env[regexp.MustCompile(`[^a-zA-Z0-9]`).ReplaceAllString(name, "_")] = "true"
	return env, nil
}
