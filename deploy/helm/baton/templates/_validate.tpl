{{/* What a schema can't say: one message per mistake, with the key and the remedy. */}}
{{- define "baton.refuse" -}}{{- fail (printf "\n\n  values: %s\n" .) -}}{{- end -}}

{{- define "baton.validate" -}}
{{- include "baton.validateModel" . -}}
{{- include "baton.validateAdapters" . -}}
{{- include "baton.validatePools" . -}}
{{- include "baton.validateAccess" . -}}
{{- include "baton.validateConfig" . -}}
{{- end -}}

{{- define "baton.validateModel" -}}
{{- $m := .Values.model -}}
{{- if and (eq $m.source "pvc") (not $m.pvc.claimName) -}}{{ include "baton.refuse" "model.source is pvc but model.pvc.claimName is empty: name the claim that holds the model" }}{{- end -}}
{{- if and (eq $m.source "hostPath") (not $m.hostPath) -}}{{ include "baton.refuse" "model.source is hostPath but model.hostPath is empty: give a directory that every node has" }}{{- end -}}
{{- if and (eq $m.source "imageVolume") (not $m.imageVolume.reference) -}}{{ include "baton.refuse" "model.source is imageVolume but model.imageVolume.reference is empty: give the OCI image with the model's files" }}{{- end -}}
{{- if and (eq $m.source "hub") (not $m.hub.id) -}}{{ include "baton.refuse" "model.source is hub but model.hub.id is empty: give a Hugging Face id such as Qwen/Qwen3-0.6B" }}{{- end -}}
{{- if and (ne $m.source "hub") (ne $m.source "image") (not (hasPrefix "/" $m.path)) -}}{{ include "baton.refuse" (printf "model.path %q is where the model is mounted: give an absolute path such as /models/llama" $m.path) }}{{- end -}}
{{- end -}}

