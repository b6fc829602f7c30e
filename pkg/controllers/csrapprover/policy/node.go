// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// maxAddresses is how many addresses of a Node count. Its kubelet writes them.
const maxAddresses = 64

// controlPlane is a label that kubelets cannot set, see the admission plugin NodeRestriction.
const controlPlane = "node-role.kubernetes.io/control-plane"

// Judge returns the checks that a request of the node's kubelet fails now. ofOtherNode reports whether
// another Node has a name or an address.
func (o *Options) Judge(asked *Requested, node *corev1.Node, ofOtherNode func(string) bool) (problems []Problem) {
	if node.DeletionTimestamp != nil {
		problems = append(problems, Problem{Check: CheckNodeExists})
	}
	listed := listedIn(node)
	problems = appendIf(problems, CheckNodeAddresses, asked.All(), func(name string) bool { return !listed[name] })
	problems = appendIf(problems, CheckFlags, o.refused(asked, node.Name), func(string) bool { return true })
	return appendIf(problems, CheckUnique, asked.All(), ofOtherNode)
}

// JudgeAPIServer is Judge for the names and addresses of the API server. A node of the control plane may have
// them.
func JudgeAPIServer(asked *Requested, ofAPIServer map[string]bool) []Problem {
	return appendIf(nil, CheckAPIServer, asked.All(), func(name string) bool { return ofAPIServer[name] })
}

// IsControlPlane reports whether a Node is one of the control plane.
func IsControlPlane(node *corev1.Node) bool {
	_, labelled := node.Labels[controlPlane]
	return labelled
}

// appendIf appends the failure of a check if some of the names are wrong.
func appendIf(problems []Problem, check Check, names []string, wrong func(string) bool) []Problem {
	names = slices.DeleteFunc(names, func(name string) bool { return !wrong(name) })
	if len(names) > 0 {
		problems = append(problems, Problem{check, names})
	}
	return problems
}

// refused returns the names and addresses that the administrator does not permit.
func (o *Options) refused(asked *Requested, node string) (list []string) {
	expression, err := o.dnsNames(node)
	for _, name := range asked.DNS {
		if err != nil || !expression.MatchString(name) {
			list = append(list, name)
		}
	}
	for _, ip := range asked.IPs {
		if !o.contains(ip) {
			list = append(list, ip.String())
		}
	}
	return list
}

// listedIn returns the DNS names and the addresses of a Node that a certificate may have.
func listedIn(node *corev1.Node) map[string]bool {
	listed := map[string]bool{}
	for _, a := range addresses(node) {
		name, isAddress := Canonical(a.Address)
		switch a.Type {
		case corev1.NodeHostName, corev1.NodeInternalDNS, corev1.NodeExternalDNS:
			listed[name] = listed[name] || !isAddress
		case corev1.NodeInternalIP, corev1.NodeExternalIP:
			listed[name] = listed[name] || isAddress
		}
	}
	return listed
}

// NodeNames returns the names and addresses of a Node, of any type, without its own name.
func NodeNames(node *corev1.Node) (names []string) {
	for _, a := range addresses(node) {
		if name, _ := Canonical(a.Address); name != "" && name != node.Name && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

func addresses(node *corev1.Node) []corev1.NodeAddress {
	return node.Status.Addresses[:min(len(node.Status.Addresses), maxAddresses)]
}
