// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/election"
)

// errNobodyLeads makes `manager status` end with 1.
var errNobodyLeads = errors.New("nobody leads")

// statusOptions are the flags of `manager status`.
type statusOptions struct {
	kubeconfig, context  string
	namespace, leaseName string
	endpoints            []string
	endpointCA           string
	endpointInsecure     bool
	timeout              time.Duration
	output               outputFormat
}

// setUsage wraps the usage of a command for people like that of the manager.
func setUsage(cmd *cobra.Command, flags, note string) {
	cmd.SetUsageFunc(func(cmd *cobra.Command) error {
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "Usage:\n  %s\n\nFlags%s:\n%s", cmd.UseLine(), note, flags)
		return err
	})
}

func newStatusCommand() *cobra.Command {
	o := statusOptions{namespace: installationNamespace, leaseName: election.NewConfig().ResourceName, timeout: 10 * time.Second}
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show who leads, the replicas and what their controllers do",
		Long: `Shows who leads, since when and in which term, whether the API server has the
write fence, the replicas, and of each that it reaches the state of its
controllers. Ends with 0 when somebody leads, with 1 otherwise.

The Lease, the fence and the Pods are read with a kubeconfig. What a replica
itself knows is on its secure port. Open a way there and name it, once for each
replica:

  kubectl -n kube-system port-forward POD 10357 &
  manager status --endpoint https://127.0.0.1:10357 --endpoint-insecure

It asks there as the user of the kubeconfig, who needs the verb get on the
nonResourceURLs /debug/leader and /debug/controllers/.`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		PersistentPreRun:  plainErrors,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			report, err := o.gather(ctx)
			if err != nil {
				return err
			}
			if err := o.output.write(cmd.OutOrStdout(), report, func(w io.Writer) { report.print(w, time.Now()) }); err != nil {
				return err
			}
			if !report.Leader.Leads {
				return errNobodyLeads
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&o.kubeconfig, "kubeconfig", o.kubeconfig, "The kubeconfig file. Default: $KUBECONFIG, then ~/.kube/config, then the ServiceAccount of the Pod.")
	fs.StringVar(&o.context, "context", o.context, "The context of the kubeconfig.")
	fs.StringVarP(&o.namespace, "namespace", "n", o.namespace, "The namespace of the Lease and of the Pods.")
	fs.StringVar(&o.leaseName, "lease-name", o.leaseName, "The name of the Lease, which is the managers' --leader-elect-resource-name.")
	fs.StringSliceVar(&o.endpoints, "endpoint", o.endpoints, "The secure port of a replica, https://HOST:PORT; may be given for each of them.")
	fs.StringVar(&o.endpointCA, "endpoint-ca-file", o.endpointCA, "The CA of the certificates of --endpoint. Default: the CAs of this machine.")
	fs.BoolVar(&o.endpointInsecure, "endpoint-insecure", o.endpointInsecure, "Do not verify the certificates of --endpoint. Your credentials go there: only for a port that you forwarded yourself.")
	fs.DurationVar(&o.timeout, "timeout", o.timeout, "How long each request may take.")
	o.output.addFlag(fs)
	setUsage(cmd, fs.FlagUsagesWrapped(helpColumns), "")
	return cmd
}

// statusReport is what `manager status` shows; fields may be added.
type statusReport struct {
	Leader   leaderReport    `json:"leader"`
	Fence    fenceReport     `json:"fence"`
	Replicas []replicaReport `json:"replicas"`
	// Problems are about what could not be read.
	Problems []string `json:"problems,omitempty"`
}

// leaderReport is the Lease, as people ask for it.
type leaderReport struct {
	Lease string `json:"lease"`
	// Leads is whether somebody holds the Lease and has renewed it in time by the clock of this machine, or says so itself.
	Leads    bool   `json:"leads"`
	Holder   string `json:"holder"`
	Pod      string `json:"pod"`
	LeaseUID string `json:"leaseUID"`
	// Term counts the changes of holder of this Lease.
	Term                 int32        `json:"term"`
	Since                *metav1.Time `json:"since,omitempty"`
	Renewed              *metav1.Time `json:"renewed,omitempty"`
	LeaseDurationSeconds int32        `json:"leaseDurationSeconds"`
}