{{- define "baton.validateAdapters" -}}
{{- $a := .Values.adapters -}}
{{- if and (eq $a.source "pvc") (not $a.pvc.claimName) -}}{{ include "baton.refuse" "adapters.source is pvc but adapters.pvc.claimName is empty: name the claim that holds the adapters" }}{{- end -}}
{{- if and (eq $a.source "hostPath") (not $a.hostPath) -}}{{ include "baton.refuse" "adapters.source is hostPath but adapters.hostPath is empty: give a directory that every node has" }}{{- end -}}
{{- if and $a.fetch.image (ne $a.source "pvc") -}}{{ include "baton.refuse" "adapters.fetch fills a claim: set adapters.source: pvc" }}{{- end -}}
{{- if eq (include "baton.appliesAdapters" .) "true" -}}
{{- if eq $a.source "none" -}}{{ include "baton.refuse" "adapters.serve or adapters.prune is set but adapters.source is none: say where their folders lie (pvc or hostPath)" }}{{- end -}}
{{- if not .Values.auth.enabled -}}{{ include "baton.refuse" "adapters.serve (or prune) needs auth.enabled: adapters are loaded over the API with an admin's key, and that is off where nobody is asked for one" }}{{- end -}}
{{- if and .Values.auth.existingSecret (not $a.adminKeySecret.name) -}}{{ include "baton.refuse" "adapters.serve (or prune) with auth.existingSecret needs adapters.adminKeySecret.name: a Secret with a key made by `baton keys add NAME --admin`" }}{{- end -}}
{{- if eq (include "baton.tlsOn" .) "true" -}}{{ include "baton.refuse" "adapters.serve (or prune) with tls.mode isn't done by a Job: run `baton adapters apply` in a router's pod (kubectl exec), or leave both unset" }}{{- end -}}
{{- range $name, $one := $a.serve -}}
{{- if and $one.hub (ne $a.source "pvc") -}}{{ include "baton.refuse" (printf "adapters.serve.%s.hub is fetched into a claim: set adapters.source: pvc" $name) }}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.validatePools" -}}
{{- $ratio := .Values.ratio -}}
{{- $roles := dict "prefill" list "decode" list -}}
{{- range $name, $pool := .Values.workers.pools -}}
{{- if $pool -}}
{{- if not $pool.role -}}{{ include "baton.refuse" (printf "workers.pools.%s.role is missing: say prefill or decode" $name) }}{{- end -}}
{{- $_ := set $roles $pool.role (append (get $roles $pool.role) $name) -}}
{{- if and (kindIs "map" $ratio) (hasKey $pool "replicas") -}}{{ include "baton.refuse" (printf "workers.pools.%s.replicas and ratio both say how many: drop one of them (ratio: null)" $name) }}{{- end -}}
{{- if and (not $ratio) (not (hasKey $pool "replicas")) -}}{{ include "baton.refuse" (printf "workers.pools.%s.replicas is missing: say how many, or give ratio: {prefill: N, decode: M}" $name) }}{{- end -}}
{{- $min := default $.Values.workers.defaults.minReplicas $pool.minReplicas | int -}}
{{- $max := default $.Values.workers.defaults.maxReplicas $pool.maxReplicas | int -}}
{{- if gt $min $max -}}{{ include "baton.refuse" (printf "workers.pools.%s.minReplicas %d is more than its maxReplicas %d: raise maxReplicas" $name $min $max) }}{{- end -}}
{{- $device := default $.Values.workers.defaults.device $pool.device -}}
{{- $gpus := default $.Values.workers.defaults.gpus $pool.gpus | int -}}
{{- if and (eq $device "cuda") (eq $gpus 0) -}}{{ include "baton.refuse" (printf "workers.pools.%s.device is cuda but its gpus is 0: set gpus: 1" $name) }}{{- end -}}
{{- if gt $gpus 1 -}}{{ include "baton.refuse" (printf "workers.pools.%s.gpus is %d, and a worker's engine computes on one: set gpus: 1, and more workers" $name $gpus) }}{{- end -}}
{{- if and (ne $device "cuda") (gt $gpus 0) -}}{{ include "baton.refuse" (printf "workers.pools.%s.gpus is %d but its device is %s: set device: cuda" $name $gpus $device) }}{{- end -}}
{{- include "baton.validateRanks" (dict "root" $ "pool" $pool "name" $name) -}}
{{- range $key, $_ := default dict $pool.settings -}}
{{- if has $key (list "model" "host" "port" "data_port" "metrics_port" "drain_grace_s" "device" "rank_hosts" "rank_key_file" "rank_wait_s") -}}{{ include "baton.refuse" (printf "workers.pools.%s.settings.%s is set by the chart: use model, workers.ports, workers.drainSeconds or the pool's device and rankHosts" $name $key) }}{{- end -}}
{{- end -}}
{{- $disk := mergeOverwrite (deepCopy $.Values.workers.defaults.diskTier) (deepCopy (default dict $pool.diskTier)) -}}
{{- range list (dict "at" (printf "workers.pools.%s.settings" $name) "of" $pool.settings) (dict "at" "workers.defaults.settings" "of" $.Values.workers.defaults.settings) (dict "at" "config.worker" "of" $.Values.config.worker) -}}
{{- if and $disk.enabled (hasKey (default dict .of) "disk_tier_dir") -}}{{ include "baton.refuse" (printf "%s.disk_tier_dir is set by the chart where diskTier.enabled is: drop one of them" .at) }}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $roles.decode -}}{{ include "baton.refuse" "workers.pools has no pool with role: decode; add one, every answer is written by a decode worker" }}{{- end -}}
{{- if and (not $roles.prefill) (not (default false (default dict .Values.config.cluster).colocated)) -}}{{ include "baton.refuse" "workers.pools has no pool with role: prefill: add one, or set config.cluster.colocated: true to let decode workers read prompts" }}{{- end -}}
{{- if $ratio -}}
{{- range $role, $names := $roles -}}
{{- if and (kindIs "map" $ratio) (gt (len $names) 1) -}}{{ include "baton.refuse" (printf "ratio can't say how the %s pools (%s) share their workers: set ratio: null and each pool's replicas" $role (join ", " $names)) }}{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.workers.autoscaling.enabled -}}
{{- if eq .Values.workers.mode "raycluster" -}}{{ include "baton.refuse" "workers.autoscaling.enabled needs workers.mode: pods, whose StatefulSets it scales; with raycluster change ratio or each pool's replicas" }}{{- end -}}
{{- if kindIs "string" $ratio -}}{{ include "baton.refuse" "workers.autoscaling.enabled and ratio: auto both decide how many workers a role has: disable one of them" }}{{- end -}}
{{- end -}}
{{- if and (kindIs "string" $ratio) (default dict .Values.config.controller).mode -}}{{ include "baton.refuse" "config.controller.mode is set by ratio: auto; drop it, or give ratio: {prefill: N, decode: M}" }}{{- end -}}
{{- if and (eq .Values.workers.mode "pods") (default dict .Values.config.controller).most_workers -}}{{ include "baton.refuse" "config.controller.most_workers asks `baton place` for workers, and workers.mode is pods: use workers.autoscaling, or workers.mode: raycluster" }}{{- end -}}
{{- $ports := list (int .Values.workers.ports.grpc) (int .Values.workers.ports.data) (int .Values.workers.ports.metrics) -}}
{{- if ne (len (uniq $ports)) 3 -}}{{ include "baton.refuse" "workers.ports: grpc, data and metrics must be three different ports" }}{{- end -}}
{{- if eq (int .Values.router.ports.http) (int .Values.router.ports.grpc) -}}{{ include "baton.refuse" "router.ports: http and grpc must be two different ports" }}{{- end -}}
{{- end -}}

