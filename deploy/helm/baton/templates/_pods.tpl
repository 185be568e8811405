{{/* What every pod and container of ours has: nobody is root, nothing is writable but volumes, no privilege. */}}
{{- define "baton.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.podSecurityContext.runAsUser }}
  runAsGroup: {{ .Values.podSecurityContext.runAsGroup }}
  fsGroup: {{ .Values.podSecurityContext.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* What an operator marks a pod with, beside the chart's own labels: of a part of the values. */}}
{{- define "baton.podLabels" -}}
{{- with .podLabels }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.podAnnotations" -}}
{{- with .podAnnotations -}}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "baton.containerSecurity" -}}
securityContext:
  runAsNonRoot: true
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* The environment of a router or worker: where Redis is (with its password), and where may be written. */}}
{{- define "baton.environment" -}}
{{- include "baton.redisEnvironment" . }}
{{- include "baton.folderEnvironment" . }}
{{- end -}}

{{/* Where may be written, and whence a model comes. */}}
{{- define "baton.folderEnvironment" }}
- {name: HOME, value: /tmp}
- {name: TMPDIR, value: /tmp}
- {name: BATON_CACHE_DIR, value: /var/cache/baton}
- {name: HF_HOME, value: /var/cache/baton/huggingface}
{{- if ne .Values.model.source "hub" }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- else if .Values.model.hub.tokenSecret.name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.model.hub.tokenSecret.name }}, key: {{ .Values.model.hub.tokenSecret.key }}}}
{{- end }}
{{- end -}}

{{- define "baton.redisEnvironment" -}}
{{- if .Values.redis.enabled }}
- name: BATON_REDIS__PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "baton.secretName.redis" . }}, key: password}}
{{- else if .Values.redis.external.existingSecret }}
- name: BATON_REDIS__PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.external.existingSecret }}, key: password}}
- name: BATON_REDIS__USERNAME
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.external.existingSecret }}, key: username, optional: true}}
{{- end }}
{{- end -}}

{{- define "baton.mounts" -}}
- {name: config, mountPath: /etc/baton/config, readOnly: true}
- {name: run, mountPath: /run/baton}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/baton}
{{- if has .Values.model.source (list "pvc" "hostPath" "imageVolume") }}
- name: model
  mountPath: {{ .Values.model.path }}
  readOnly: true
{{- if and (eq .Values.model.source "pvc") .Values.model.pvc.subPath }}
  subPath: {{ .Values.model.pvc.subPath }}
{{- end }}
{{- end }}
{{- include "baton.trustMounts" . }}
{{- end -}}

{{/* Certificates, and the CA of an external Redis. */}}
{{- define "baton.trustMounts" -}}
{{- if eq (include "baton.tlsOn" .) "true" }}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{- end }}
{{- if and (not .Values.redis.enabled) .Values.redis.external.caSecret }}
- {name: redis-ca, mountPath: /etc/baton/redis, readOnly: true}
{{- end }}
{{- end -}}

{{/* Where adapters lie; a worker reads them alone: (dict "root" $ "readOnly" true). */}}
{{- define "baton.adapterMount" -}}
{{- if ne .root.Values.adapters.source "none" }}
- name: adapters
  mountPath: {{ .root.Values.adapters.path }}
  readOnly: {{ .readOnly }}
  {{- if and (eq .root.Values.adapters.source "pvc") .root.Values.adapters.pvc.subPath }}
  subPath: {{ .root.Values.adapters.pvc.subPath }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.adapterVolume" -}}
{{- if eq .Values.adapters.source "pvc" }}
- name: adapters
  persistentVolumeClaim: {claimName: {{ .Values.adapters.pvc.claimName }}}
{{- else if eq .Values.adapters.source "hostPath" }}
- name: adapters
  hostPath: {path: {{ .Values.adapters.hostPath }}, type: Directory}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "role" "router"): the role's certificate among them. */}}
{{- define "baton.volumes" -}}
{{- $role := .role -}}
{{- with .root -}}
- name: config
  configMap: {name: {{ include "baton.fullname" . }}-config}
- name: run
  emptyDir: {sizeLimit: 64Mi}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: cache
  emptyDir: {sizeLimit: {{ .Values.model.cacheSize }}}
{{- if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.pvc.claimName }}, readOnly: true}
{{- else if eq .Values.model.source "hostPath" }}
- name: model
  hostPath: {path: {{ .Values.model.hostPath }}, type: Directory}
{{- else if eq .Values.model.source "imageVolume" }}
- name: model
  image: {reference: {{ .Values.model.imageVolume.reference | quote }}, pullPolicy: {{ .Values.model.imageVolume.pullPolicy }}}
{{- end }}
{{- end -}}
{{- if eq .role "worker" }}
{{- include "baton.adapterVolume" .root }}
{{- end }}
{{- include "baton.trustVolumes" . }}
{{- end -}}

{{- define "baton.trustVolumes" -}}
{{- $role := .role -}}
{{- with .root -}}
{{- if eq (include "baton.tlsOn" .) "true" }}
- name: tls
  secret: {secretName: {{ include "baton.secretName.tls" (dict "root" . "role" $role) }}, defaultMode: 288}
{{- end }}
{{- if and (not .Values.redis.enabled) .Values.redis.external.caSecret }}
- name: redis-ca
  secret: {secretName: {{ .Values.redis.external.caSecret }}, items: [{key: ca.crt, path: ca.crt}], defaultMode: 288}
{{- end }}
{{- end -}}
{{- end -}}

{{/* How many an autoscaler has made of it: left out, Helm's merge would bring a count that an earlier release named
     back to 1. Left out where nothing lives yet, or no cluster can be asked: the autoscaler brings the least.
     (dict "root" $ "kind" "Deployment" "name" "x") */}}
{{- define "baton.scaledReplicas" -}}
{{- with lookup "apps/v1" .kind .root.Release.Namespace .name -}}
replicas: {{ int .spec.replicas }}
{{- end -}}
{{- end -}}

{{/* Where a pod may run: (the pool, or .Values.router, which the adapters' Job follows, .redis or .workers.ray). */}}
{{- define "baton.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- end -}}

{{/* Variables of one pool: its device and its own keys of [worker]. */}}
{{- define "baton.poolEnvironment" -}}
- {name: BATON_WORKER__DEVICE, value: {{ .device | quote }}}
{{- range $key, $value := .settings }}
- name: BATON_WORKER__{{ upper $key }}
  value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ include "baton.tomlValue" $value | quote }}{{ end }}
{{- end }}
{{- if .diskTier.enabled }}
- {name: BATON_WORKER__DISK_TIER_DIR, value: /var/lib/baton/kv}
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* resources of a worker, GPUs included. */}}
{{- define "baton.poolResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $_ := set $resources "limits" (mergeOverwrite (default dict $resources.limits) (dict "nvidia.com/gpu" (int .gpus))) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}
