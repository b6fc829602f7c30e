// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"os"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// WriteKubeconfig writes a kubeconfig with the server, CA and credentials of config, readable only
// by this user.
func WriteKubeconfig(path string, config *rest.Config) error {
	const name = "quartermaster"
	kubeconfig := api.Config{
		Clusters: map[string]*api.Cluster{name: {
			Server:                   config.Host,
			CertificateAuthorityData: config.CAData,
		}},
		AuthInfos: map[string]*api.AuthInfo{name: {
			ClientCertificateData: config.CertData,
			ClientKeyData:         config.KeyData,
			Token:                 config.BearerToken,
			TokenFile:             config.BearerTokenFile,
		}},
		Contexts:       map[string]*api.Context{name: {Cluster: name, AuthInfo: name}},
		CurrentContext: name,
	}
	data, err := clientcmd.Write(kubeconfig)
	if err != nil {
		return fmt.Errorf("encode the kubeconfig %s: %w", path, err)
	}
	return os.WriteFile(path, data, 0o600)
}
