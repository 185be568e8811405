{{/* Names and labels. */}}
{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "baton.name" . -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of one component: (dict "root" $ "component" "router"). */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* A pod of a worker, whatever its pool: (dict "root" $ "role" "prefill" "pool" "prefill"). */}}
{{- define "baton.workerSelector" -}}
{{ include "baton.selector" (dict "root" .root "component" "worker") }}
baton.dev/pool: {{ .pool }}
{{- end -}}

{{- define "baton.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}{{ default (include "baton.fullname" .) .Values.serviceAccount.name }}
{{- else -}}{{ default "default" .Values.serviceAccount.name }}{{- end -}}
{{- end -}}

{{/* repository:tag or repository@digest: (dict "root" $ "image" .Values.image.router). */}}
{{- define "baton.image" -}}
{{- if .image.digest -}}{{ .image.repository }}@{{ .image.digest }}
{{- else -}}{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}{{- end -}}
{{- end -}}

{{- define "baton.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.secretName.redis" -}}
{{- default (printf "%s-redis" (include "baton.fullname" .)) .Values.redis.existingSecret -}}
{{- end -}}

{{- define "baton.secretName.rankKey" -}}
{{- default (printf "%s-rank-key" (include "baton.fullname" .)) .Values.workers.rankKey.existingSecret -}}
{{- end -}}

{{- define "baton.secretName.keys" -}}
{{- default (printf "%s-keys" (include "baton.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{/* The Secret with the certificate of a role: (dict "root" $ "role" "router"). */}}
{{- define "baton.secretName.tls" -}}
{{- if eq .root.Values.tls.mode "secret" -}}{{ get .root.Values.tls.existingSecrets .role }}
{{- else -}}{{ include "baton.fullname" .root }}-{{ .role }}-tls{{- end -}}
{{- end -}}

{{- define "baton.tlsOn" -}}{{- if ne .Values.tls.mode "off" -}}true{{- end -}}{{- end -}}

{{/* What a worker's [worker] model is: a path in the container, or a hub id. */}}
{{- define "baton.model" -}}
{{- if eq .Values.model.source "hub" -}}{{ .Values.model.hub.id }}{{- else -}}{{ .Values.model.path }}{{- end -}}
{{- end -}}

{{/* The pools, complete: defaults, then the pool's own; `replicas` decided by ratio. A YAML map. */}}
{{- define "baton.pools" -}}
{{- $out := dict -}}
{{- $ratio := .Values.ratio -}}
{{- range $name, $own := .Values.workers.pools -}}
{{- if $own -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.workers.defaults) (deepCopy $own) -}}
{{- if kindIs "map" $ratio -}}
{{- $_ := set $pool "replicas" (int (get $ratio $own.role)) -}}
{{- else if and (kindIs "string" $ratio) (not (hasKey $pool "replicas")) -}}
{{- $_ := set $pool "replicas" 1 -}}
{{- end -}}
{{- if and $pool.diskTier.enabled (not (hasKey $pool.settings "disk_tier_bytes")) (not (hasKey (default dict $.Values.config.worker) "disk_tier_bytes")) -}}
{{- $_ := set $pool.settings "disk_tier_bytes" (include "baton.diskTierBytes" $pool.diskTier.size | int64) -}}
{{- end -}}
{{- $_ := set $out $name $pool -}}
{{- end -}}
{{- end -}}
{{ toYaml $out }}
{{- end -}}

{{/* Bytes of files in a claim of this size: nine tenths, because the filesystem takes its part of it. */}}
{{- define "baton.diskTierBytes" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 "m" 0.001 -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- mulf 0.9 (float64 $number) (float64 (get $units (trimPrefix $number .))) | int64 -}}
{{- end -}}

{{/* One TOML value. Helm's numbers are floats: whole ones are written as integers. */}}
{{- define "baton.tomlValue" -}}
{{- if kindIs "string" . -}}{{ . | toJson }}
{{- else if kindIs "bool" . -}}{{ . }}
{{- else if kindIs "float64" . -}}{{- if eq (floor .) . -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- else if kindIs "slice" . -}}[{{- range $i, $x := . }}{{ if $i }}, {{ end }}{{ include "baton.tomlValue" $x }}{{- end }}]
{{- else if kindIs "map" . -}}{ {{- $first := true }}{{- range $k, $v := . }}{{ if not $first }}, {{ end }}{{ $first = false }}{{ $k | toJson }} = {{ include "baton.tomlValue" $v }}{{- end }} }
{{- else -}}{{ . }}
{{- end -}}
{{- end -}}

{{/* baton.toml. Nothing secret is in it: passwords come from the environment. With `placed` (prefill, decode) in the
     context it says how many as well: only who places them reads that, so that a new ratio restarts nobody. */}}
{{- define "baton.toml" -}}
{{- $all := deepCopy .Values.config -}}
{{- $own := dict
  "router" (dict "host" "0.0.0.0" "port" .Values.router.ports.http "grpc_port" .Values.router.ports.grpc "shutdown_grace_s" .Values.router.drainSeconds)
  "worker" (dict "model" (include "baton.model" .) "port" .Values.workers.ports.grpc "data_port" .Values.workers.ports.data "metrics_port" .Values.workers.ports.metrics "drain_grace_s" .Values.workers.drainSeconds)
  "cluster" (dict "namespace" (printf "%s.%s" .Release.Namespace (include "baton.fullname" .) | trunc 64) "run_dir" "/run/baton")
  "telemetry" (dict "otlp_endpoint" .Values.telemetry.otlpEndpoint "log_level" .Values.telemetry.logLevel)
-}}
{{- if ne .Values.adapters.source "none" -}}{{- $_ := set $own "adapters" (dict "root" .Values.adapters.path) -}}{{- end -}}
{{- with .placed -}}{{- $_ := set $own "cluster" (merge (dict "prefill" .prefill "decode" .decode) $own.cluster) -}}{{- end -}}
{{- if .Values.auth.enabled -}}{{- $_ := set $own.router "keys_file" "/etc/baton/keys/keys.json" -}}
{{- else -}}{{- $_ := set $own.router "insecure" true -}}{{- end -}}
{{- if kindIs "string" .Values.ratio -}}{{- $_ := set $own "controller" (dict "mode" "auto") -}}{{- end -}}
{{- with .Values.model.name -}}{{- $_ := set $own.worker "model_name" . -}}{{- end -}}
{{- $_ := set $own "redis" (include "baton.redisSettings" . | fromYaml) -}}
{{- if eq (include "baton.tlsOn" .) "true" -}}{{- $_ := set $own "tls" (include "baton.tlsSettings" . | fromYaml) -}}{{- end -}}
{{- $all = mergeOverwrite $all $own -}}
{{- range $section, $keys := $all }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ include "baton.tomlValue" $value }}
{{- end }}
{{ end -}}
{{- end -}}

{{/* [tls] of baton.toml. */}}
{{- define "baton.tlsSettings" -}}
cert: /etc/baton/tls/tls.crt
key: /etc/baton/tls/tls.key
ca: /etc/baton/tls/ca.crt
domain: {{ .Values.tls.domain }}
trusted_network: {{ .Values.tls.trustedNetwork }}
{{- if .Values.tls.publicSecret }}
public_cert: /etc/baton/public/tls.crt
public_key: /etc/baton/public/tls.key
{{- end }}
{{- end -}}

{{/* [redis] of baton.toml, without the password. */}}
{{- define "baton.redisSettings" -}}
{{- $tls := eq (include "baton.tlsOn" .) "true" -}}
{{- if .Values.redis.enabled }}
url: {{ ternary "rediss" "redis" $tls }}://{{ include "baton.fullname" . }}-redis:6379/0
{{- if $tls }}
ca: /etc/baton/tls/ca.crt
cert: /etc/baton/tls/tls.crt
key: /etc/baton/tls/tls.key
{{- end }}
{{- else }}
url: {{ .Values.redis.external.url | quote }}
{{- if .Values.redis.external.caSecret }}
ca: /etc/baton/redis/ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{/* Workers of each role, all pools together: (dict "prefill" 3 "decode" 5). A YAML map. */}}
{{- define "baton.counts" -}}
{{- $counts := dict "prefill" 0 "decode" 0 -}}
{{- range $_, $pool := include "baton.pools" . | fromYaml -}}
{{- $_ := set $counts $pool.role (add (get $counts $pool.role) (int $pool.replicas)) -}}
{{- end -}}
{{ toYaml $counts }}
{{- end -}}

{{/* Who needs a certificate. A YAML list. */}}
{{- define "baton.tlsRoles" -}}
- router
- worker
{{- if .Values.redis.enabled }}
- redis
{{- end }}
{{- if .Values.metrics.serviceMonitor.enabled }}
- monitor
{{- end }}
{{- end -}}

{{/* How Prometheus asks when TLS is on: with the monitor's certificate. (dict "root" $ "server" "worker") */}}
{{- define "baton.scrapeTls" -}}
{{- if eq (include "baton.tlsOn" .root) "true" -}}
{{- $secret := include "baton.secretName.tls" (dict "root" .root "role" "monitor") -}}
scheme: https
tlsConfig:
  serverName: {{ .server }}.{{ .root.Values.tls.domain }}
  ca: {secret: {name: {{ $secret }}, key: ca.crt}}
  cert: {secret: {name: {{ $secret }}, key: tls.crt}}
  keySecret: {name: {{ $secret }}, key: tls.key}
{{- end -}}
{{- end -}}

{{/* Ray's own ports, fixed so that a network policy can name them. */}}
{{- define "baton.rayPorts" -}}
node-manager-port: "6380", object-manager-port: "6381", min-worker-port: "10002", max-worker-port: "10999"
{{- end -}}
