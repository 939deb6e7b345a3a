{{- define "r3router.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "r3router.fullname" -}}
{{- $name := include "r3router.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 53 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 53 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "r3router.selector" -}}
app.kubernetes.io/name: {{ include "r3router.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: router
{{- end }}

{{- define "r3router.labels" -}}
{{ include "r3router.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "r3router.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "r3router.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "r3router.image" -}}
{{- if .Values.image.digest -}}
{{ printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end -}}
{{- end }}

{{- define "r3router.scheme" -}}
{{ if .Values.tls.server.secret }}https{{ else }}http{{ end }}
{{- end }}

{{/* A quantity such as 8Gi or 512Mi in Mi; 0 for one that is written otherwise. */}}
{{- define "r3router.mi" -}}
{{- if hasSuffix "Gi" . -}}{{ mul 1024 (trimSuffix "Gi" . | int64) }}
{{- else if hasSuffix "Mi" . -}}{{ trimSuffix "Mi" . | int64 }}
{{- else -}}0{{- end -}}
{{- end }}

{{/* What the router would find out only when it is killed. */}}
{{- define "r3router.checks" -}}
{{- $limit := dig "limits" "memory" "" .Values.resources -}}
{{- $mi := include "r3router.mi" ($limit | toString) | int64 -}}
{{- $needs := add (include "r3router.mi" .Values.r3.arena | int64) 512 -}}
{{- if and (gt $mi 0) (lt $mi $needs) -}}
{{- fail (printf "resources.limits.memory is %s, and r3.arena (%s) and the router's own 512Mi need %dMi: raise the limit or lower r3.arena" $limit .Values.r3.arena $needs) -}}
{{- end -}}
{{- if and (eq (dig "r3_transport" "inline" .Values.settings) "ref") (not .Values.r3.sharedMemory) -}}
{{- fail "settings.r3_transport is ref, and references need r3.sharedMemory: true: a container's own /dev/shm has 64 MiB" -}}
{{- end -}}
{{- if and .Values.keda.enabled (or (not .Values.keda.target.name) (not .Values.keda.prometheus)) -}}
{{- fail "keda.enabled needs keda.target.name (what is scaled) and keda.prometheus (the address of Prometheus)" -}}
{{- end -}}
{{- if and .Values.keda.enabled (gt (int .Values.keda.minReplicas) (int .Values.keda.maxReplicas)) -}}
{{- fail (printf "keda.minReplicas is %d, above keda.maxReplicas (%d)" (int .Values.keda.minReplicas) (int .Values.keda.maxReplicas)) -}}
{{- end -}}
{{- with .Values.tls.server -}}
{{- if and .clientCa (not .secret) -}}
{{- fail "tls.server.clientCa is a file of tls.server.secret, which is not named" -}}
{{- end -}}
{{- end -}}
{{- with .Values.tls.engines -}}
{{- if and (or .cert .key) (not .secret) -}}
{{- fail "tls.engines.cert and tls.engines.key are files of tls.engines.secret, which is not named" -}}
{{- end -}}
{{- if and .secret (ne (empty .cert) (empty .key)) -}}
{{- fail "tls.engines.cert and tls.engines.key come together" -}}
{{- end -}}
{{- if and .secret (not .ca) (not .cert) -}}
{{- fail "tls.engines.secret is named and none of its files: set tls.engines.ca, or tls.engines.cert and tls.engines.key" -}}
{{- end -}}
{{- end -}}
{{- if eq (int .Values.containerPorts.http) (int .Values.containerPorts.metrics) -}}
{{- fail "containerPorts.http and containerPorts.metrics are the same port" -}}
{{- end -}}
{{- end }}

{{/* One value in TOML. JSON's texts are TOML's; numbers come as floats from YAML. */}}
{{- define "r3router.toml" -}}
{{- if kindIs "slice" . -}}
[{{ range $i, $v := . }}{{ if $i }}, {{ end }}{{ include "r3router.toml" $v }}{{ end }}]
{{- else if kindIs "map" . -}}
{ {{ range $i, $k := keys . | sortAlpha }}{{ if $i }}, {{ end }}{{ $k }} = {{ include "r3router.toml" (index $ $k) }}{{ end }} }
{{- else if kindIs "float64" . -}}
{{ if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- else if kindIs "string" . -}}
{{ toRawJson . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}

{{/* The router's file. What the chart knows comes first, then `settings` in the order of their names. */}}
{{- define "r3router.config" -}}
host = "0.0.0.0"
port = {{ .Values.containerPorts.http }}
prometheus_host = "0.0.0.0"
prometheus_port = {{ .Values.containerPorts.metrics }}
shutdown_grace_period_secs = {{ .Values.shutdown.graceSeconds | int64 }}
r3_arena_bytes = "{{ .Values.r3.arena }}B"
r3_store_dir = "/dev/shm"
{{- if .Values.r3.spill }}
r3_spill_dir = "/var/spill"
{{- end }}
{{- with .Values.tls.server }}
{{- if .secret }}
tls_cert_path = "/etc/r3router-tls/server/{{ .cert }}"
tls_key_path = "/etc/r3router-tls/server/{{ .key }}"
{{- if .clientCa }}
tls_client_ca_paths = ["/etc/r3router-tls/server/{{ .clientCa }}"]
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.tls.engines }}
{{- if .secret }}
{{- if .ca }}
ca_cert_paths = ["/etc/r3router-tls/engines/{{ .ca }}"]
{{- end }}
{{- if .cert }}
client_cert_path = "/etc/r3router-tls/engines/{{ .cert }}"
client_key_path = "/etc/r3router-tls/engines/{{ .key }}"
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.r3.publicUrl (ne .Values.r3.publicUrl "pod") }}
r3_public_url = {{ toRawJson .Values.r3.publicUrl }}
{{- end }}
{{- range $name := keys .Values.settings | sortAlpha }}
{{- $value := index $.Values.settings $name }}
{{- if not (kindIs "invalid" $value) }}
{{ $name }} = {{ include "r3router.toml" $value }}
{{- end }}
{{- end }}
{{- end }}