{{/* Ranks in further pods: (dict "root" $ "pool" its own values "name" "prefill"). */}}
{{- define "baton.validateRanks" -}}
{{- $values := .root.Values -}}
{{- $hosts := default $values.workers.defaults.rankHosts .pool.rankHosts | int -}}
{{- if gt $hosts 0 -}}
{{- $field := printf "workers.pools.%s.rankHosts is %d" .name $hosts -}}
{{- $own := mergeOverwrite (deepCopy (default dict $values.config.worker)) (deepCopy (default dict $values.workers.defaults.settings)) (deepCopy (default dict .pool.settings)) -}}
{{- $ranks := max (mul (default 1 $own.tp | int) (default 1 $own.pp | int)) (default 1 $own.cp | int) (default 1 $own.ep | int) | int -}}
{{- if ne $values.workers.mode "pods" -}}{{ include "baton.refuse" (printf "%s and needs workers.mode: pods, whose StatefulSets it adds to" $field) }}{{- end -}}
{{- if $values.workers.autoscaling.enabled -}}{{ include "baton.refuse" (printf "%s, and workers.autoscaling would make workers without them: disable it, change ratio or the pool's replicas" $field) }}{{- end -}}
{{- if ne (default $values.workers.defaults.device .pool.device) "cpu" -}}{{ include "baton.refuse" (printf "%s, and ranks run on the cpu only: set device: cpu" $field) }}{{- end -}}
{{- if le $ranks $hosts -}}{{ include "baton.refuse" (printf "%s and its worker has %d ranks: set settings.pp to %d, or to a multiple of it" $field $ranks (add1 $hosts)) }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.validateAccess" -}}
{{- if and (not .Values.auth.enabled) (not .Values.auth.allowInsecure) -}}{{ include "baton.refuse" "auth.enabled is false, so that anybody who reaches the router may use it: set auth.allowInsecure: true if you want that" }}{{- end -}}
{{- if and (not .Values.redis.enabled) (not .Values.redis.external.url) -}}{{ include "baton.refuse" "redis.enabled is false and redis.external.url is empty: give redis://host:6379, or enable the chart's own" }}{{- end -}}
{{- if regexMatch "://[^/@]*:[^/@]+@" .Values.redis.external.url -}}{{ include "baton.refuse" "redis.external.url holds a password: put it in a Secret, entry `password`, and name that in redis.external.existingSecret" }}{{- end -}}
{{- if and (eq .Values.tls.mode "certManager") (not .Values.tls.issuerRef.name) -}}{{ include "baton.refuse" "tls.mode is certManager but tls.issuerRef.name is empty: name an Issuer or ClusterIssuer that has a CA" }}{{- end -}}
{{- range $role := include "baton.tlsRoles" . | fromYamlArray -}}
{{- if and (eq $.Values.tls.mode "secret") (not (get $.Values.tls.existingSecrets $role)) -}}{{ include "baton.refuse" (printf "tls.mode is secret but tls.existingSecrets.%s is empty: name a Secret with tls.crt, tls.key and ca.crt" $role) }}{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}{{ include "baton.refuse" "ingress.enabled is true but ingress.host is empty: give the name that clients use" }}{{- end -}}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) -}}{{ include "baton.refuse" "gateway.enabled is true but gateway.parentRefs is empty: name the Gateway, [{name: my-gateway}]" }}{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.monitoring) (or .Values.metrics.serviceMonitor.enabled .Values.workers.autoscaling.enabled) -}}{{ include "baton.refuse" (printf "networkPolicy.monitoring is empty, so that nobody reaches workers' metrics, and %s needs them: name who asks for them, [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" (ternary "metrics.serviceMonitor" "workers.autoscaling" .Values.metrics.serviceMonitor.enabled)) }}{{- end -}}
{{- if gt (int .Values.router.autoscaling.minReplicas) (int .Values.router.autoscaling.maxReplicas) -}}{{ include "baton.refuse" "router.autoscaling.minReplicas is more than router.autoscaling.maxReplicas: raise maxReplicas" }}{{- end -}}
{{- end -}}

