// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// tokenTimeout is how long join waits for the cluster to issue a token.
const tokenTimeout = 30 * time.Second

var (
	namespacesResource  = corev1.SchemeGroupVersion.WithResource("namespaces")
	secretsResource     = corev1.SchemeGroupVersion.WithResource("secrets")
	accountsResource    = corev1.SchemeGroupVersion.WithResource("serviceaccounts")
	clusterRoleResource = rbacv1.SchemeGroupVersion.WithResource("clusterroles")
	bindingResource     = rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings")
)

// membership is a cluster that joins or leaves, with the flags of kubefedctl.
type membership struct {
	namespace, name                                      string
	clusterContext, hostContext, hostName                string
	secretName                                           string
	errorOnExisting, allowRoles, allowDNS, force, dryRun bool
	out                                                  io.Writer
	clusterConfig                                        *rest.Config
	host, cluster                                        dynamic.Interface
}

// newCommand returns the command by which clusters join and leave.
func newCommand(flags *Config, connect func() (controllers.Settings, *rest.Config, error)) *cobra.Command {
	m := &membership{}
	command := func(use, short, long string, run func(context.Context) error) *cobra.Command {
		cmd := &cobra.Command{Use: use, Short: short, Long: long, Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			settings, _, err := connect()
			if err != nil {
				return err
			}
			m.name, m.namespace, m.dryRun, m.out = args[0], flags.Namespace, settings.DryRun, cmd.OutOrStdout()
			if err := m.loadClients(cmd.Flag("kubeconfig").Value.String()); err != nil {
				return err
			}
			return run(cmd.Context())
		}}
		cmd.Flags().StringVar(&m.clusterContext, "cluster-context", "", "The context of the cluster in the kubeconfig; by default CLUSTER.")
		cmd.Flags().StringVar(&m.hostContext, "host-cluster-context", "", "The context of the host in the kubeconfig; by default the current one.")
		cmd.Flags().StringVar(&m.hostName, "host-cluster-name", "", "The host's name in the names of objects in the cluster; by default the name of its context.")
		cmd.Flags().StringVar(&flags.Namespace, "kubefed-namespace", flags.Namespace, "As --federation-namespace.")
		return cmd
	}
	join := command("join CLUSTER", "Let a cluster join the federation, or renew what it has", `Makes what kubefedctl join makes: in the cluster a ServiceAccount with a token,
a ClusterRole and its binding, on the host a Secret and a KubeFedCluster. The
ClusterRole has what the FederatedTypeConfigs of the host need, and nothing
else. Run it again after a new FederatedTypeConfig, or after an error.`, m.join)
	join.Flags().StringVar(&m.secretName, "secret-name", "", "The Secret on the host; by default the one that the KubeFedCluster has, or CLUSTER-token.")
	join.Flags().BoolVar(&m.errorOnExisting, "error-on-existing", false, "It is an error if the KubeFedCluster exists.")
	join.Flags().BoolVar(&m.allowRoles, "rbac-types", false, "The manager may write roles that hold more than its own. It is an administrator of the cluster then.")
	join.Flags().BoolVar(&m.allowDNS, "dns", false, "The manager may also read what --federation-dns needs: Nodes and EndpointSlices.")
	unjoin := command("unjoin CLUSTER", "Let a cluster leave the federation", `Removes what join or kubefedctl join has made. The federation namespace and all
propagated objects stay in the cluster.`, m.unjoin)
	unjoin.Flags().BoolVar(&m.force, "force", false, "It is no error if something cannot be removed from the cluster.")
	parent := &cobra.Command{Use: Name, Short: "Let clusters join and leave the federation"}
	parent.AddCommand(join, unjoin)
	return parent
}

// accountName returns the name of the ServiceAccount and its token in the cluster.
func (m *membership) accountName() string { return m.name + "-" + m.hostName }

// roleName returns the name of the ClusterRole and its binding in the cluster.
func (m *membership) roleName() string { return "kubefed-controller-manager:" + m.accountName() }

// defaultSecretName returns the name of the Secret on the host. The host may be the cluster, so the name is
// not that of the token.
func (m *membership) defaultSecretName() string { return m.name + "-token" }

