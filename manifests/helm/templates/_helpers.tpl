{{/* The name of the DaemonSet and its container. */}}
{{- define "name" -}}
{{- if .Values.nonMasqueradeDaemon }}non-masquerade-daemon{{ else if .Values.takeover }}ip-masq-agent{{ else }}{{ .Values.name }}{{ end }}
{{- end }}

{{/* A DaemonSet that replaces another one must have its selector. */}}
{{- define "selectorLabels" -}}
{{- if or .Values.takeover .Values.nonMasqueradeDaemon }}k8s-app: {{ include "name" . }}{{ else }}{{ include "podLabels" . }}{{ end }}
{{- end }}

{{/* Of the pods of this release. The name is that of all releases: README's commands find them by it. */}}
{{- define "podLabels" -}}
app.kubernetes.io/name: nft-masq-agent
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "labels" -}}
{{ include "podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "mode" -}}
{{ .Values.nonMasqueradeDaemon | ternary "iptables-nft" .Values.mode }}
{{- end }}

{{- define "configMap" -}}
{{- $own := .Values.nonMasqueradeDaemon | ternary "non-masquerade-daemon" "ip-masq-agent" }}
{{- if .Values.config }}{{ include "name" . }}{{ else }}{{ .Values.existingConfigMap | default $own }}{{ end }}
{{- end }}

{{- define "args" -}}
{{- if .Values.removal -}}
- cleanup
- --wait
{{- else -}}
- --http-address=127.0.0.1:9717
- --probe-socket=/run/nft-masq-agent/probe.sock
{{- if ne (include "mode" .) "nftables" }}
- --mode={{ include "mode" . }}
{{- end }}
{{- if .Values.nonMasqueradeDaemon }}
- --masq-chain=NON-MASQUERADE-DAEMON
- --config=/etc/config/non-masquerade-daemon
{{- end }}
{{- if .Values.takeover }}
- --takeover
{{- end }}
{{- if or .Values.prometheus.enabled .Values.waitForRules }}
- --http-address=[$(HOST_IP)]:9717
{{- end }}
{{- with .Values.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{/* The values of a probe, its flag of ready, and the defaults of period and threshold. */}}
{{- define "probe" -}}
exec:
  command: [/nft-masq-agent, ready{{ with index . 1 }}, {{ . }}{{ end }}]
{{ merge (dict) (index . 0) (dict "timeoutSeconds" 5 "periodSeconds" (index . 2) "failureThreshold" (index . 3)) | toYaml }}
{{- end }}

{{- define "serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default .Values.name }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "resources" -}}
{{- with .Values.resources }}
{{- toYaml . }}
{{- else -}}
requests:
  cpu: 10m
  memory: 16Mi
limits:
  memory: 192Mi
{{- end }}
{{- end }}

{{- define "check" -}}
{{- if and .Values.config .Values.existingConfigMap }}{{ fail "set config or existingConfigMap, not both" }}{{ end }}
{{- if and .Values.takeover .Values.nonMasqueradeDaemon }}{{ fail "set takeover or nonMasqueradeDaemon, not both" }}{{ end }}
{{- if and (or .Values.podMonitor.enabled .Values.prometheusRule.enabled) (not .Values.prometheus.enabled) }}{{ fail "podMonitor and prometheusRule need prometheus.enabled=true" }}{{ end }}
{{- end }}
