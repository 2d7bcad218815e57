{{/*
drakit.fullname: the prefix of all names of a release, so that several releases can be installed. The
release drakit gets the names drakit-nodeplugin and drakit-operator. A prefix of 52 characters leaves
room for the component in a label of 63.
*/}}
{{- define "drakit.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 52 | trimAll "-." }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimAll "-." }}
{{- end }}
{{- end }}

{{/* drakit.site: the address of a page of the documentation. */}}
{{- define "drakit.site" -}}https://drakit.github.io/drakit/dev/{{ . }}{{- end }}

{{- define "drakit.nodeplugin" -}}{{ include "drakit.fullname" . }}-nodeplugin{{- end }}
{{- define "drakit.operator" -}}{{ include "drakit.fullname" . }}-operator{{- end }}
{{- define "drakit.setup" -}}{{ include "drakit.fullname" . }}-setup{{- end }}

{{/*
drakit.setup.jobName: the name of a hook's Job, which becomes a label of its pods, and has at most 63
characters. A long prefix is truncated, and its digest keeps the names of two releases different.
*/}}
{{- define "drakit.setup.jobName" -}}
{{- $prefix := include "drakit.fullname" .root }}
{{- $suffix := printf "-setup-%s" .command }}
{{- if gt (add (len $prefix) (len $suffix)) 63 }}
{{- $room := sub 54 (len $suffix) | int }}
{{- $prefix = printf "%s-%s" ($prefix | trunc $room | trimAll "-.") ($prefix | sha256sum | trunc 8) }}
{{- end }}
{{- $prefix }}{{ $suffix }}
{{- end }}

{{/*
drakit.selector: the labels that select the pods of one component of this release. Selectors are
immutable, and those of earlier charts contain only name and component. Therefore, the name
distinguishes releases, and no label is added. All releases have the label part-of: drakit.
*/}}
{{- define "drakit.selector" -}}
app.kubernetes.io/name: {{ include "drakit.fullname" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "drakit.labels" -}}
{{ include "drakit.selector" . }}
app.kubernetes.io/part-of: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/*
drakit.classApi: the API version of DeviceClasses. Their fields are the same in all versions. Without
a cluster (helm template), Helm knows no version, and v1 is assumed.
*/}}
{{- define "drakit.classApi" -}}
{{- $versions := .Capabilities.APIVersions }}
{{- $api := "resource.k8s.io/v1" }}
{{- range list "v1beta1" "v1beta2" "v1" }}
{{- $candidate := printf "resource.k8s.io/%s" . }}
{{- if $versions.Has (printf "%s/DeviceClass" $candidate) }}{{ $api = $candidate }}{{ end }}
{{- end }}
{{- $api }}
{{- end }}

{{/*
drakit.crds.stale: not empty if a definition in the cluster differs from the chart's, or if one is missing
that Helm does not install. Without a cluster (helm template), definitions are current.
*/}}
{{- define "drakit.crds.stale" -}}
{{- range $path, $_ := .Files.Glob "crds/*.yaml" }}
{{- $metadata := ($.Files.Get $path | fromYaml).metadata }}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $metadata.name }}
{{- $checksum := dig "metadata" "annotations" "drakit.dev/checksum" "" $found }}
{{- if and (or $found $.Release.IsUpgrade) (ne $checksum (index $metadata.annotations "drakit.dev/checksum")) }}yes{{ end }}
{{- end }}
{{- end }}

{{- define "drakit.image" -}}
{{- $image := .root.Values.image }}
{{- if not $image.repository }}
{{- fail (printf "image.repository is empty, and there are no public images: build the images, and set image.repository to the prefix of their names, such as registry.example.com/drakit. See %s" (include "drakit.site" "admin/install/#build-the-images")) }}
{{- end }}
{{- with get $image.digest .component -}}
{{ printf "%s-%s@%s" $image.repository $.component . }}
{{- else -}}
{{ printf "%s-%s:%s" $image.repository .component ($image.tag | default .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/*
drakit.token: a volume with the token of the pod's service account, which the kubelet replaces within
the hour. On most clusters, the token that Kubernetes mounts by default is valid for a year.
*/}}
{{- define "drakit.token" -}}
- name: token
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}

{{- define "drakit.token.mount" -}}
- {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}