// loadClients makes the clients of the host and the cluster.
func (m *membership) loadClients(kubeconfig string) error {
	files := clientcmd.NewDefaultClientConfigLoadingRules()
	files.ExplicitPath = kubeconfig
	contexts, err := files.Load()
	if err != nil {
		return err
	}
	loadConfig := func(context string) (*rest.Config, dynamic.Interface, error) {
		config, err := clientcmd.NewNonInteractiveClientConfig(*contexts, context, &clientcmd.ConfigOverrides{}, files).ClientConfig()
		if err != nil {
			return nil, nil, err
		}
		client, err := dynamic.NewForConfig(config)
		return config, client, errors.Join(err, rest.LoadTLSFiles(config))
	}
	m.hostContext = cmp.Or(m.hostContext, contexts.CurrentContext)
	m.hostName = cmp.Or(m.hostName, m.hostContext)
	if problems := validation.IsDNS1123Subdomain(m.accountName()); len(problems) > 0 {
		return fmt.Errorf("CLUSTER and --host-cluster-name: %q must be the name of a ServiceAccount: %s", m.accountName(), problems[0])
	}
	if _, m.host, err = loadConfig(m.hostContext); err != nil {
		return fmt.Errorf("--host-cluster-context: %w", err)
	}
	if m.clusterConfig, m.cluster, err = loadConfig(cmp.Or(m.clusterContext, m.name)); err != nil && !m.force {
		return fmt.Errorf("--cluster-context: %w", err)
	}
	return nil
}

func (m *membership) join(ctx context.Context) error {
	existing, err := m.host.Resource(kubeFedClusters).Namespace(m.namespace).Get(ctx, m.name, metav1.GetOptions{})
	switch {
	case err == nil && m.errorOnExisting:
		return fmt.Errorf("--error-on-existing: there is %s", m.describeObject(m.host, kubeFedClusters, m.name))
	case err == nil:
		m.secretName = cmp.Or(m.secretName, policy.ReadCluster(existing).Spec.SecretRef.Name)
	case !apierrors.IsNotFound(err):
		return fmt.Errorf("get %s: %w", m.describeObject(m.host, kubeFedClusters, m.name), err)
	}
	m.secretName = cmp.Or(m.secretName, m.defaultSecretName())
	switch other, err := m.secretSharer(ctx, m.secretName); {
	case err != nil:
		return err
	case other != "":
		return fmt.Errorf("--secret-name: the Secret %s belongs to the KubeFedCluster %s; each cluster needs its own", m.secretName, other)
	}
	configs, err := m.host.Resource(federatedTypeConfigs).Namespace(m.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list FederatedTypeConfigs: %w", err)
	}
	var types []policy.TypeConfig
	for i := range configs.Items {
		types = append(types, policy.ReadTypeConfig(&configs.Items[i]))
	}
	// A refusal of the host must be known before anything is written in the cluster.
	secret := map[string]any{"data": map[string]any{"token": ""}}
	if _, err := m.applyObject(ctx, m.host, secretsResource, "Secret", m.secretName, secret, metav1.DryRunAll); err != nil {
		return m.printResult("apply", m.host, secretsResource, m.secretName, err)
	}
	subject := map[string]any{"kind": rbacv1.ServiceAccountKind, "namespace": m.namespace, "name": m.accountName()}
	for _, object := range []struct {
		resource schema.GroupVersionResource
		kind     string
		name     string
		fields   map[string]any
	}{
		{namespacesResource, "Namespace", m.namespace, nil},
		{accountsResource, "ServiceAccount", m.accountName(), map[string]any{"automountServiceAccountToken": false}},
		{clusterRoleResource, "ClusterRole", m.roleName(), map[string]any{"rules": policy.ClusterRules(types, m.allowRoles, m.allowDNS)}},
		{bindingResource, "ClusterRoleBinding", m.roleName(), map[string]any{"subjects": []any{subject},
			"roleRef": map[string]any{"apiGroup": rbacv1.GroupName, "kind": "ClusterRole", "name": m.roleName()}}},
	} {
		if err := m.apply(ctx, m.cluster, object.resource, object.kind, object.name, object.fields); err != nil {
			return err
		}
	}
	token, ca, err := m.awaitToken(ctx)
	if err != nil {
		return err
	}
	if len(m.clusterConfig.CAData) > 0 {
		ca = base64.StdEncoding.EncodeToString(m.clusterConfig.CAData)
	}
	spec := map[string]any{"apiEndpoint": m.clusterConfig.Host, "caBundle": ca, "secretRef": map[string]any{"name": m.secretName},
		"disabledTLSValidations": []any{}, "proxyURL": ""}
	if m.clusterConfig.Insecure {
		spec["caBundle"], spec["disabledTLSValidations"] = "", []any{"*"}
	}
	if m.clusterConfig.Proxy != nil {
		proxy, err := m.clusterConfig.Proxy(nil)
		if err != nil {
			return fmt.Errorf("proxy of cluster %s: %w", m.name, err)
		}
		if proxy != nil {
			spec["proxyURL"] = proxy.String()
		}
	}
	secret["data"] = map[string]any{"token": token}
	if err := m.apply(ctx, m.host, secretsResource, "Secret", m.secretName, secret); err != nil {
		return err
	}
	return m.apply(ctx, m.host, kubeFedClusters, "KubeFedCluster", m.name, map[string]any{"spec": spec})
}