// fenceReport is about the fence in the API server.
type fenceReport struct {
	// State is that of the leader's own test, or else Installed, Absent, Off or Unknown.
	State  string `json:"state"`
	Source string `json:"source"`
}

func (o *statusOptions) clientConfig() (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = o.kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: o.context}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig, --context: %w", err)
	}
	config.Timeout = o.timeout
	return rest.AddUserAgent(config, "status"), nil
}

// gather reads everything there is to show. Only without the Lease it fails; what else cannot be read is in Problems.
func (o *statusOptions) gather(ctx context.Context) (*statusReport, error) {
	config, err := o.clientConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	report := &statusReport{Replicas: []replicaReport{}}
	if report.Leader, err = o.leader(ctx, client); err != nil {
		return nil, err
	}
	selector := labels.Set{"app.kubernetes.io/name": serviceAccount}.String()
	pods, err := client.CoreV1().Pods(o.namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		report.problem("list Pods: %v", err)
		pods = &corev1.PodList{}
	}
	for i := range pods.Items {
		report.Replicas = append(report.Replicas, newReplicaReport(&pods.Items[i]))
	}
	o.askEndpoints(ctx, config, report)
	for i := range report.Replicas {
		if r := &report.Replicas[i]; !r.Reached && r.Error == "" {
			r.Error = "no --endpoint for it"
		}
	}
	report.trustLeader()
	report.Fence = o.fence(ctx, client, report)
	return report, nil
}

func (r *statusReport) problem(format string, args ...any) {
	r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
}

// trustLeader believes a holder that says that it leads, whatever the clock of this machine makes of its renewals.
func (r *statusReport) trustLeader() {
	for _, replica := range r.Replicas {
		if replica.Reached && replica.Name == r.Leader.Pod && replica.Phase == "Leading" {
			r.Leader.Leads = true
		}
	}
}

func (o *statusOptions) leader(ctx context.Context, client kubernetes.Interface) (leaderReport, error) {
	l := leaderReport{Lease: o.namespace + "/" + o.leaseName}
	lease, err := client.CoordinationV1().Leases(o.namespace).Get(ctx, o.leaseName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return l, fmt.Errorf("%w: Lease %s does not exist; see --namespace and --lease-name", errNobodyLeads, l.Lease)
	}
	if err != nil {
		return l, fmt.Errorf("read Lease %s: %w", l.Lease, err)
	}
	spec := lease.Spec
	l.Holder, l.LeaseUID = ptr.Deref(spec.HolderIdentity, ""), string(lease.UID)
	l.Term, l.LeaseDurationSeconds = ptr.Deref(spec.LeaseTransitions, 0), ptr.Deref(spec.LeaseDurationSeconds, 0)
	if l.Holder == "" {
		return l, nil
	}
	l.Pod = podOf(l.Holder)
	if spec.AcquireTime != nil {
		l.Since = &metav1.Time{Time: spec.AcquireTime.Time}
	}
	if spec.RenewTime != nil {
		l.Renewed = &metav1.Time{Time: spec.RenewTime.Time}
		l.Leads = time.Since(spec.RenewTime.Time) < time.Duration(l.LeaseDurationSeconds)*time.Second
	}
	return l, nil
}

// podOf is the Pod's name in an identity, PODNAME_UUID.
func podOf(identity string) string {
	pod, _, _ := strings.Cut(identity, "_")
	return pod
}

// fence asks the leader, who has tested it, or else looks for the binding of the policy.
func (o *statusOptions) fence(ctx context.Context, client kubernetes.Interface, report *statusReport) fenceReport {
	for _, r := range report.Replicas {
		if r.Name == report.Leader.Pod && r.Reached {
			return fenceReport{r.serverFence, "tested by the leader"}
		}
	}
	const source = "ValidatingAdmissionPolicyBinding " + election.ServerFenceName
	binding, err := client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Get(ctx, election.ServerFenceName, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return fenceReport{"Absent", source}
	case err != nil:
		report.problem("read the fence: %v", err)
		return fenceReport{"Unknown", source}
	}
	for _, action := range binding.Spec.ValidationActions {
		if p := binding.Spec.ParamRef; action == "Deny" && p != nil && p.Name == o.leaseName && p.Namespace == o.namespace {
			return fenceReport{"Installed", source + ", not tested"}
		}
	}
	return fenceReport{"Off", source + " does not deny, or goes by another Lease"}
}
