{{- define "orca.name" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "orca.selector" -}}
app.kubernetes.io/name: orca
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "orca.labels" -}}
{{ include "orca.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: orca
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "orca.image" -}}
{{- $tag := .image.tag | default .root.Chart.AppVersion -}}
{{ .image.repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end -}}

{{- define "orca.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}{{ .Values.serviceAccount.name | default (include "orca.name" .) }}
{{- else -}}{{ .Values.serviceAccount.name | default "default" }}{{- end -}}
{{- end -}}

{{- define "orca.lease" -}}
{{ include "orca.name" . }}-{{ .Values.partition | lower }}
{{- end -}}

{{/* Where the URL of Redis is. */}}
{{- define "orca.redisSecret" -}}
{{- if .Values.redis.deploy -}}name: {{ .Values.redis.secretName | default (printf "%s-redis" (include "orca.name" .)) }}
key: url
{{- else -}}
name: {{ required "redis.urlSecret.name is needed when redis.deploy is false" .Values.redis.urlSecret.name }}
key: {{ .Values.redis.urlSecret.key }}
{{- end -}}
{{- end -}}

{{/* What every process of ours is told. */}}
{{- define "orca.env" -}}
- name: ORCA_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: ORCA_REDIS_URL
  valueFrom:
    secretKeyRef:
      {{- include "orca.redisSecret" . | nindent 6 }}
- {name: ORCA_PARTITION, value: {{ .Values.partition | quote }}}
- {name: ORCA_LOG_LEVEL, value: {{ .Values.logLevel | quote }}}
- {name: ORCA_LOG_FORMAT, value: json}
- {name: ORCA_METRICS_HOST, value: 0.0.0.0}
- {name: ORCA_METRICS_PORT, value: "9090"}
- {name: XDG_CACHE_HOME, value: /cache}
{{- with .Values.otlpEndpoint }}
- {name: ORCA_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "orca.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "orca.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "orca.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