// awaitToken returns the token of the ServiceAccount and the certificates of the cluster, in base64, when the
// cluster has issued them. If the cluster deletes the token because it belongs to a former ServiceAccount,
// awaitToken makes a new one.
func (m *membership) awaitToken(ctx context.Context) (token, ca string, err error) {
	err = wait.PollUntilContextTimeout(ctx, time.Second, tokenTimeout, true, func(ctx context.Context) (bool, error) {
		secret, err := m.applyObject(ctx, m.cluster, secretsResource, "Secret", m.accountName(), map[string]any{"type": string(corev1.SecretTypeServiceAccountToken),
			"metadata": map[string]any{"annotations": map[string]any{corev1.ServiceAccountNameKey: m.accountName()}}})
		if err != nil || m.dryRun {
			return m.dryRun, err
		}
		account, err := m.cluster.Resource(accountsResource).Namespace(m.namespace).Get(ctx, m.accountName(), metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		token, _, _ = unstructured.NestedString(secret.Object, "data", corev1.ServiceAccountTokenKey)
		ca, _, _ = unstructured.NestedString(secret.Object, "data", corev1.ServiceAccountRootCAKey)
		return token != "" && secret.GetAnnotations()[corev1.ServiceAccountUIDKey] == string(account.GetUID()), nil
	})
	if wait.Interrupted(err) {
		err = fmt.Errorf("the cluster has issued no token in %s", tokenTimeout)
	}
	return token, ca, m.printResult("apply", m.cluster, secretsResource, m.accountName(), err)
}

// resourceClient returns the client of a resource in the federation namespace, or in the whole cluster.
func (m *membership) resourceClient(client dynamic.Interface, resource schema.GroupVersionResource) dynamic.ResourceInterface {
	switch resource {
	case namespacesResource, clusterRoleResource, bindingResource:
		return client.Resource(resource)
	}
	return client.Resource(resource).Namespace(m.namespace)
}

// describeObject names an object in errors and in what is printed.
func (m *membership) describeObject(client dynamic.Interface, resource schema.GroupVersionResource, name string) string {
	location := "cluster " + m.name
	if client == m.host {
		location = "the host"
	}
	return fmt.Sprintf("%s/%s in %s", resource.Resource, name, location)
}

// apply creates or changes an object, whoever has made it, and prints the result.
func (m *membership) apply(ctx context.Context, client dynamic.Interface, resource schema.GroupVersionResource, kind, name string, fields map[string]any) error {
	_, err := m.applyObject(ctx, client, resource, kind, name, fields)
	return m.printResult("apply", client, resource, name, err)
}

// applyObject applies an object and returns the result. With --dry-run, it sends dry runs only.
func (m *membership) applyObject(ctx context.Context, client dynamic.Interface, resource schema.GroupVersionResource, kind, name string, fields map[string]any, dryRun ...string) (*unstructured.Unstructured, error) {
	object := &unstructured.Unstructured{Object: map[string]any{}}
	maps.Copy(object.Object, fields)
	object.SetGroupVersionKind(resource.GroupVersion().WithKind(kind))
	object.SetName(name)
	data, err := json.Marshal(object.Object)
	if err == nil && (!m.dryRun || dryRun != nil) {
		object, err = m.resourceClient(client, resource).Patch(ctx, name, types.ApplyPatchType, data, metav1.PatchOptions{FieldManager: "quartermaster-join", Force: new(true), DryRun: dryRun})
	}
	return object, err
}

// printResult prints what was done, or would be with --dry-run.
func (m *membership) printResult(verb string, client dynamic.Interface, resource schema.GroupVersionResource, name string, err error) error {
	text := verb + " " + m.describeObject(client, resource, name)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", text, err)
	case m.dryRun:
		text += " (dry run)"
	}
	_, err = fmt.Fprintln(m.out, text)
	return err
}

