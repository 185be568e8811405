{{/* The container that is a worker of one pool: (dict "root" $ "pool" $pool "name" "prefill"). */}}
{{- define "baton.workerContainer" -}}
{{- $root := .root -}}
{{- $tls := eq (include "baton.tlsOn" $root) "true" -}}
name: worker
image: {{ include "baton.image" (dict "root" $root "image" $root.Values.image.worker) }}
imagePullPolicy: {{ $root.Values.image.worker.pullPolicy }}
{{ include "baton.containerSecurity" $root }}
command: [baton]
args: [worker, --role, {{ .pool.role }}, --config, /etc/baton/config/baton.toml, --slot, $(POD_NAME)]
env:
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: BATON_WORKER__HOST
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- include "baton.environment" $root | nindent 2 }}
  {{- include "baton.poolEnvironment" .pool | nindent 2 }}
  {{- if gt (int .pool.rankHosts) 0 }}
  - {name: BATON_WORKER__RANK_HOSTS, value: {{ include "baton.rankAddresses" . | quote }}}
  - {name: BATON_WORKER__RANK_KEY_FILE, value: /etc/baton/rank/key}
  - {name: BATON_WORKER__RANK_WAIT_S, value: {{ $root.Values.workers.startupSeconds | quote }}}
  {{- end }}
ports:
  - {name: grpc, containerPort: {{ $root.Values.workers.ports.grpc }}}
  {{- if eq .pool.role "decode" }}
  - {name: kv, containerPort: {{ $root.Values.workers.ports.data }}}
  {{- end }}
  - {name: metrics, containerPort: {{ $root.Values.workers.ports.metrics }}}
# The host writes its state there and holds the lock while it lives (what it wrote outlives it: the volume is the
# pod's, not the container's), and touches a file each second in which its gRPC health is SERVING: under mTLS a
# kubelet has no certificate to ask by gRPC with.
startupProbe:
  {{- include "baton.workerReady" . | nindent 2 }}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: {{ div (int $root.Values.workers.startupSeconds) 2 }}
readinessProbe:
  {{- if $tls }}
  {{- include "baton.workerAlive" . | nindent 2 }}
  {{- else }}
  grpc: {port: {{ $root.Values.workers.ports.grpc }}}
  {{- end }}
  periodSeconds: 5
  timeoutSeconds: 3
