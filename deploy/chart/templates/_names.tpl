{{- define "sluice.selector" -}}
app.kubernetes.io/name: sluice-controller
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sluice.gateway" -}}
app.kubernetes.io/name: sluiced
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sluice.subject" -}}
- kind: ServiceAccount
  name: {{ .Release.Name }}
  namespace: {{ .Release.Namespace }}
{{- end -}}

{{- /* The field of a Pod with the host that its replica advertises; empty: it advertises none. */ -}}
{{- define "sluice.advertise" -}}
{{- if eq .Values.advertise "pod" }}status.podIP{{ end }}
{{- if eq .Values.advertise "host" }}status.hostIP{{ end }}
{{- if eq .Values.advertise "auto" }}{{ if .Values.hostNetwork }}status.hostIP{{ end }}{{ end }}
{{- end -}}

{{- define "sluice.configuration" -}}
group: {{ .Values.group }}
listen: "0.0.0.0:9443"
tls: {secret: {{ .Values.tls.secret }}}
health:
  listen: "0.0.0.0:9440"
{{- if .Values.config.health }}
  {{- toYaml .Values.config.health | nindent 2 }}
{{- end }}
metrics: {listen: "0.0.0.0:9436"}
kubernetes:
  loadBalancerClass: {{ .Values.class }}
{{- if .Values.claimClassless.enabled }}
  claimClassless:
    {{- toYaml .Values.claimClassless | nindent 4 }}
{{- end }}
{{- if omit .Values.config "health" }}
{{ toYaml (omit .Values.config "health") }}
{{- end }}
{{- end -}}
