// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package status implements `manager status`. It is a client of the API server and of the replicas'
// secure ports, and not part of the daemon.
package status

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// errNobodyLeads makes the command exit with status 1.
var errNobodyLeads = errors.New("nobody leads")

// options holds the values of the flags.
type options struct {
	kubeconfig, context  string
	namespace, leaseName string
	pods                 string // selects the Pods of the Deployment
	endpoints            []string
	endpointCA           string
	endpointInsecure     bool
	timeout              time.Duration
	output               string
}

// NewCommand returns the command status of the command of, which fails if nobody leads. lease is the Lease
// of an installation without flags; its name is also the name of the build and the label of the Pods.
func NewCommand(of string, lease types.NamespacedName) *cobra.Command {
	o := options{namespace: lease.Namespace, leaseName: lease.Name, timeout: 10 * time.Second,
		pods: labels.Set{"app.kubernetes.io/name": lease.Name}.String()}
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show who leads, the replicas and what their controllers do",
		Long: `Shows who leads, since when and in which term, whether the API server has the
fence, the replicas, and of each that it reaches the state of its
controllers. Ends with 0 when somebody leads, with 1 otherwise. Without the
leader's --endpoint, a holder of the Lease that does not lead yet, or that has
just crashed, counts as the leader.

The Lease, the fence and the Pods are read with a kubeconfig. What a replica
itself knows is on its secure port. Open a way there and name it, once for each
replica:

  kubectl -n kube-system port-forward POD 10357 &
  sleep 2    # until it says "Forwarding from"
  ` + of + ` status --endpoint https://127.0.0.1:10357 --endpoint-insecure

The command asks there as the user of the kubeconfig, who needs the verb get on
the nonResourceURLs /debug/leader and /debug/controllers/. If only the API
server or only a secure port answers, the command shows what that one knows.
Requests to an endpoint on loopback use no proxy, whatever the kubeconfig and
the environment say.`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.output != "" && o.output != "json" && o.output != "yaml" {
				return fmt.Errorf("--output: must be json or yaml, got %q", o.output)
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			r, err := o.gather(ctx)
			if err != nil {
				return err
			}
			if err := r.write(cmd.OutOrStdout(), o.output, time.Now()); err != nil {
				return err
			}
			if !r.Leader.Leads {
				return errNobodyLeads
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&o.kubeconfig, "kubeconfig", o.kubeconfig,
		"The kubeconfig file. Default: $KUBECONFIG, then ~/.kube/config, then the ServiceAccount of the Pod.")
	fs.StringVar(&o.context, "context", o.context, "The context of the kubeconfig.")
	fs.StringVarP(&o.namespace, "namespace", "n", o.namespace, "The namespace of the Lease and of the Pods.")
	fs.StringVar(&o.leaseName, "lease-name", o.leaseName, "The name of the Lease, which is the managers' --leader-elect-resource-name.")
	fs.StringSliceVar(&o.endpoints, "endpoint", o.endpoints, "The secure port of a replica, https://HOST:PORT; may be given for each of them.")
	fs.StringVar(&o.endpointCA, "endpoint-ca-file", o.endpointCA,
		"The CA of the certificates of --endpoint. Default: the CAs of this machine.")
	fs.BoolVar(&o.endpointInsecure, "endpoint-insecure", o.endpointInsecure,
		"Do not verify the certificates of --endpoint. Your credentials go there: only for a port that you forwarded yourself.")
	fs.DurationVar(&o.timeout, "timeout", o.timeout, "How long each request may take.")
	fs.StringVarP(&o.output, "output", "o", o.output, "Print json or yaml instead of a table.")
	return cmd
}

// report is what the command shows. Fields may be added.
type report struct {
	Leader   leader    `json:"leader"`
	Fence    fence     `json:"fence"`
	Replicas []replica `json:"replicas"`
	// Problems says what could not be read from the API server.
	Problems []string `json:"problems,omitempty"`
}

// leader describes the Lease and its holder.
type leader struct {
	Lease string `json:"lease"`
	// Leads reports whether the Lease has a holder that renewed it in time, by the clock of this
	// machine, or that reports that it leads. If the Lease could not be read, a replica that reports
	// that it leads is enough.
	Leads    bool   `json:"leads"`
	Holder   string `json:"holder"`
	Pod      string `json:"pod"`
	LeaseUID string `json:"leaseUID"`
	// Term counts the changes of holder of this Lease.
	Term                 int32        `json:"term"`
	Since                *metav1.Time `json:"since,omitempty"`
	Renewed              *metav1.Time `json:"renewed,omitempty"`
	LeaseDurationSeconds int32        `json:"leaseDurationSeconds"`

	unread   bool // the Lease may exist, but could not be read
	starting bool // the holder says that its controllers do not run yet
}

// fence describes the fence in the API server.
type fence struct {
	// State is the result of the leader's own test or, if that is unknown, Installed, Absent, Off or
	// Unknown. Source says where State comes from.
	State  string `json:"state"`
	Source string `json:"source"`
}

// replica is a Pod of the manager, or a manager outside of the cluster behind an --endpoint, and
// what it reports about itself.
type replica struct {
	// Name is the Pod's name; empty if an endpoint did not report it.
	Name     string       `json:"name"`
	Node     string       `json:"node,omitempty"`
	PodPhase string       `json:"podPhase,omitempty"`
	Ready    bool         `json:"ready"`
	Restarts int32        `json:"restarts"`
	Started  *metav1.Time `json:"started,omitempty"`
	answer
}

func (o *options) clientConfig() (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = o.kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		rules, &clientcmd.ConfigOverrides{CurrentContext: o.context}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig, --context: %w", err)
	}
	config.Timeout = o.timeout
	return rest.AddUserAgent(config, "status"), nil
}

