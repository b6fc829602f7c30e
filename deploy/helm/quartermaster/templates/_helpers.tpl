{{- /* Objects have the names that the manager and its roles go by, whatever the release is called. */}}
{{- define "quartermaster.labels" -}}
app.kubernetes.io/name: quartermaster
{{- end }}

{{- /* What tells names in the cluster apart from the names of an installation in another namespace, as manager rbac does. */}}
{{- define "quartermaster.suffix" -}}
{{- if ne .Release.Namespace "kube-system" }}-{{ .Release.Namespace }}{{ end }}
{{- end }}

{{- /* The name of the Lease. */}}
{{- define "quartermaster.lease" -}}
{{- get (.Values.flags | default dict) "leader-elect-resource-name" | default "quartermaster" }}
{{- end }}

{{- /* The name of the Namespace that names the leader to the fence. */}}
{{- define "quartermaster.leaderNamespace" -}}
{{ include "quartermaster.lease" . }}-leader{{ include "quartermaster.suffix" . }}
{{- end }}

{{- /* All flags but quartermaster.args: the chart's defaults, values.flags, and the flags of each enabled controller. */}}
{{- define "quartermaster.flags" -}}
{{- $flags := dict "leader-elect" true "shutdown-timeout" "20s" "secure-port" 10357 "insecure-port" 0 }}
{{- if .Values.namespaced.enabled }}
{{- $flags = dict "leader-elect" true "shutdown-timeout" "20s" "secure-port" 0 "insecure-port" 10358 "insecure-bind-address" "0.0.0.0" "insecure-metrics" true }}
{{- end }}
{{- /* Not mergeOverwrite, which does not overwrite with false and 0. */}}
{{- range $name, $value := .Values.flags }}
{{- $_ := set $flags $name $value }}
{{- end }}
{{- range .Values.controllers }}
{{- if .enabled }}
{{- range $name, $value := get . "flags" | default dict }}
{{- $_ := set $flags $name $value }}
{{- end }}
{{- end }}
{{- end }}
{{- if include "quartermaster.rules-of-ttl" . }}
{{- $_ := set $flags "ttl-rules" "/etc/quartermaster/ttl/rules.yaml" }}
{{- end }}
{{- toYaml $flags }}
{{- end }}

