// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// maxAddresses is how many addresses of a Node count: its kubelet writes them, and could write any number.
const maxAddresses = 64

// controlPlane is a label that kubelets cannot set, see the admission plugin NodeRestriction.
const controlPlane = "node-role.kubernetes.io/control-plane"

// Judge returns the checks that a request of the node's kubelet fails now. otherNodeHas reports whether
// another Node has a name or an address.
func (o *Options) Judge(requested *CertificateNames, node *corev1.Node, otherNodeHas func(string) bool) (problems []Problem) {
	if node.DeletionTimestamp != nil {
		problems = append(problems, Problem{Check: CheckNodeExists})
	}
	listed := listedNames(node)
	problems = appendFailure(problems, CheckNodeAddresses, requested.All(), func(name string) bool { return !listed[name] })
	problems = appendFailure(problems, CheckFlags, o.forbiddenNames(requested, node.Name), func(string) bool { return true })
	return appendFailure(problems, CheckUnique, requested.All(), otherNodeHas)
}

// JudgeAPIServer is Judge for the names and addresses of the API server. A node of the control plane may have
// them.
func JudgeAPIServer(requested *CertificateNames, apiServerNames map[string]bool) []Problem {
	return appendFailure(nil, CheckAPIServer, requested.All(), func(name string) bool { return apiServerNames[name] })
}

// IsControlPlane reports whether a Node is one of the control plane.
func IsControlPlane(node *corev1.Node) bool {
	_, labelled := node.Labels[controlPlane]
	return labelled
}

// appendFailure appends the failure of a check if some of the names are wrong.
func appendFailure(problems []Problem, check Check, names []string, fails func(string) bool) []Problem {
	names = slices.DeleteFunc(names, func(name string) bool { return !fails(name) })
	if len(names) > 0 {
		problems = append(problems, Problem{check, names})
	}
	return problems
}

// forbiddenNames returns the names and addresses that the administrator does not permit.
func (o *Options) forbiddenNames(requested *CertificateNames, node string) (list []string) {
	expression, err := o.dnsExpression(node)
	for _, name := range requested.DNS {
		if err != nil || !expression.MatchString(name) {
			list = append(list, name)
		}
	}
	for _, ip := range requested.IPs {
		if !o.permitsAddress(ip) {
			list = append(list, ip.String())
		}
	}
	return list
}

// listedNames returns the DNS names and the addresses of a Node that a certificate may have.
func listedNames(node *corev1.Node) map[string]bool {
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
