// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cyclonedx writes software bills of materials as CycloneDX JSON. The output is
// reproducible, so it has neither a time nor a serial number.
package cyclonedx

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
)

// BOM has the fields of CycloneDX 1.6 that are used, https://cyclonedx.org/docs/1.6/json/.
type BOM struct {
	Schema      string      `json:"$schema"`
	BOMFormat   string      `json:"bomFormat"`
	SpecVersion string      `json:"specVersion"`
	Version     int         `json:"version"`
	Metadata    Metadata    `json:"metadata"`
	Components  []Component `json:"components"`
}

// Metadata names what the bill is about.
type Metadata struct {
	Component Component `json:"component"`
}

// Component is a program, a library, a file or an image.
type Component struct {
	BOMRef     string     `json:"bom-ref"`
	Type       string     `json:"type"`
	Name       string     `json:"name"`
	Version    string     `json:"version,omitempty"`
	Hashes     []Hash     `json:"hashes,omitempty"`
	Licenses   []License  `json:"licenses,omitempty"`
	PackageURL string     `json:"purl,omitempty"`
	Properties []Property `json:"properties,omitempty"`
}

// Hash is a checksum.
type Hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

// License is one of those under which a component stands.
type License struct {
	License LicenseID `json:"license"`
}

// LicenseID is a license's identifier in the list of SPDX.
type LicenseID struct {
	ID string `json:"id"`
}

// Property is what CycloneDX has no field for.
type Property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// New returns the bill of what a component consists of.
func New(component Component, parts []Component) BOM {
	return BOM{
		Schema:      "http://cyclonedx.org/schema/bom-1.6.schema.json",
		BOMFormat:   "CycloneDX",
		SpecVersion: "1.6",
		Version:     1,
		Metadata:    Metadata{component},
		Components:  parts,
	}
}

// SHA256 returns the checksum of a file's content.
func SHA256(content []byte) []Hash {
	sum := sha256.Sum256(content)
	return []Hash{{"SHA-256", hex.EncodeToString(sum[:])}}
}

// Licenses returns licenses by their identifiers.
func Licenses(ids ...string) (licenses []License) {
	for _, id := range ids {
		licenses = append(licenses, License{LicenseID{id}})
	}
	return licenses
}

// Write writes the bill to a file.
func (b BOM) Write(file string) error {
	text, err := json.MarshalIndent(b, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}