{{- /* The file of the rules of ttl; empty without rules. */}}
{{- define "quartermaster.rules-of-ttl" -}}
{{- if dig "ttl" "enabled" false .Values.controllers }}
{{- with dig "ttl" "rules" list .Values.controllers }}
{{- dict "rules" . | toYaml }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A value of a flag. Helm reads every number as a float, and would write a great one with an exponent. */}}
{{- define "quartermaster.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- /* The arguments of the manager, as a list. */}}
{{- define "quartermaster.args" -}}
{{- $args := list "--controllers=*" }}
{{- range $name, $controller := .Values.controllers }}
{{- if and .enabled (ne $name "config-reload") }}
{{- $args = append $args (printf "--controllers=*,%s" $name) }}
{{- end }}
{{- end }}
{{- if not (dig "config-reload" "enabled" false .Values.controllers) }}
{{- $args = append $args "--controllers=-config-reload" }}
{{- end }}
{{- with .Values.compat }}
{{- $args = append $args (printf "--compat=%s" (join "," .)) }}
{{- end }}
{{- if .Values.namespaced.enabled }}
{{- /* The manager refuses one that is named twice. */}}
{{- range prepend (without .Values.namespaced.additionalNamespaces .Release.Namespace | uniq) "$(POD_NAMESPACE)" }}
{{- $args = append $args (printf "--namespaces=%s" .) }}
{{- end }}
{{- end }}
{{- if include "quartermaster.elsewhere" . }}
{{- $args = concat $args (list "--leader-elect-resource-namespace=$(POD_NAMESPACE)") }}
{{- end }}
{{- range $name, $value := include "quartermaster.flags" . | fromYaml }}
{{- if kindIs "slice" $value }}
{{- range $value | default (list "") }}
{{- $args = append $args (printf "--%s=%s" $name (include "quartermaster.scalar" .)) }}
{{- end }}
{{- else if kindIs "map" $value }}
{{- range $key, $of := $value }}
{{- $args = append $args (printf "--%s=%s=%s" $name $key (include "quartermaster.scalar" $of)) }}
{{- end }}
{{- else }}
{{- $args = append $args (printf "--%s=%s" $name (include "quartermaster.scalar" $value)) }}
{{- end }}
{{- end }}
{{- toYaml (concat $args (.Values.extraArgs | default list)) }}
{{- end }}

{{- /* Not empty if the manager has to be told where it is installed. */}}
{{- define "quartermaster.elsewhere" -}}
{{- if or .Values.namespaced.enabled (ne .Release.Namespace "kube-system") }}true{{ end }}
{{- end }}

{{- /* Not empty if the API server's fence is installed. Managers that do not elect a leader name none, so it would refuse them all. */}}
{{- define "quartermaster.fenced" -}}
{{- if and .Values.fence.enabled (not .Values.namespaced.enabled) (get (include "quartermaster.flags" . | fromYaml) "leader-elect") }}true{{ end }}
{{- end }}

{{- /* The port that serves health and metrics: https, or http without a secure port. */}}
{{- define "quartermaster.port" -}}
{{- $flags := include "quartermaster.flags" . | fromYaml }}
{{- if get $flags "secure-port" }}
{{- dict "name" "https" "number" (get $flags "secure-port" | int) | toYaml }}
{{- else }}
{{- dict "name" "http" "number" (get $flags "insecure-port" | int) | toYaml }}
{{- end }}
{{- end }}

{{- /* The settings by which files/roles.yaml knows which rules are needed, as the key `list`. */}}
{{- define "quartermaster.settings" -}}
{{- $settings := list }}
{{- range $name, $value := include "quartermaster.flags" . | fromYaml }}
{{- if and $value (kindIs "slice" $value) }}
{{- $items := $value | join "," | lower | splitList "," | uniq | sortAlpha }}
{{- $settings = concat $settings (list $name (printf "%s=only %s" $name (join "," $items))) }}
{{- range $items }}
{{- $settings = append $settings (printf "%s=%s" $name .) }}
{{- end }}
{{- else if $value }}
{{- $settings = append $settings $name }}
{{- else if not (or (kindIs "slice" $value) (kindIs "map" $value)) }}
{{- $settings = append $settings (printf "%s=%v" $name $value) }}
{{- end }}
{{- end }}
{{- range .Values.compat }}
{{- $settings = append $settings (printf "compat=%s" .) }}
{{- end }}
{{- if .Values.namespaced.enabled }}
{{- $settings = append $settings "namespaces" }}
{{- end }}
{{- dict "list" $settings | toYaml }}
{{- end }}

{{- /* The types that ttl may delete, as the key `list`. An empty list is none, and no list is refused: the manager's default is every type. */}}
{{- define "quartermaster.types" -}}
{{- $flags := include "quartermaster.flags" . | fromYaml }}
{{- dict "list" (get $flags "ttl-include-resources" | default list | join "," | splitList "," | compact) | toYaml }}
{{- end }}

{{- /* The rules of a role that these values need, as the key `list`. */}}
{{- define "quartermaster.rules" -}}
{{- $root := .root }}
{{- $settings := (include "quartermaster.settings" .root | fromYaml).list }}
{{- $rules := list }}
{{- range .role.rules }}
{{- $needed := not (get . "when") }}
{{- range get . "when" | default list }}{{ if has . $settings }}{{ $needed = true }}{{ end }}{{ end }}
{{- range get . "unless" | default list }}{{ if has . $settings }}{{ $needed = false }}{{ end }}{{ end }}
{{- with get . "unlessAll" }}
{{- $all := true }}
{{- range . }}{{ if not (has . $settings) }}{{ $all = false }}{{ end }}{{ end }}
{{- if $all }}{{ $needed = false }}{{ end }}
{{- end }}
{{- $rule := .rule }}
{{- if not $needed }}
{{- else if eq ($rule.resources | first) "plural" }}
{{- /* For each type that ttl may delete. */}}
{{- range (include "quartermaster.types" $root | fromYaml).list }}
{{- $plural := splitList "." . | first }}
{{- $group := contains "." . | ternary (trimPrefix (printf "%s." $plural) .) "*" }}
{{- $rules = append $rules (merge (dict "apiGroups" (list $group) "resources" (list $plural)) $rule) }}
{{- end }}
{{- else }}
{{- if has "dnsendpoints" $rule.resources }}
{{- $group := get (include "quartermaster.flags" $root | fromYaml) "federation-dns-endpoint-group" | default "externaldns.k8s.io" }}
{{- $rule = set $rule "apiGroups" (list $group) }}
{{- end }}
{{- $names := get $rule "resourceNames" | default list | join "," }}
{{- if eq $names "quartermaster" }}
{{- $rule = set $rule "resourceNames" (list (include "quartermaster.lease" $root)) }}
{{- else if eq $names "quartermaster-leader" }}
{{- $rule = set $rule "resourceNames" (list (include "quartermaster.leaderNamespace" $root)) }}
{{- end }}
{{- $rules = append $rules $rule }}
{{- end }}
{{- end }}
{{- dict "list" $rules | toYaml }}
{{- end }}