func (m *membership) unjoin(ctx context.Context) error {
	existing, err := m.host.Resource(kubeFedClusters).Namespace(m.namespace).Get(ctx, m.name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("get %s: %w", m.describeObject(m.host, kubeFedClusters, m.name), err)
	}
	secret := m.defaultSecretName() // of a join that failed before it wrote the KubeFedCluster
	if err == nil {
		secret = policy.ReadCluster(existing).Spec.SecretRef.Name
	}
	switch other, err := m.secretSharer(ctx, secret); {
	case err != nil:
		return err
	case other != "":
		_, err = fmt.Fprintf(m.out, "note: %s stays, since the KubeFedCluster %s names it too\n", m.describeObject(m.host, secretsResource, secret), other)
		if err != nil {
			return err
		}
	default: // before the KubeFedCluster, which names the Secret
		if err := m.remove(ctx, m.host, secretsResource, secret); err != nil {
			return err
		}
	}
	if err := m.remove(ctx, m.host, kubeFedClusters, m.name); err != nil {
		return err
	}
	if m.cluster == nil {
		return nil
	}
	if _, accountErr := m.resourceClient(m.cluster, accountsResource).Get(ctx, m.accountName(), metav1.GetOptions{}); err == nil && apierrors.IsNotFound(accountErr) {
		_, err := fmt.Fprintf(m.out, "note: %s is not there; if the cluster joined with another --host-cluster-name or --cluster-context, run unjoin with these too\n", m.describeObject(m.cluster, accountsResource, m.accountName()))
		if err != nil {
			return err
		}
	}
	err = errors.Join(m.remove(ctx, m.cluster, bindingResource, m.roleName()), m.remove(ctx, m.cluster, clusterRoleResource, m.roleName()),
		m.remove(ctx, m.cluster, secretsResource, m.accountName()), m.remove(ctx, m.cluster, accountsResource, m.accountName()))
	if err != nil && m.force {
		_, err = fmt.Fprintln(m.out, err)
	}
	return err
}

// secretSharer returns the name of another KubeFedCluster that names a Secret, or "".
func (m *membership) secretSharer(ctx context.Context, secret string) (other string, err error) {
	clusters, err := m.host.Resource(kubeFedClusters).Namespace(m.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("list KubeFedClusters: %w", err)
	}
	for i := range clusters.Items {
		if c := &clusters.Items[i]; c.GetName() != m.name && policy.ReadCluster(c).Spec.SecretRef.Name == secret {
			return c.GetName(), nil
		}
	}
	return "", nil
}

// remove deletes an object, if it exists.
func (m *membership) remove(ctx context.Context, client dynamic.Interface, resource schema.GroupVersionResource, name string) error {
	var err error
	if !m.dryRun {
		err = m.resourceClient(client, resource).Delete(ctx, name, metav1.DeleteOptions{})
	}
	if apierrors.IsNotFound(err) {
		return nil
	}
	return m.printResult("delete", client, resource, name, err)
}