{{/*
drakit.setup.job: a Job that runs `drakit setup`, as a hook. It uses the image of the node plugin, because
a vendor's release has no image of the operator. A removal that is refused stays refused: only an admin
can change that, so it is not retried.
*/}}
{{- define "drakit.setup.job" -}}
{{- $component := dict "root" .root "component" "nodeplugin" -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ include "drakit.setup.jobName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "drakit.labels" (dict "root" .root "component" "setup") | nindent 4 }}
  annotations:
    helm.sh/hook: {{ .events }}
    helm.sh/hook-weight: "0"
    # A failed Job stays, with its log.
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
    {{- if eq .command "remove" }}
    helm.sh/hook-output-log-policy: hook-succeeded,hook-failed
    {{- end }}
spec:
  backoffLimit: {{ ternary 0 2 (eq .command "remove") }}
  activeDeadlineSeconds: 300
  template:
    metadata:
      labels:
        {{- include "drakit.labels" (dict "root" .root "component" "setup") | nindent 8 }}
    spec:
      serviceAccountName: {{ include "drakit.setup" .root }}
      automountServiceAccountToken: false
      restartPolicy: Never
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets: {{ toJson . }}
      {{- end }}
      {{- with .root.Values.operator.tolerations }}
      tolerations: {{ toJson . }}
      {{- end }}
      {{- with .root.Values.operator.nodeSelector }}
      nodeSelector: {{ toJson . }}
      {{- end }}
      enableServiceLinks: false
      {{- if not .root.Values.operator.hostUsers }}
      hostUsers: false
      {{- end }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        seccompProfile: {type: RuntimeDefault}
      containers:
        - name: setup
          image: {{ include "drakit.image" $component }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          command: [/opt/drakit/bin/drakit, setup, {{ .command }}]
          args:
            - --release={{ .root.Release.Namespace }}/{{ .root.Release.Name }}
            {{- with .file }}
            - --file={{ . }}
            {{- end }}
            {{- if eq .command "remove" }}
            - --daemonset={{ include "drakit.nodeplugin" .root }}
            {{- $drivers := include "drakit.drivers" .root | fromJson }}
            {{- range $drivers.names }}
            - --driver={{ . }}
            {{- end }}
            {{- if not $drivers.complete }}
            - --unnamed-drivers
            {{- end }}
            {{- end }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: [ALL]
            {{- with .root.Values.operator.appArmorProfile }}
            appArmorProfile: {{ toJson . }}
            {{- end }}
          resources:
            requests: {cpu: 10m, memory: 64Mi}
            limits: {memory: 128Mi}
          volumeMounts:
            {{- include "drakit.token.mount" .root | nindent 12 }}
            {{- if .file }}
            - {name: policies, mountPath: /etc/drakit, readOnly: true}
            {{- end }}
      volumes:
        {{- include "drakit.token" .root | nindent 8 }}
        {{- if .file }}
        - name: policies
          configMap: {name: {{ include "drakit.setup" .root }}}
        {{- end }}
{{- end }}

{{/* drakit.hostdev.policies: the specs of the policies that are enabled, as a JSON object. */}}
{{- define "drakit.hostdev.policies" -}}
{{- $enabled := dict }}
{{- range $name, $policy := .Values.hostdev.policies }}
{{- if dig "enabled" true $policy }}
{{- $spec := omit $policy "enabled" }}
{{- if not $.Values.hostdev.deviceClasses }}
{{- $_ := set $spec "deviceClass" (merge (dict "create" "Never") (dig "deviceClass" dict $policy)) }}
{{- end }}
{{- $_ := set $enabled $name $spec }}
{{- end }}
{{- end }}
{{- toJson $enabled }}
{{- end }}

{{/*
drakit.hostdev.extendedResources: a JSON object with the extended resources that the operator can write
into DeviceClasses: the names in the policies of the values, and the prefixes for all other policies.
*/}}
{{- define "drakit.hostdev.extendedResources" -}}
{{- $names := list }}
{{- range $policy := include "drakit.hostdev.policies" . | fromJson }}
{{- if eq (dig "deviceClass" "create" "Always" $policy) "Always" }}
{{- with dig "deviceClass" "extendedResourceName" "" $policy }}{{ $names = append $names . }}{{ end }}
{{- end }}
{{- end }}
{{- $prefixes := list }}
{{- range $prefix, $allowed := .Values.hostdev.extendedResourcePrefixes }}
{{- if $allowed }}{{ $prefixes = append $prefixes $prefix }}{{ end }}
{{- end }}
{{- dict "names" ($names | uniq | sortAlpha) "prefixes" $prefixes | toJson }}
{{- end }}

{{/* drakit.hostdev: the configuration of the driver `hostdev`, with the mount paths of this chart. */}}
{{- define "drakit.hostdev" -}}
allowDangerous: {{ .Values.hostdev.allowDangerous | default false }}
rescanInterval: {{ .Values.hostdev.rescanInterval }}
devRoot: /host/dev
udevRoot: /host/run/udev
mountinfo: /host/mountinfo
{{- end }}

{{/* drakit.home: the directory of the node that contains drakit's data and sockets (drakit/layout.py). */}}
{{- define "drakit.home" -}}
{{ .Values.nodeplugin.kubeletRoot }}/plugins/drakit.dev
{{- end }}

{{/* drakit.simulated.control: the control file in the data directory of the driver `simulated`. */}}
{{- define "drakit.simulated.control" -}}
{{ include "drakit.home" . }}/drivers/{{ .Values.simulated.config.driverName }}/control.json
{{- end }}

{{/* drakit.simulated: the configuration of the driver `simulated`. */}}
{{- define "drakit.simulated" -}}
{{- toYaml (merge (dict "controlFile" (include "drakit.simulated.control" .)) .Values.simulated.config) }}
{{- end }}

{{/*
drakit.nodeplugin.tolerations: every NoExecute taint, because a plugin that is evicted cannot unprepare
claims, the taints of device nodes, and the tolerations of the values.
*/}}
{{- define "drakit.nodeplugin.tolerations" -}}
{{- $tolerations := list (dict "operator" "Exists" "effect" "NoExecute") }}
{{- range $key, $tolerated := .Values.nodeplugin.deviceTaints }}
{{- if $tolerated }}
{{- $tolerations = append $tolerations (dict "key" $key "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- end }}
{{- concat $tolerations (.Values.nodeplugin.tolerations | default list) | toJson }}
{{- end }}

{{/*
drakit.test: the DeviceClass of `helm test`, and the environment variable that its driver sets, as a JSON
object; empty if the values have no class. The request of the claim is `device`.
*/}}
{{- define "drakit.test" -}}
{{- $found := list }}
{{- with .Values.test.deviceClass }}
{{- $found = append $found (dict "class" .) }}
{{- end }}
{{- $simulated := .Values.simulated }}
{{- if and $simulated.enabled $simulated.deviceClasses }}
{{- range $type := list "gpu" "nic" "cpu" }}
{{- if (get $simulated.config $type).count }}
{{- $found = append $found (dict "class" (printf "%s.%s" $type $simulated.config.driverName) "variable" "SIMULATED_DEVICE") }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.devicePlugins.enabled }}
{{- range $class := include "drakit.devicePlugins.classes" . | fromJson }}
{{- $found = append $found (dict "class" $class) }}
{{- end }}
{{- end }}
{{- if .Values.hostdev.enabled }}
{{- range $name, $policy := include "drakit.hostdev.policies" . | fromJson }}
{{- $class := dig "deviceClass" dict $policy }}
{{- if and (ne (dig "create" "Always" $class) "Never") (not $policy.allowedNamespaces) }}
{{- $found = append $found (dict "class" (dig "name" "" $class | default (printf "%s.drakit.dev" $name)) "variable" "HOSTDEV_DEVICE") }}
{{- end }}
{{- end }}
{{- end }}
{{- with $found }}{{ first . | toJson }}{{ end }}
{{- end }}

{{/* drakit.hosts: not empty if the plugin hosts drivers in its own process. */}}
{{- define "drakit.hosts" -}}
{{- if or .Values.hostdev.enabled .Values.simulated.enabled .Values.nodeplugin.drivers }}yes{{ end }}
{{- end }}

{{- define "drakit.backends.directory" -}}
{{ .Values.backends.directory | default (printf "%s/backends" (include "drakit.home" .)) }}
{{- end }}

{{- define "drakit.devicePlugins.directory" -}}
{{ .Values.devicePlugins.directory | default (printf "%s/device-plugins" (include "drakit.home" .)) }}
{{- end }}

{{/*
drakit.backends.drivers: the drivers of backends, as a JSON list. Fails if two entries have the same one.
*/}}
{{- define "drakit.backends.drivers" -}}
{{- $drivers := list }}
{{- range $name, $entry := .Values.backends.allowed }}
{{- if has $entry.driver $drivers }}
{{- fail (printf "backends.allowed: two entries have the driver %s: remove one of them" $entry.driver) }}
{{- end }}
{{- $drivers = append $drivers $entry.driver }}
{{- end }}
{{- toJson $drivers }}
{{- end }}

{{/*
drakit.devicePlugins.classes: the names of the DeviceClasses of device plugins, by resource, as a JSON
object. Fails if two entries have the same resource, or if there are too many.
*/}}
{{- define "drakit.devicePlugins.classes" -}}
{{- $classes := dict }}
{{- range $name, $entry := .Values.devicePlugins.plugins }}
{{- range $entry.resources }}
{{- $resource := . }}
{{- $class := "" }}
{{- if kindIs "map" . }}
{{- $resource = .name }}
{{- $class = .deviceClass }}
{{- else }}
{{- /* vendor.example/thing_2 is thing-2.vendor.example: the first part is the most specific. */}}
{{- $parts := splitn "/" 2 . }}
{{- $class = printf "%s.%s" (regexReplaceAll "[^a-z0-9]+" (lower $parts._1) "-") $parts._0 }}
{{- end }}
{{- if hasKey $classes $resource }}
{{- fail (printf "devicePlugins.plugins: two entries have the resource %s: remove one of them" $resource) }}
{{- end }}
{{- $_ := set $classes $resource $class }}
{{- end }}
{{- end }}
{{- if gt (len $classes) 256 }}
{{- fail (printf "devicePlugins.plugins has %d resources, and a node plugin serves at most 256: remove some" (len $classes)) }}
{{- end }}
{{- toJson $classes }}
{{- end }}

{{/*
drakit.devicePlugins.entries: the entries of device plugins in the node plugin's format, which has no
DeviceClasses, as a JSON object.
*/}}
{{- define "drakit.devicePlugins.entries" -}}
{{- $entries := dict }}
{{- range $name, $entry := .Values.devicePlugins.plugins }}
{{- $resources := list }}
{{- range $entry.resources }}
{{- if kindIs "map" . }}{{ $resources = append $resources .name }}{{ else }}{{ $resources = append $resources . }}{{ end }}
{{- end }}
{{- $_ := set $entries $name (merge (dict "resources" $resources) (omit $entry "resources")) }}
{{- end }}
{{- toJson $entries }}
{{- end }}

{{/* drakit.checkDirectory: fails if a directory for external sockets is one of drakit's own. */}}
{{- define "drakit.checkDirectory" -}}
{{- $home := include "drakit.home" .root }}
{{- $drivers := printf "%s/drivers" $home }}
{{- if eq .directory $home }}
{{- fail (printf "%s cannot be %s, which contains drakit's data: choose another directory" .key .directory) }}
{{- else if or (eq .directory $drivers) (hasPrefix (printf "%s/" $drivers) .directory) }}
{{- fail (printf "%s cannot be %s, because %s contains the data of drivers: choose another directory" .key .directory $drivers) }}
{{- else if eq .directory .root.Values.nodeplugin.cdiDirectory }}
{{- fail (printf "%s cannot be %s, which is nodeplugin.cdiDirectory: choose another directory" .key .directory) }}
{{- end }}
{{- end }}

{{/*
drakit.directories: the directories of backends and device plugins that need a separate mount, because
they are outside drakit.home: a YAML object, volume name to path.
*/}}
{{- define "drakit.directories" -}}
{{- $have := printf "%s/" (include "drakit.home" .) }}
{{- if .Values.backends.enabled }}
{{- $directory := include "drakit.backends.directory" . }}
{{- include "drakit.checkDirectory" (dict "root" . "key" "backends.directory" "directory" $directory) }}
{{- if not (hasPrefix $have $directory) }}
backends: {{ $directory }}
{{- end }}
{{- end }}
{{- if .Values.devicePlugins.enabled }}
{{- $directory := include "drakit.devicePlugins.directory" . }}
{{- include "drakit.checkDirectory" (dict "root" . "key" "devicePlugins.directory" "directory" $directory) }}
{{- if not (hasPrefix $have $directory) }}
device-plugins: {{ $directory }}
{{- end }}
{{- end }}
{{- end }}

{{/*
drakit.sees-dev: whether the plugin needs the host's /dev. hostdev finds devices there, and the plugin
resolves links and directories of device plugins, and compares device nodes with the host's.
*/}}
{{- define "drakit.sees-dev" -}}
{{- if or .Values.hostdev.enabled .Values.devicePlugins.enabled .Values.backends.enabled }}yes{{ end }}
{{- end }}

{{- define "drakit.nodeplugin.config" -}}
kubeletRoot: {{ .Values.nodeplugin.kubeletRoot }}
cdiDirectory: {{ .Values.nodeplugin.cdiDirectory }}
{{- if .Values.nodeplugin.bootIDFile }}
bootIDFile: /host/boot_id
{{- end }}
{{- with .Values.nodeplugin.staleClaims }}
staleClaims: {{ toJson . }}
{{- end }}
{{- with .Values.nodeplugin.opaqueParameters }}
opaqueParameters: {{ toJson . }}
{{- end }}
{{- with .Values.nodeplugin.claimStatus }}
claimStatus: {{ toJson . }}
{{- end }}
{{- with .Values.nodeplugin.devices }}
devices: {{ toJson . }}
{{- end }}
{{- if .Values.maintenance.enabled }}
deviceMaintenance: true
{{- end }}
{{- if .Values.nodeplugin.kubeletStateDirectory }}
kubeletStateFile: /host/kubelet/dra_manager_state
{{- end }}
{{ include "drakit.listen" . }}
logging: {{ toJson .Values.logging }}
events: {{ toJson .Values.events }}
{{- if .Values.metrics.podDevices }}
metrics: {podDevices: true}
{{- end }}
{{- if .Values.backends.enabled }}
backends:
  enabled: true
  directory: {{ include "drakit.backends.directory" . }}
  allowed: {{ toJson (.Values.backends.allowed | default dict) }}
{{- end }}
{{- if .Values.devicePlugins.enabled }}
devicePlugins:
  enabled: true
  directory: {{ include "drakit.devicePlugins.directory" . }}
  driverName: {{ .Values.devicePlugins.driverName }}
  metadataFiles: {{ .Values.devicePlugins.metadataFiles }}
  plugins: {{ include "drakit.devicePlugins.entries" . }}
{{- end }}
{{- if not (include "drakit.hosts" .) }}
drivers: []
{{- else }}
drivers:
{{- if .Values.hostdev.enabled }}
  - driver: hostdev
    config:
      {{- include "drakit.hostdev" . | nindent 6 }}
{{- end }}
{{- if .Values.simulated.enabled }}
  - driver: simulated
    config:
      {{- include "drakit.simulated" . | nindent 6 }}
{{- end }}
{{- with .Values.nodeplugin.drivers }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* drakit.admission.secret: the Secret with the certificate of the admission webhook. */}}
{{- define "drakit.admission.secret" -}}
{{- $admission := .Values.operator.admission }}
{{- if eq $admission.certificates "Secret" }}{{ $admission.secretName }}
{{- else }}{{ include "drakit.operator" . }}-admission{{ if eq $admission.certificates "CertManager" }}-tls{{ end }}
{{- end }}
{{- end }}

{{- define "drakit.operator.config" -}}
{{- $election := dict "leaseName" (include "drakit.operator" .) }}
{{- $listen := include "drakit.listen" . | fromYaml }}
{{- $defaults := dict "election" $election "events" .Values.events "hostDevicePolicies" .Values.hostdev.enabled "restrictNamespaces" (and .Values.hostdev.enabled .Values.hostdev.restrictNamespaces) "deviceMaintenance" .Values.maintenance.enabled "driverTaints" .Values.operator.driverTaints.enabled "admission" (dict "enabled" .Values.operator.admission.enabled "listen" ":8443") }}
{{- toYaml (merge (dict "logging" .Values.logging) $listen .Values.operator.config $defaults) }}
{{- end }}

{{/* drakit.listen: the addresses of both daemons' servers; the empty host means all addresses, IPv4 and IPv6. */}}
{{- define "drakit.listen" -}}
listen: {probes: ":8081", metrics: ":8080"}
{{- end }}

{{/* drakit.probes: the startup, liveness and readiness probes of both components, and what their status says after an error. */}}
{{- define "drakit.probes" -}}
terminationMessagePolicy: FallbackToLogsOnError
# Without the delay, the kubelet probes before the process listens, and writes a Warning at each start.
startupProbe:
  httpGet: {path: /healthz, port: probes}
  initialDelaySeconds: 2
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: probes}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: probes}
  periodSeconds: 3
  timeoutSeconds: 3
{{- end }}