livenessProbe:
  {{- if $tls }}
  {{- include "baton.workerAlive" . | nindent 2 }}
  {{- else }}
  grpc: {port: {{ $root.Values.workers.ports.grpc }}}
  {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
resources: {{- include "baton.poolResources" .pool | nindent 2 }}
volumeMounts:
  {{- include "baton.mounts" $root | nindent 2 }}
  {{- with include "baton.adapterMount" (dict "root" $root "readOnly" true) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if .pool.diskTier.enabled }}
  - {name: kv, mountPath: /var/lib/baton/kv}
  {{- end }}
  {{- if gt (int .pool.rankHosts) 0 }}
  - {name: rank-key, mountPath: /etc/baton/rank, readOnly: true}
  {{- end }}
{{- end -}}

{{/* Where a worker's further pods are, as JSON: by the name of the worker's own pod, which the kubelet puts in. */}}
{{- define "baton.rankAddresses" -}}
{{- $service := printf "%s-%s-ranks" (include "baton.fullname" .root) .name -}}
{{- $found := list -}}
{{- range $i := until (int .pool.rankHosts) -}}
{{- $found = append $found (printf "$(POD_NAME)-ranks-%d.%s:%d" $i $service (int $.root.Values.workers.ports.ranks)) -}}
{{- end -}}
{{ toJson $found }}
{{- end -}}

{{/* The container that has ranks of one pool's worker: (dict "root" $ "pool" $pool "name" "prefill"). */}}
{{- define "baton.ranksContainer" -}}
{{- $root := .root -}}
name: ranks
image: {{ include "baton.image" (dict "root" $root "image" $root.Values.image.worker) }}
imagePullPolicy: {{ $root.Values.image.worker.pullPolicy }}
{{ include "baton.containerSecurity" $root }}
command: [baton]
args: [ranks, --listen, $(POD_IP):{{ $root.Values.workers.ports.ranks }}, --config, /etc/baton/config/baton.toml]
env:
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- include "baton.folderEnvironment" $root | nindent 2 }}
  - {name: BATON_WORKER__RANK_KEY_FILE, value: /etc/baton/rank/key}
  {{- with .pool.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: ranks, containerPort: {{ $root.Values.workers.ports.ranks }}}
readinessProbe:
  tcpSocket: {port: ranks}
  periodSeconds: 5
  timeoutSeconds: 3
livenessProbe:
  tcpSocket: {port: ranks}
  initialDelaySeconds: 30
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
resources: {{- include "baton.poolResources" .pool | nindent 2 }}
volumeMounts:
  {{- include "baton.mounts" $root | nindent 2 }}
  - {name: rank-key, mountPath: /etc/baton/rank, readOnly: true}
{{- end -}}

{{- define "baton.rankKeyVolume" -}}
- name: rank-key
  secret: {secretName: {{ include "baton.secretName.rankKey" . }}, items: [{key: key, path: key}], defaultMode: 288}
{{- end -}}

{{/* Labels of a pod with ranks: (dict "root" $ "pool" $pool "name" "prefill"). */}}
{{- define "baton.rankLabels" -}}
{{ include "baton.labels" (dict "root" .root "component" "ranks") }}
baton.dev/pool: {{ .name }}
{{- with .pool.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.rankSelector" -}}
{{ include "baton.selector" (dict "root" .root "component" "ranks") }}
baton.dev/pool: {{ .pool }}
{{- end -}}

{{/* Whether a pool has ranks in further pods. */}}
{{- define "baton.hasRankHosts" -}}
{{- range $_, $pool := include "baton.pools" . | fromYaml -}}
{{- if gt (int $pool.rankHosts) 0 -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.workerReady" -}}
exec:
  command: [sh, -c, 'cd /run/baton/slots && grep -q ''"state":"ready"'' "$POD_NAME.json" && ! flock -n -s "$POD_NAME.lock" true']
{{- end -}}

{{/* What the health service would say: of this host, and within the last ten seconds. */}}
{{- define "baton.workerAlive" -}}
exec:
  command: [sh, -c, 'cd /run/baton/slots && ! flock -n -s "$POD_NAME.lock" true && test $(( $(date +%s) - $(stat -c %Y "$POD_NAME.alive") )) -le 10']
{{- end -}}

{{/* Labels of a worker's pod: (dict "root" $ "pool" $pool "name" "prefill"). */}}
{{- define "baton.workerLabels" -}}
{{ include "baton.labels" (dict "root" .root "component" "worker") }}
baton.dev/pool: {{ .name }}
baton.dev/role: {{ .pool.role }}
{{- with .pool.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Workers of one pool keep apart, so that a node takes few of them with it. */}}
{{- define "baton.workerSpread" -}}
topologySpreadConstraints:
  {{- if .pool.topologySpreadConstraints }}
  {{- toYaml .pool.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "baton.workerSelector" (dict "root" .root "pool" .name) | nindent 8 }}
  {{- end }}
{{- end -}}

{{/* How many of a pool's pods stay where `most` of them, a number or a percentage, may go: (dict "replicas" 4 "most" "25%"). */}}
{{- define "baton.leastAvailable" -}}
{{- $most := .most -}}
{{- if kindIs "string" $most -}}{{- $most = ceil (divf (mulf (float64 .replicas) (trimSuffix "%" $most | float64)) 100.0) -}}{{- end -}}
{{- max 0 (sub (int .replicas) (int $most)) -}}
{{- end -}}

{{/* What runs may finish, then some more to leave in order. */}}
{{- define "baton.workerGrace" -}}{{ add .Values.workers.drainSeconds 20 }}{{- end -}}
