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

{{- /* Each template needs the namespace, so nothing is rendered before the values are checked. */ -}}
{{- define "berth.namespace" -}}
{{- include "berth.checkNvidia" . -}}
{{- $namespace := default .Release.Namespace .Values.namespaceOverride -}}
{{- if and (eq $namespace "default") (not .Values.allowDefaultNamespace) -}}
{{- fail "berth keeps a namespace of its own: create it (`kubectl create namespace berth`, and where Pod Security is enforced `kubectl label namespace berth pod-security.kubernetes.io/enforce=privileged`) and install with `--namespace berth`, or set allowDefaultNamespace=true" -}}
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
app.kubernetes.io/name: {{ include "berth.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}
{{- end -}}

{{- define "berth.labels" -}}
app.kubernetes.io/name: {{ include "berth.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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

{{- /* Sets `enforce.memory: off` of a configuration, which Helm has read as false. */ -}}
{{- define "berth.enforceOff" -}}
{{- $enforce := default (dict) .enforce -}}
{{- if and (hasKey $enforce "memory") (not $enforce.memory) -}}
{{- $_ := set $enforce "memory" "off" -}}
{{- end -}}
{{- end -}}

{{- /* The file of `berth serve --config` for one profile's values. */ -}}
{{- define "berth.configFile" -}}
{{- $values := .values -}}
{{- $config := omit (deepCopy $values.config) "map" "name" "default" "fallbackStrategies" -}}
{{- /* YAML 1.1, which Helm reads, takes an unquoted off for false. */ -}}
{{- if or (not $values.rbac.read) (and (hasKey $config "apiServer") (not $config.apiServer)) -}}
{{- $_ := set $config "apiServer" "off" -}}
{{- end -}}
{{- include "berth.enforceOff" $config -}}
{{- /* The guard and the admission policy exempt the same namespaces, unless the configuration has a list of its own. */ -}}
{{- with $config.bypass }}
{{- if not (hasKey . "exemptNamespaces") }}{{ $_ := set . "exemptNamespaces" $values.bypassPolicy.exemptNamespaces }}{{ end }}
{{- end -}}
{{- $_ := set $config "kubeletDir" $values.kubeletDir -}}
{{- with $values.kubeletRootDir }}{{ $_ := set $config "kubeletRootDir" . }}{{ end -}}
{{- with $values.devicePluginsDir }}{{ $_ := set $config "devicePluginsDir" . }}{{ end -}}
{{- $_ := set $config "stateDir" "/var/lib/berth" -}}
{{- include "berth.admin" (dict "values" $values "config" $config) -}}
{{- $_ := set $config "healthListen" (include "berth.address" (dict "host" $values.healthAddress "port" $values.healthPort)) -}}
{{- include "berth.nodeLabels" (dict "values" $values "config" $config) -}}
{{- toYaml $config -}}
{{- end -}}

{{- /* The settings of the file that the daemon reads only at its start: a change of one replaces the pods. The daemon applies
all others while it runs; a test compares this list with the daemon's. Files of config.map never replace the pods. */ -}}
{{- define "berth.startSettings" -}}
{{- $start := omit . "stack" "resource" "migStrategy" "memoryOvercommit" "containerEdits" "bypass" "cdi" "containerRuntime" "health" "timing" "rounds" "history" -}}
{{- $edits := pick (default (dict) .containerEdits) "nvidiaDriverRoot" "nvidiaDevRoot" -}}
{{- toYaml (set $start "containerEdits" $edits) -}}
{{- end -}}

{{- define "berth.address" -}}
{{- printf "%s:%d" (ternary (printf "[%s]" .host) .host (contains ":" .host)) (int .port) -}}
{{- end -}}

{{- /* The daemon would not start with two of a name. */ -}}
{{- define "berth.eachOnce" -}}
{{- $seen := dict -}}
{{- $what := .what -}}
{{- range .of -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "%s has the name %s twice (config.admin counts, too): give each a name of its own, since changes are signed with it" $what .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- end -}}

{{- /* Where the pods have what the admin API needs. */ -}}
{{- define "berth.adminFolder" -}}/etc/berth-admin{{- end -}}
{{- define "berth.socketFolder" -}}/run/berth{{- end -}}
{{- /* Of the objects of the controller and of the guard. Not those of the daemon's: services, monitors and commands select the daemon's pods. */ -}}
{{- define "berth.controllerLabels" -}}
app.kubernetes.io/name: {{ printf "%s-controller" (include "berth.name" .) | trunc 63 | quote }}
app.kubernetes.io/instance: {{ printf "%s-controller" .Release.Name | trunc 63 | quote }}
{{- end -}}

{{- define "berth.guardLabels" -}}
app.kubernetes.io/name: {{ printf "%s-guard" (include "berth.name" .) | trunc 63 | quote }}
app.kubernetes.io/instance: {{ printf "%s-guard" .Release.Name | trunc 63 | quote }}
{{- end -}}

{{- /* The folder of the socket between guard and daemon, on the host and in their pods, by `guard` of the file. */ -}}
{{- define "berth.guardFolder" -}}{{ dir (default "/run/berth-guard/guard.sock" .socket) }}{{- end -}}
{{- /* Where they have the files of config.map or config.name. */ -}}
{{- define "berth.configsFolder" -}}/etc/berth-configs{{- end -}}

{{- /* Lays the values of `admin` over `config.admin`, and says where it listens. */ -}}
{{- define "berth.admin" -}}
{{- $values := .values -}}
{{- $given := .values.admin -}}
{{- $admin := default (dict) .config.admin -}}
{{- $folder := include "berth.adminFolder" . -}}
{{- $tls := $given.tls -}}
{{- if $tls.secretName -}}
{{- $files := dict "certFile" (printf "%s/tls/tls.crt" $folder) "keyFile" (printf "%s/tls/tls.key" $folder) -}}
{{- if $tls.clientCASecretName -}}
{{- $_ := set $files "clientCaFile" (printf "%s/client-ca/ca.crt" $folder) -}}
{{- if $tls.requireClientCert -}}{{- $_ := set $files "requireClientCert" true -}}{{- end -}}
{{- if ne $tls.othersMay "none" -}}{{- $_ := set $files "othersMay" $tls.othersMay -}}{{- end -}}
{{- if kindIs "slice" $tls.clients -}}{{- $_ := set $files "clients" $tls.clients -}}{{- end -}}
{{- else if or $tls.requireClientCert $tls.clients -}}
{{- fail "admin.tls.requireClientCert and admin.tls.clients need admin.tls.clientCASecretName, a Secret with the CA's ca.crt" -}}
{{- end -}}
{{- $_ := set $admin "tls" $files -}}
{{- else if or $tls.clientCASecretName $tls.issuerRef $tls.requireClientCert $tls.clients -}}
{{- fail "admin.tls needs secretName: the Secret with tls.crt and tls.key" -}}
{{- end -}}
{{- $tokens := default (list) $admin.tokens -}}
{{- range $given.tokens -}}
{{- $tokens = append $tokens (dict "name" .name "right" .right "file" (printf "%s/tokens/%s" $folder .name)) -}}
{{- end -}}
{{- with $tokens -}}{{- $_ := set $admin "tokens" . -}}{{- end -}}
{{- include "berth.eachOnce" (dict "what" "admin.tokens" "of" $tokens) -}}
{{- include "berth.eachOnce" (dict "what" "admin.tls.clients" "of" (default (list) (default (dict) $admin.tls).clients)) -}}
{{- if $given.kubernetes.enabled -}}
{{- $_ := set $admin "kubernetes" (dict "audiences" $given.kubernetes.audiences) -}}
{{- end -}}
{{- /* In the pod the command line goes by the socket, since a certificate need not name 127.0.0.1. */ -}}
{{- if or $given.socket.enabled $given.socket.hostDir $admin.tls -}}
{{- $_ := set $admin "socket" (default (printf "%s/admin.sock" (include "berth.socketFolder" .)) $admin.socket) -}}
{{- end -}}
{{- with $given.limits -}}{{- $_ := set $admin "limits" . -}}{{- end -}}
{{- if and (hasKey $admin "kubernetes") (not (and $values.rbac.read $values.rbac.review)) -}}
{{- fail "admin.kubernetes needs rbac.read and rbac.review: Berth asks the API server whose a token is" -}}
{{- end -}}
{{- $address := default (ternary "0.0.0.0" "127.0.0.1" (hasKey $admin "tls")) $values.adminAddress -}}
{{- if not (or (hasKey $admin "tls") (hasPrefix "127." $address) (eq $address "::1")) -}}
{{- fail (printf "adminAddress %s needs TLS: set admin.tls.secretName" $address) -}}
{{- end -}}
{{- $_ := set .config "adminListen" (include "berth.address" (dict "host" $address "port" $values.adminPort)) -}}
{{- if $admin -}}{{- $_ := set .config "admin" $admin -}}{{- end -}}
{{- end -}}

{{- /* Lays the values of `gfd` and `labels` over `config.labels`. */ -}}
{{- define "berth.nodeLabels" -}}
{{- $labels := default (dict) .config.labels -}}
{{- with .values.labels.nfdFile -}}{{- $_ := set $labels "nfdFile" . -}}{{- end -}}
{{- if or .values.labels.node (and .values.gfd.enabled (not $labels.nfdFile)) -}}{{- $_ := set $labels "node" true -}}{{- end -}}
{{- if and $labels.node (not (and .values.rbac.read (or .values.rbac.label .values.gfd.enabled))) -}}
{{- fail "labels of the node need rbac.read, and labels.node needs rbac.label or gfd.enabled: the node is patched" -}}
{{- end -}}
{{- if $labels -}}{{- $_ := set .config "labels" $labels -}}{{- end -}}
{{- end -}}

{{- /* Whether Berth may patch its node: gfd.enabled is enough. */ -}}
{{- define "berth.mayLabel" -}}
{{- $file := or .Values.labels.nfdFile (dig "labels" "nfdFile" "" (default (dict) .Values.config)) -}}
{{- if or .Values.rbac.label (and .Values.gfd.enabled (not $file)) -}}true{{- end -}}
{{- end -}}

{{- /* Whether the DRA driver is enabled on any node. */ -}}
{{- define "berth.hasDra" -}}
{{- $any := dig "dra" "enabled" false (default (dict) .Values.config) -}}
{{- range $name, $own := .Values.profiles -}}
{{- $any = or $any (dig "config" "dra" "enabled" false (default (dict) $own)) -}}
{{- end -}}
{{- if $any -}}true{{- end -}}
{{- end -}}

{{- /* Whether any node takes part in the fleet. */ -}}
{{- define "berth.hasFleet" -}}
{{- $any := dig "fleet" "enabled" false (default (dict) .Values.config) -}}
{{- range $name, $own := .Values.profiles -}}
{{- $any = or $any (dig "config" "fleet" "enabled" false (default (dict) $own)) -}}
{{- end -}}
{{- if $any -}}true{{- end -}}
{{- end -}}

{{- /* One driver for all profiles: the admission policy and the DeviceClasses name it. */ -}}
{{- define "berth.driver" -}}
{{- $driver := dig "dra" "driver" "gpu.nvidia.com" (default (dict) .Values.config) -}}
{{- range $name, $own := .Values.profiles -}}
{{- if ne $driver (dig "config" "dra" "driver" $driver (default (dict) $own)) -}}
{{- fail (printf "profiles.%s.config.dra.driver must be that of config.dra.driver, %s" $name $driver) -}}
{{- end -}}
{{- end -}}
{{- $driver -}}
{{- end -}}

{{- /* The ConfigMap whose files a label of the node chooses among, if there is one. */ -}}
{{- define "berth.configsName" -}}
{{- $config := .values.config -}}
{{- if $config.name -}}
{{- $config.name -}}
{{- else if $config.map -}}
{{- printf "%s-configs" (include "berth.profileName" .) -}}
{{- end -}}
{{- end -}}

{{- /* Whether any DaemonSet has such a ConfigMap. */ -}}
{{- define "berth.hasConfigs" -}}
{{- $config := default (dict) .Values.config -}}
{{- if or $config.name $config.map -}}true{{- end -}}
{{- range .Values.profiles -}}
{{- $config := default (dict) (default (dict) .).config -}}
{{- if or $config.name $config.map -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Values of NVIDIA's chart as its pods get them: by the environment, which wins over every file. */ -}}
{{- define "berth.nvidiaEnvironment" -}}
{{- range $key, $name := dict
  "compatWithCPUManager" "PASS_DEVICE_SPECS"
  "deviceIDStrategy" "DEVICE_ID_STRATEGY"
  "deviceListStrategy" "DEVICE_LIST_STRATEGY"
  "failOnInitError" "FAIL_ON_INIT_ERROR"
  "gdrcopyEnabled" "GDRCOPY_ENABLED"
  "gdsEnabled" "GDS_ENABLED"
  "migStrategy" "MIG_STRATEGY"
  "mofedEnabled" "MOFED_ENABLED"
  "nvidiaDevRoot" "NVIDIA_DEV_ROOT"
  "nvidiaDriverRoot" "NVIDIA_DRIVER_ROOT"
}}
{{- $value := index $.values $key }}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- with .values.nvidiaDriverRoot }}
- name: DRIVER_ROOT_CTR_PATH
  value: {{ include "berth.driverRootSeen" . | quote }}
{{- end }}
{{- end -}}

{{- /* Where the parent of the host's driver root is mounted: the host's root itself has none. */ -}}
{{- define "berth.driverRootMount" -}}
{{- ternary "/driver-root" "/driver-root-parent" (eq (clean .) "/") -}}
{{- end -}}

{{- /* Where the container sees the host's driver root. */ -}}
{{- define "berth.driverRootSeen" -}}
{{- if eq (clean .) "/" -}}/driver-root{{- else -}}{{ printf "/driver-root-parent/%s" (clean . | base) }}{{- end -}}
{{- end -}}

{{- /* Refuses what values of NVIDIA's chart ask for and Berth has not, all of it at once. */ -}}
{{- define "berth.checkNvidia" -}}
{{- /* A `config:` without a value takes the chart's own away. */ -}}
{{- if not .Values.config -}}{{- $_ := set .Values "config" dict -}}{{- end -}}
{{- $lines := list -}}
{{- range $group := .Files.Get "files/nvidia-values.yaml" | fromYamlArray -}}
{{- $given := $.Values -}}
{{- $prefix := "" -}}
{{- if $group.group -}}
{{- $given = default (dict) (index $.Values $group.group) -}}
{{- $prefix = printf "%s." $group.group -}}
{{- end -}}
{{- range $key, $value := $given -}}
{{- $known := index $group.keys $key -}}
{{- $accepted := list -}}
{{- range (default (dict) $known).accepted -}}{{- $accepted = append $accepted (toJson .) -}}{{- end -}}
{{- $instead := default $group.others (default (dict) $known).instead -}}
{{- if and $instead (not (default (dict) $known).supported) (not (has (toJson $value) $accepted)) -}}
{{- $lines = append $lines (printf "%s%s: %s" $prefix $key $instead) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasSuffix "k8s-device-plugin" .Values.image.repository -}}
{{- $lines = append $lines (printf "image.repository: %s is NVIDIA's plugin; set image.repository and image.tag to your image of Berth (docs/image.md)" .Values.image.repository) -}}
{{- end -}}
{{- $lines = concat $lines (include "berth.checkConfigs" (dict "values" .Values "prefix" "") | fromYamlArray) -}}
{{- range $name, $own := .Values.profiles -}}
{{- $config := default (dict) (default (dict) $own).config -}}
{{- if or $config.map $config.name $config.default (hasKey $config "fallbackStrategies") -}}
{{- $values := deepCopy $.Values -}}
{{- include "berth.lay" (dict "to" $values "from" (deepCopy $own)) -}}
{{- $lines = concat $lines (include "berth.checkConfigs" (dict "values" $values "prefix" (printf "profiles.%s." $name)) | fromYamlArray) -}}
{{- end -}}
{{- end -}}
{{- if $lines -}}
{{- fail (printf "Berth cannot use these values; change each as described:\n  - %s" (join "\n  - " $lines)) -}}
{{- end -}}
{{- end -}}

{{- /* What is wrong with config.map and its like, as a list in YAML. */ -}}
{{- define "berth.checkConfigs" -}}
{{- $config := .values.config -}}
{{- $prefix := printf "%sconfig" .prefix -}}
{{- $guard := .values.guard.enabled -}}
{{- $lines := list -}}
{{- if and $config.name $config.map -}}
{{- $lines = append $lines (printf "%s.name refers to an existing ConfigMap and %s.map creates one; set only one of them" $prefix $prefix) -}}
{{- end -}}
{{- if or $config.name $config.map -}}
{{- $off := and (hasKey $config "apiServer") (or (not $config.apiServer) (eq (toString $config.apiServer) "off")) -}}
{{- if or $off (not .values.rbac.read) -}}
{{- $lines = append $lines (printf "%s.%s: the node's label is read through the API server; set rbac.read to true and remove config.apiServer" $prefix (ternary "name" "map" (not (empty $config.name)))) -}}
{{- end -}}
{{- end -}}
{{- if and $config.map (not $config.name) -}}
{{- $keys := keys $config.map | sortAlpha -}}
{{- $fallbacks := ternary $config.fallbackStrategies (list "named" "single") (hasKey $config "fallbackStrategies") -}}
{{- if $config.default -}}
{{- if not (hasKey $config.map $config.default) -}}
{{- $lines = append $lines (printf "%s.default: %s is not a key of %s.map; use one of %s" $prefix $config.default $prefix (join ", " $keys)) -}}
{{- end -}}
{{- else if not (or (and (has "named" $fallbacks) (hasKey $config.map "default")) (and (has "single" $fallbacks) (eq (len $keys) 1)) (has "empty" $fallbacks)) -}}
{{- $lines = append $lines (printf "%s.default: no file applies to nodes without the label; set it to one of %s, or add empty to %s.fallbackStrategies" $prefix (join ", " $keys) $prefix) -}}
{{- end -}}
{{- range $key, $text := $config.map -}}
{{- $file := fromYaml $text -}}
{{- if $file.Error -}}
{{- $lines = append $lines (printf "%s.map.%s: is not valid YAML: %s" $prefix $key (replace "\n" " " $file.Error)) -}}
{{- end -}}
{{- range list "kubeletDir" "kubeletRootDir" "devicePluginsDir" "stateDir" "adminListen" "healthListen" -}}
{{- if hasKey $file . -}}
{{- $lines = append $lines (printf "%s.map.%s: has %s, which the chart sets; use the chart's value" $prefix $key .) -}}
{{- end -}}
{{- end -}}
{{- if $guard -}}
{{- range list "guard" "enforce" "gpus" "nvmlLibrary" -}}
{{- if hasKey $file . -}}
{{- $lines = append $lines (printf "%s.map.%s: has %s, and all nodes have one guard, which does not read these files; set config.%s" $prefix $key . .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- /* Not by dig, which ends on a `sharing:` without a value. */ -}}
{{- $sharing := index $file "sharing" -}}
{{- if and (kindIs "map" $sharing) $sharing.mps -}}
{{- $lines = append $lines (printf "%s.map.%s: has sharing.mps, and Berth starts no MPS control daemon; use sharing.timeSlicing, or a stack with containerEdits.resources.RESOURCE.mps" $prefix $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $lines -}}
{{- end -}}

{{- /* Whether any profile's admin API is open to the network. Profiles may bring TLS by their `config` alone. */ -}}
{{- define "berth.adminOpen" -}}
{{- if or .Values.admin.tls.secretName (dig "admin" "tls" "" (default (dict) .Values.config)) -}}true{{- end -}}
{{- range $name, $own := .Values.profiles -}}
{{- if dig "config" "admin" "tls" "" (default (dict) $own) -}}true{{- end -}}
{{- end -}}
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
{{- if .values.compatWithCPUManager -}}
{{- /* The CPU manager has runc write this pod's device rules again, too: an unprivileged pod then loses the GPUs that the
nvidia runtime added, since runc has no record of them. As in NVIDIA's chart. */ -}}
{{- $_ := set $own "privileged" true -}}
{{- end -}}
{{- if or .values.securityContext.privileged (and .values.compatWithCPUManager (not (hasKey .values.securityContext "privileged"))) -}}
{{- $_ := unset $own "allowPrivilegeEscalation" -}}
{{- if not .values.securityContext.privileged -}}
{{- $_ := unset $own "capabilities" -}}
{{- end -}}
{{- end -}}
{{- include "berth.lay" (dict "to" $own "from" .values.securityContext) -}}
{{- toYaml $own -}}
{{- end -}}
