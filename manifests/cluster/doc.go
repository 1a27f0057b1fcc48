// Package cluster runs Kubernetes in network namespaces, for tests: a control
// plane of etcd, kube-apiserver, kube-controller-manager and kube-scheduler, and
// nodes of kubelet, containerd and kube-proxy.
//
//	          192.0.2.11 node1 ── pods 10.244.1.0/24, fd00:10:244:1::/64
//	outside ──┤
//	          192.0.2.12 node2 ── pods 10.244.2.0/24, fd00:10:244:2::/64
//
// A node is a network, mount, PID and UTS namespace: what runs on it ends with the
// first process, and no mount, device or rule of the machine is touched. Its
// cgroups are a sub-tree of their own, removed with it. The programs come from
// build.sh; nothing is installed.
package cluster
