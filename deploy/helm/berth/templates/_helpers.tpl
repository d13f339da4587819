{{- define "berth.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* Short enough that "-evict-own-node" and the like still fit. */ -}}
{{- define "berth.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "berth.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "berth.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "berth.namespace" -}}
{{- $namespace := default .Release.Namespace .Values.namespaceOverride -}}
{{- if and (eq $namespace "default") (not .Values.allowDefaultNamespace) -}}
{{- fail "berth keeps a namespace of its own: install it with `--namespace berth --create-namespace`, or set allowDefaultNamespace=true" -}}
{{- end -}}
{{- $namespace -}}
{{- end -}}

{{- define "berth.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "berth.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* What pods of every profile have, and what selects them. */ -}}
{{- define "berth.selectorLabels" -}}
{{- if .Values.selectorLabelsOverride -}}
{{- toYaml .Values.selectorLabelsOverride -}}
{{- else -}}
app.kubernetes.io/name: {{ include "berth.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- end -}}

{{- define "berth.labels" -}}
app.kubernetes.io/name: {{ include "berth.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "berth.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .appVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* Name of the objects of a profile; "" is that of the nodes without one. */ -}}
{{- define "berth.profileName" -}}
{{- if .profile -}}
{{- printf "%s-%s" (include "berth.fullname" .root) .profile -}}
{{- else -}}
{{- include "berth.fullname" .root -}}
{{- end -}}
{{- end -}}

{{- /* Lays `from` over `to`, which it changes. Not mergeOverwrite: that takes false, 0 and "" for nothing said. */ -}}
{{- define "berth.lay" -}}
{{- $to := .to -}}
{{- range $key, $value := .from -}}
{{- $there := index $to $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $there) -}}
{{- include "berth.lay" (dict "to" $there "from" $value) -}}
{{- else -}}
{{- $_ := set $to $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The file of `berth serve --config` for one profile's values. */ -}}
{{- define "berth.configFile" -}}
{{- $values := .values -}}
{{- $config := deepCopy $values.config -}}
{{- $edits := deepCopy (default (dict) $config.containerEdits) -}}
{{- with $values.migStrategy -}}{{- $_ := set $config "migStrategy" . -}}{{- end -}}
{{- with $values.deviceListStrategy -}}
{{- $_ := set $edits "deviceListStrategy" (splitList "," (nospace .)) -}}
{{- end -}}
{{- with $values.deviceIDStrategy -}}{{- $_ := set $edits "deviceIdStrategy" . -}}{{- end -}}
{{- if kindIs "bool" $values.compatWithCPUManager -}}
{{- $_ := set $edits "passDeviceSpecs" $values.compatWithCPUManager -}}
{{- end -}}
{{- with $values.nvidiaDriverRoot -}}{{- $_ := set $edits "nvidiaDriverRoot" . -}}{{- end -}}
{{- if $edits -}}{{- $_ := set $config "containerEdits" $edits -}}{{- end -}}
{{- /* YAML 1.1, which Helm reads, takes an unquoted off for false. */ -}}
{{- if or (not $values.rbac.read) (and (hasKey $config "apiServer") (not $config.apiServer)) -}}
{{- $_ := set $config "apiServer" "off" -}}
{{- end -}}
{{- $_ := set $config "kubeletDir" $values.kubeletDir -}}
{{- $_ := set $config "stateDir" "/var/lib/berth" -}}
{{- $_ := set $config "adminListen" (printf "127.0.0.1:%d" (int $values.adminPort)) -}}
{{- $host := ternary (printf "[%s]" $values.healthAddress) $values.healthAddress (contains ":" $values.healthAddress) -}}
{{- $_ := set $config "healthListen" (printf "%s:%d" $host (int $values.healthPort)) -}}
{{- toYaml $config -}}
{{- end -}}

{{- /* Of the nodes without a profile: not those with one. */ -}}
{{- define "berth.affinity" -}}
{{- $affinity := deepCopy (default (dict) .values.affinity) -}}
{{- if and (not .profile) .root.Values.profiles -}}
{{- /* Terms are alternatives, so each of them must keep the profiles' nodes out. */ -}}
{{- $out := dict "key" .root.Values.profileLabel "operator" "NotIn" "values" (keys .root.Values.profiles | sortAlpha) -}}
{{- $node := default (dict) $affinity.nodeAffinity -}}
{{- $required := default (dict) $node.requiredDuringSchedulingIgnoredDuringExecution -}}
{{- $terms := list -}}
{{- range (default (list (dict)) $required.nodeSelectorTerms) -}}
{{- $term := deepCopy . -}}
{{- $_ := set $term "matchExpressions" (append (default (list) $term.matchExpressions) $out) -}}
{{- $terms = append $terms $term -}}
{{- end -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- if $affinity -}}{{- toYaml $affinity -}}{{- end -}}
{{- end -}}

{{- define "berth.podSecurityContext" -}}
{{- $own := dict "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- include "berth.lay" (dict "to" $own "from" .values.podSecurityContext) -}}
{{- toYaml $own -}}
{{- end -}}

{{- define "berth.securityContext" -}}
{{- /* Root, since the kubelet's checkpoint is root's; but without any of root's capabilities. */ -}}
{{- $own := dict
  "runAsUser" 0
  "runAsGroup" 0
  "privileged" false
  "allowPrivilegeEscalation" false
  "readOnlyRootFilesystem" true
  "capabilities" (dict "drop" (list "ALL"))
  "seccompProfile" (dict "type" "RuntimeDefault")
-}}
{{- if .values.nvml.migMonitor -}}
{{- $_ := set $own.capabilities "add" (list "SYS_ADMIN") -}}
{{- /* The API server refuses the two together. */ -}}
{{- $_ := unset $own "allowPrivilegeEscalation" -}}
{{- end -}}
{{- if .values.securityContext.privileged -}}
{{- $_ := unset $own "allowPrivilegeEscalation" -}}
{{- end -}}
{{- include "berth.lay" (dict "to" $own "from" .values.securityContext) -}}
{{- toYaml $own -}}
{{- end -}}
