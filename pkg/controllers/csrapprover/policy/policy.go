// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package policy decides whether the request of a kubelet for a serving certificate may be approved. It is
// pure. docs/controllers/csr-approver.md explains the checks, by their numbers.
package policy

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Check is the number of a check.
type Check int

// The checks. A request that fails CheckRequester is not a kubelet's, and is ignored.
const (
	CheckRequester Check = 1 + iota
	CheckEncoding
	CheckSubject
	CheckUsages
	CheckNames
	CheckDuration
	CheckReserved
	CheckNodeExists
	CheckNodeAddresses
	CheckFlags
	CheckUnique
	CheckAPIServer
	CheckRate
)

// checkTexts say why a request fails a check.
var checkTexts = map[Check]string{
	CheckEncoding:      "it is not one PEM block of at most 16 KiB with a valid signature",
	CheckSubject:       "the subject is not the kubelet's user and group",
	CheckUsages:        "the usages are not those of a server",
	CheckNames:         "it must ask for 1 to 32 DNS names and IP addresses, and for nothing else",
	CheckDuration:      "it asks for a longer time than is allowed",
	CheckReserved:      "no node may have such a name or address",
	CheckNodeExists:    "the Node does not exist, or is being deleted",
	CheckNodeAddresses: "not among the addresses of the Node",
	CheckFlags:         "not permitted by the flags dns-regex and ip-ranges",
	CheckUnique:        "another Node has it",
	CheckAPIServer:     "it is an address of the API server",
	CheckRate:          "too many requests of the node were approved within an hour",
}

// Problem is a failed check, and the names and addresses that failed it.
type Problem struct {
	Check Check
	Names []string
}

// maxShownNames limits the names in a text: the sender of a request chooses how many there are.
const maxShownNames = 3

// String describes the problem in ASCII.
func (p Problem) String() string {
	text := fmt.Sprintf("check %d: %s", p.Check, checkTexts[p.Check])
	for i, name := range p.Names {
		if i == maxShownNames {
			return fmt.Sprintf("%s and %d more", text, len(p.Names)-maxShownNames)
		}
		text += fmt.Sprintf(" %+.60q", name)
	}
	return text
}

// Options are what an administrator permits.
type Options struct {
	// IPRanges are CIDRs.
	IPRanges []string
	// DNSRegex is the regular expression that DNS names match as a whole; {node} in it is the Node's name.
	DNSRegex string
	// MaxDuration is the longest time that a request may ask for.
	MaxDuration time.Duration
}

// LongestDuration is the most that MaxDuration may be.
const LongestDuration = 367 * 24 * time.Hour

// Validate calls bad with each mistake and the name of its flag.
func (o *Options) Validate(bad func(flag, format string, args ...any)) {
	for _, item := range o.IPRanges {
		if prefix, err := netip.ParsePrefix(item); err != nil || prefix.Addr().Is4In6() {
			bad("ip-ranges", "%.80q must be a CIDR, such as 10.0.0.0/16 or fd00::/8", item)
		}
	}
	// Compile the expression alone first, so that the anchors enclose all of it, and then with the longest name.
	_, err := regexp.Compile(o.DNSRegex)
	if err == nil {
		_, err = o.dnsExpression(strings.Repeat("a", validation.DNS1123SubdomainMaxLength))
	}
	if err != nil {
		bad("dns-regex", "%.200q is not a regular expression: %v", o.DNSRegex, err)
	}
	if o.DNSRegex == "" {
		bad("dns-regex", "must not be empty")
	}
	if o.MaxDuration < 10*time.Minute || o.MaxDuration > LongestDuration {
		bad("max-duration", "must be 10m to %v, got %v", LongestDuration, o.MaxDuration)
	}
}

// dnsExpression returns what the DNS names of a node match.
func (o *Options) dnsExpression(node string) (*regexp.Regexp, error) {
	return regexp.Compile(`\A(?:` + strings.ReplaceAll(o.DNSRegex, "{node}", regexp.QuoteMeta(node)) + `)\z`)
}

// permitsAddress reports whether one of the ranges has an address.
func (o *Options) permitsAddress(ip netip.Addr) bool {
	return slices.ContainsFunc(o.IPRanges, func(item string) bool {
		prefix, err := netip.ParsePrefix(item)
		return err == nil && prefix.Contains(ip)
	})
}
