{{/*
drakit.fullname: what every name of a release begins with, so that the chart can be installed several
times. A release called drakit, as the documentation has it, gets the names drakit-nodeplugin and
drakit-operator. 52 characters leave room for the component in a label of 63.
*/}}
{{- define "drakit.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "drakit.nodeplugin" -}}{{ include "drakit.fullname" . }}-nodeplugin{{- end }}
{{- define "drakit.operator" -}}{{ include "drakit.fullname" . }}-operator{{- end }}

{{/*
drakit.selector: what selects the pods of a component of this release, and no other's. It cannot be
changed once it is installed, and was name and component in charts that could be installed once: so
the name, not a label of its own, tells the releases apart. All of them are part-of drakit.
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

{{- define "drakit.image" -}}
{{ printf "%s-%s:%s" .root.Values.image.repository .component (.root.Values.image.tag | default .root.Chart.AppVersion) }}
{{- end }}

{{/* drakit.hostdev: hostdev's configuration; where the host is seen is the chart's business. */}}
{{- define "drakit.hostdev" -}}
policies: {{ toJson .Values.hostdev.policies }}
allowDisks: {{ .Values.hostdev.allowDisks }}
rescanInterval: {{ .Values.hostdev.rescanInterval }}
devRoot: /host/dev
udevRoot: /host/run/udev
mountinfo: /host/mountinfo
{{- end }}

{{/* drakit.simulated: simulated's configuration; commands for its devices lie in its data directory. */}}
{{- define "drakit.simulated" -}}
{{- $folder := printf "%s/plugins/%s" .Values.nodeplugin.kubeletRoot .Values.simulated.config.driverName }}
{{- toYaml (merge (dict "controlFile" (printf "%s/control.json" $folder)) .Values.simulated.config) }}
{{- end }}

{{/* drakit.hosts: not empty if the plugin hosts drivers in its own process. */}}
{{- define "drakit.hosts" -}}
{{- if or .Values.hostdev.enabled .Values.simulated.enabled .Values.nodeplugin.drivers }}yes{{ end }}
{{- end }}

{{- define "drakit.backends.directory" -}}
{{ .Values.backends.directory | default (printf "%s/plugins/drakit.dev/backends" .Values.nodeplugin.kubeletRoot) }}
{{- end }}

{{- define "drakit.devicePlugins.directory" -}}
{{ .Values.devicePlugins.directory | default (printf "%s/plugins/drakit.dev/device-plugins" .Values.nodeplugin.kubeletRoot) }}
{{- end }}

{{/*
drakit.directories: those of backends and device plugins that are not below the kubelet's plugins,
which the plugin has anyway: a YAML object, volume name to path.
*/}}
{{- define "drakit.directories" -}}
{{- $have := printf "%s/plugins/" .Values.nodeplugin.kubeletRoot }}
{{- if .Values.backends.enabled }}
{{- $directory := include "drakit.backends.directory" . }}
{{- if not (hasPrefix $have $directory) }}
backends: {{ $directory }}
{{- end }}
{{- end }}
{{- if .Values.devicePlugins.enabled }}
{{- $directory := include "drakit.devicePlugins.directory" . }}
{{- if not (hasPrefix $have $directory) }}
device-plugins: {{ $directory }}
{{- end }}
{{- end }}
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
{{- with .Values.nodeplugin.devices }}
devices: {{ toJson . }}
{{- end }}
{{- if .Values.nodeplugin.kubeletStateDirectory }}
kubeletStateFile: /host/kubelet/dra_manager_state
{{- end }}
listen: ":8080"  # every address, of either family
logging: {{ toJson .Values.logging }}
events: {{ toJson .Values.events }}
{{- if .Values.backends.enabled }}
backends: {enabled: true, directory: {{ include "drakit.backends.directory" . }}}
{{- end }}
{{- if .Values.devicePlugins.enabled }}
devicePlugins:
  enabled: true
  directory: {{ include "drakit.devicePlugins.directory" . }}
  driverName: {{ .Values.devicePlugins.driverName }}
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

{{- define "drakit.operator.config" -}}
{{- $election := dict "leaseName" (include "drakit.operator" .) }}
{{- $defaults := dict "election" $election "events" .Values.events }}
{{- toYaml (merge (dict "listen" ":8080" "logging" .Values.logging) .Values.operator.config $defaults) }}
{{- end }}

{{/* drakit.probes: live once it has started, ready when it can do its work. */}}
{{- define "drakit.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 3
  timeoutSeconds: 3
{{- end }}
