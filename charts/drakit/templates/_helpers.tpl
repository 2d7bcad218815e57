{{/* Names are fixed: a driver is in a cluster once, and its policy names the service account. */}}
{{- define "drakit.nodeplugin" -}}drakit-nodeplugin{{- end }}
{{- define "drakit.operator" -}}drakit-operator{{- end }}

{{/* drakit.selector: what selects the pods of a component; it never changes. */}}
{{- define "drakit.selector" -}}
app.kubernetes.io/name: drakit
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "drakit.labels" -}}
{{ include "drakit.selector" . }}
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

{{- define "drakit.nodeplugin.config" -}}
kubeletRoot: {{ .Values.nodeplugin.kubeletRoot }}
cdiDirectory: {{ .Values.nodeplugin.cdiDirectory }}
{{- if .Values.nodeplugin.bootIDFile }}
bootIDFile: /host/boot_id
{{- end }}
{{- with .Values.nodeplugin.staleClaims }}
staleClaims: {{ toJson . }}
{{- end }}
{{- if .Values.nodeplugin.kubeletStateDirectory }}
kubeletStateFile: /host/kubelet/dra_manager_state
{{- end }}
listen: ":8080"  # every address, of either family
logging: {{ toJson .Values.logging }}
drivers:
{{- if .Values.hostdev.enabled }}
  - driver: hostdev
    config:
      {{- include "drakit.hostdev" . | nindent 6 }}
{{- end }}
{{- with .Values.nodeplugin.drivers }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "drakit.operator.config" -}}
{{- toYaml (merge (dict "listen" ":8080" "logging" .Values.logging) .Values.operator.config) }}
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