{{- define "baton.validateConfig" -}}
{{- $owned := dict
  "router" (dict "host" "the pod's" "port" "router.ports.http" "grpc_port" "router.ports.grpc" "shutdown_grace_s" "router.drainSeconds" "insecure" "auth.allowInsecure" "keys_file" "auth.existingSecret")
  "worker" (dict "model" "model" "model_name" "model.name" "host" "the pod's" "port" "workers.ports.grpc" "data_port" "workers.ports.data" "metrics_port" "workers.ports.metrics" "drain_grace_s" "workers.drainSeconds" "device" "workers.defaults.device" "rank_hosts" "workers.pools.NAME.rankHosts" "rank_key_file" "workers.rankKey" "rank_wait_s" "workers.startupSeconds")
  "cluster" (dict "prefill" "ratio" "decode" "ratio" "namespace" "the release's" "run_dir" "the chart's")
  "redis" (dict "url" "redis.external.url" "password" "redis.external.existingSecret" "username" "redis.external.existingSecret" "ca" "redis.external.caSecret" "cert" "the chart's" "key" "the chart's")
  "telemetry" (dict "otlp_endpoint" "telemetry.otlpEndpoint" "log_level" "telemetry.logLevel")
  "adapters" (dict "root" "adapters.path")
  "ray" (dict "address" "workers.mode" "auth_mode" "the chart's")
-}}
{{- range $section, $keys := .Values.config -}}
{{- range $key, $_ := $keys -}}
{{- if eq $section "tls" -}}{{ include "baton.refuse" (printf "config.tls.%s is set by the chart: use tls" $key) }}{{- end -}}
{{- if hasKey (default dict (get $owned $section)) $key -}}{{ include "baton.refuse" (printf "config.%s.%s is set by the chart: use %s" $section $key (get (get $owned $section) $key)) }}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