// gather reads everything that the report shows. The report lists what could not be read.
func (o *options) gather(ctx context.Context) (*report, error) {
	config, err := o.clientConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	r := &report{Replicas: []replica{}}
	if r.Leader, err = o.readLease(ctx, client); err != nil {
		r.problem("%v", err)
	}
	pods, err := client.CoreV1().Pods(o.namespace).List(ctx, metav1.ListOptions{LabelSelector: o.pods})
	if err != nil {
		r.problem("list Pods: %v", err)
		pods = &corev1.PodList{}
	}
	for i := range pods.Items {
		r.Replicas = append(r.Replicas, newReplica(&pods.Items[i]))
	}
	o.askEndpoints(ctx, config, r)
	r.trustLeader()
	r.Fence = o.readFence(ctx, client, r)
	return r, nil
}

func (r *report) problem(format string, args ...any) {
	r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
}

// starting is the phase of a replica that holds the Lease and may not lead yet.
const starting = "Starting"

// trustLeader sets Leads if the holder itself reports that it leads: the clock of this machine may
// be wrong. If the Lease could not be read, any replica that reports that it leads is the leader. A holder
// that reports that it is starting does not lead.
func (r *report) trustLeader() {
	l := &r.Leader
	for _, replica := range r.Replicas {
		if replica.Reached && replica.Phase == "Leading" && (replica.Name == l.Pod || l.unread && !l.Leads) {
			l.Leads, l.Pod = true, replica.Name
		}
		if replica.Phase == starting && replica.Name == l.Pod {
			l.Leads, l.starting = false, true
		}
	}
}

func (o *options) readLease(ctx context.Context, client kubernetes.Interface) (leader, error) {
	l := leader{Lease: o.namespace + "/" + o.leaseName}
	lease, err := client.CoordinationV1().Leases(o.namespace).Get(ctx, o.leaseName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return l, fmt.Errorf("no Lease %s; see --namespace and --lease-name", l.Lease)
	}
	if err != nil {
		l.unread = true
		return l, fmt.Errorf("read Lease %s: %w", l.Lease, err)
	}
	spec := lease.Spec
	l.Holder, l.LeaseUID = ptr.Deref(spec.HolderIdentity, ""), string(lease.UID)
	l.Term, l.LeaseDurationSeconds = ptr.Deref(spec.LeaseTransitions, 0), ptr.Deref(spec.LeaseDurationSeconds, 0)
	if l.Holder == "" {
		return l, nil
	}
	l.Pod = protocol.PodOf(l.Holder)
	if spec.AcquireTime != nil {
		l.Since = &metav1.Time{Time: spec.AcquireTime.Time}
	}
	if spec.RenewTime != nil {
		l.Renewed = &metav1.Time{Time: spec.RenewTime.Time}
		l.Leads = time.Since(spec.RenewTime.Time) < time.Duration(l.LeaseDurationSeconds)*time.Second
	}
	return l, nil
}

func newReplica(pod *corev1.Pod) replica {
	r := replica{Name: pod.Name, Node: pod.Spec.NodeName, PodPhase: string(pod.Status.Phase), Started: pod.Status.StartTime}
	for _, c := range pod.Status.Conditions {
		r.Ready = r.Ready || c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	}
	for _, c := range pod.Status.ContainerStatuses {
		r.Restarts += c.RestartCount
	}
	return r
}

// readFence returns the result of the leader's own test. If the leader was not reached, it looks
// for a binding of the policy with the Namespace of the Lease. A build of another name has another policy.
func (o *options) readFence(ctx context.Context, client kubernetes.Interface, r *report) fence {
	for _, replica := range r.Replicas {
		if replica.Reached && replica.Name != "" && replica.Name == r.Leader.Pod {
			return fence{replica.serverFence, "tested by the leader"}
		}
	}
	leader := apifence.NamespaceFor(types.NamespacedName{Namespace: o.namespace, Name: o.leaseName})
	found := fence{"Absent", "no ValidatingAdmissionPolicyBinding goes by Namespace " + leader}
	bindings, err := client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().List(ctx, metav1.ListOptions{})
	if err != nil {
		r.problem("read the fence: %v", err)
		return fence{"Unknown", "ValidatingAdmissionPolicyBindings cannot be listed"}
	}
	for _, binding := range bindings.Items {
		spec := &binding.Spec
		if spec.ParamRef == nil || spec.ParamRef.Name != leader || !strings.HasPrefix(spec.PolicyName, apifence.PolicyName) {
			continue
		}
		source := "ValidatingAdmissionPolicyBinding " + binding.Name
		if slices.Contains(spec.ValidationActions, admissionregistrationv1.Deny) {
			return fence{"Installed", source + ", not tested"}
		}
		found = fence{"Off", source + " does not deny"}
	}
	return found
}
