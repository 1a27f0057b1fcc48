# The image and the manifests. Included by the Makefile.

KUSTOMIZE ?= go run sigs.k8s.io/kustomize/kustomize/v5@v5.8.2
HELM       = go run helm.sh/helm/v3/cmd/helm@v3.22.0
KUBECTL    = kubectl
# Also with make --file manifests.mk in its directory.
PLUGIN    := $(dir $(lastword $(MAKEFILE_LIST)))kubectl-masq

# docker if its daemon responds, else podman, else buildah; checked once.
CONTAINER_TOOL ?= $(eval CONTAINER_TOOL := $(shell docker info >/dev/null 2>&1 && echo docker || \
	basename "$$(command -v podman || command -v buildah)"))$(CONTAINER_TOOL)
DOCKER = $(filter docker,$(CONTAINER_TOOL))
# The name of the image includes the registry that push sends it to. Without one, the nodes import the image.
IMAGE ?= localhost/nft-masq-agent
GIVEN := $(TAG)
ifeq ($(GIVEN),)
TAG = $(eval TAG := $(subst +,_,$(VERSION)))$(TAG)
endif
# For a registry without TLS: --insecure with docker, --tls-verify=false with the
# others.
PUSH_FLAGS ?=

HOST_ARCH := $(shell go env GOHOSTARCH 2>/dev/null)
# docker's classic builder reuses what it has cached for another architecture;
# the others build identical images from identical files.
BUILD_FLAGS = $(if $(DOCKER),--no-cache,--timestamp $(or $(shell git log -1 --format=%ct 2>/dev/null),0))
# URL of the source, without a password.
SOURCE ?= $(shell git config --get remote.origin.url 2>/dev/null | sed 's|//[^@/]*@|//|')
LABELS = title=nft-masq-agent licenses=Apache-2.0 version=$(VERSION) $(if $(SOURCE),source=$(SOURCE)) \
	revision=$(shell git rev-parse HEAD 2>/dev/null) created=$(shell git log -1 --format=%cI 2>/dev/null)

.PHONY: container
container: container-$(HOST_ARCH) ## use: Build the image of this machine's architecture: IMAGE, TAG, CONTAINER_TOOL
	$(CONTAINER_TOOL) tag '$(IMAGE):$(TAG)-$(HOST_ARCH)' '$(IMAGE):$(TAG)'

.PHONY: all-container
all-container: $(ARCHS:%=container-%) ## use: Build the images of all architectures

# What the image contains, in bin/image_ARCH.
content-%: bin/linux_%/nft-masq-agent licenses
	@rm -rf bin/image_$*
	@mkdir bin/image_$*
	@cp -r bin/linux_$*/nft-masq-agent bin/licenses bin/image_$*
	@go run ./manifests/sbom '$(VERSION)' bin/linux_$*/nft-masq-agent >bin/image_$*/sbom.cdx.json

container-%: container-tool content-%
	$(CONTAINER_TOOL) build --platform linux/$* $(BUILD_FLAGS) $(LABELS:%=--label 'org.opencontainers.image.%') \
		--file manifests/Dockerfile --tag '$(IMAGE):$(TAG)-$*' bin/image_$*

# An OCI image, as make release writes it: Go alone makes it.
.PHONY: image
image: content-$(HOST_ARCH) ## use: Write the image into the archive bin/image.tar, which nodes import: HOST_ARCH
	@rm -rf bin/oci
	@mkdir bin/oci
	@go run ./manifests/release -dist bin/oci -version '$(TAG)' -image '$(IMAGE)' -commit '$(COMMIT)' \
		-time '$(or $(shell git log -1 --format=%ct 2>/dev/null),0)' image $(HOST_ARCH)=bin/image_$(HOST_ARCH) >/dev/null
	@tar --directory bin/oci/image --create --file bin/image.tar .
	@echo '$(IMAGE):$(TAG)' >$(PUSHED)
	@echo 'wrote bin/image.tar, of $(IMAGE):$(TAG)'

# What push or image made last, by which manifest, install and uninstall then name the image, also when edited files have
# another version: NAME:TAG, and the digest if it was pushed. docker prints the digest, the others write it.
PUSHED = bin/pushed
digest-of = $(if $(DOCKER),tee /dev/stderr | sed -nE 's/.*(sha256:[0-9a-f]{64}).*/\1/p' | tail -n 1,cat >&2; cat $(PUSHED).digest)
pushed    = | { $(digest-of); } | sed 's|^|$(IMAGE):$(TAG) |' >$(PUSHED)
digest-to = $(if $(DOCKER),,--digestfile $(PUSHED).digest)

# docker accepts the flags only for manifest lists.
PUSH = $(CONTAINER_TOOL) push $(if $(DOCKER),,$(PUSH_FLAGS))

.PHONY: push
push: registry container ## use: Push the image of this machine's architecture to IMAGE
	@mkdir -p $(dir $(PUSHED))
	$(PUSH) $(digest-to) '$(IMAGE):$(TAG)' $(pushed)

.PHONY: all-push
all-push: registry all-container ## use: Push the images of all architectures, and a manifest list of them, to IMAGE
	for arch in $(ARCHS); do $(PUSH) "$(IMAGE):$(TAG)-$$arch"; done
	$(CONTAINER_TOOL) manifest rm '$(IMAGE):$(TAG)' >/dev/null 2>&1 || true
	$(CONTAINER_TOOL) manifest create $(if $(DOCKER),$(PUSH_FLAGS)) '$(IMAGE):$(TAG)' $(ARCHS:%='$(if $(DOCKER),,containers-storage:)$(IMAGE):$(TAG)-%')
	@mkdir -p $(dir $(PUSHED))
	$(CONTAINER_TOOL) manifest push $(PUSH_FLAGS) $(digest-to) $(if $(DOCKER),'$(IMAGE):$(TAG)',--all '$(IMAGE):$(TAG)' 'docker://$(IMAGE):$(TAG)') $(pushed)

.PHONY: licenses
licenses:
	@manifests/licenses.sh bin/licenses $(ARCHS)

.PHONY: container-tool
container-tool:
	@test -n '$(CONTAINER_TOOL)' || { echo 'missing: docker, podman or buildah' >&2; exit 1; }

.PHONY: container-test
container-test: bin/containerd ## test: Build the image and run it with the settings of the manifest, in a network namespace
	@missing=; for program in buildah podman runc nft; do \
		command -v $$program >/dev/null || missing="$$missing $${program/#nft/nftables}"; \
	done; \
	if [ -n "$$missing" ]; then \
		echo "installing the packages$$missing" >&2; \
		apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing >/dev/null; \
	fi
	IMAGE_TEST=1 CONTAINERD='$(CURDIR)/bin/containerd' go test -count=1 -v -run '^TestImage' ./manifests

.PHONY: reproducible-image
reproducible-image: ## release: Build the image of the last commit in two directories, compare (needs buildah)
	@dir="$$(mktemp -d)"; trap 'rm -rf "$$dir"' EXIT; \
	printf '[storage]\ndriver = "vfs"\ngraphroot = "%s"\nrunroot = "%s"\n' "$$dir/graph" "$$dir/run" >"$$dir/storage.conf"; \
	export CONTAINERS_STORAGE_CONF="$$dir/storage.conf"; \
	for clone in a another/one; do \
		git clone -q --no-hardlinks . "$$dir/$$clone"; \
		$(MAKE) -C "$$dir/$$clone" container CONTAINER_TOOL=buildah SOURCE='$(SOURCE)' IMAGE=localhost/nft-masq-agent TAG="$${clone%/one}" >/dev/null; \
	done; \
	digests="$$(buildah images --no-trunc --quiet | sort -u)"; \
	test "$$(wc -l <<<"$$digests")" = 1 || { echo "two images: $$digests" >&2; exit 1; }; \
	echo "identical: $$digests"

RELEASE = go run ./manifests/release -version '$(VERSION)' -image '$(IMAGE)' -source '$(filter https://%,$(SOURCE))' \
	-commit "$$(git rev-parse HEAD)" -time "$$(git log -1 --format=%ct)"
# Writes dist/manifests/$(1).yaml with the image by digest.
define release-manifest
	@mkdir -p bin/release dist/manifests
	@printf '%s\n' 'resources: [../../manifests/$(2)]' \
		"images: [{name: nft-masq-agent, newName: '$(IMAGE)', digest: '$$(cat bin/release-digest)'}]" >bin/release/kustomization.yaml
	$(KUSTOMIZE) build bin/release >dist/manifests/$(1).yaml

endef

.PHONY: release
release: release-check $(ARCHS:%=content-%) ## release: Write dist/: all files of a release: VERSION=v1.0.0 IMAGE=REGISTRY/nft-masq-agent
	rm -rf dist bin/release
	mkdir dist
	$(foreach arch,$(ARCHS),cp bin/image_$(arch)/nft-masq-agent dist/nft-masq-agent-linux-$(arch); \
		cp bin/image_$(arch)/sbom.cdx.json dist/nft-masq-agent-linux-$(arch).cdx.json;)
	$(RELEASE) image $(foreach arch,$(ARCHS),$(arch)=bin/image_$(arch)) >bin/release-digest
	$(call release-manifest,nft-masq-agent,base)
	$(foreach overlay,$(notdir $(wildcard manifests/overlays/*)),$(call release-manifest,$(overlay),overlays/$(overlay)))
	$(RELEASE) chart manifests/helm
	$(RELEASE) plugin manifests/kubectl-masq LICENSE
	$(RELEASE) seal dist/nft-masq-agent-linux-amd64
	@echo "dist: $(IMAGE):$(VERSION)@$$(cat bin/release-digest)"

.PHONY: release-check
release-check:
	@[[ '$(VERSION)' =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$$ ]] || \
		{ echo 'not a version: make release VERSION=v1.0.0' >&2; exit 1; }
	@test -z "$$(git status --porcelain)" || { echo 'uncommitted changes: a release is of a commit' >&2; exit 1; }

.PHONY: release-test
release-test: bin/tools/kustomize bin/tools/helm ## release: Make the release of the last commit in two directories, compare, and verify it as CONTRIBUTING.md does
	MANIFEST_TOOLS='$(CURDIR)/bin/tools' RELEASE_TEST=1 go test -count=1 -v -timeout 120m -run '^TestRelease' ./manifests

.PHONY: promtool-test
promtool-test: bin/promtool ## test: Check metrics, alerts and dashboard with promtool
	PROMTOOL='$(CURDIR)/bin/promtool' go test -count=1 -run '^TestPromtool' ./manifests

.PHONY: systemd-test
systemd-test: ## test: Check the unit with systemd-analyze
	$(call need,systemd-analyze:systemd)
	SYSTEMD_ANALYZE=systemd-analyze go test -count=1 -run '^TestSystemd' ./manifests

# Programs of Debian's packages, without installing their servers.
define extract
	@dir="$$(mktemp -d)"; trap 'rm -rf "$$dir"' EXIT; \
	apt-get update -qq; \
	(cd "$$dir" && apt-get -o APT::Sandbox::User=root download -qq $(1) && dpkg -x $(1)_*.deb .); \
	install -D --target-directory=$(2) $(3:%="$$dir"/usr/bin/%)
endef
bin/promtool:
	$(call extract,prometheus,bin,promtool)
bin/prometheus:
	$(call extract,prometheus,bin,prometheus)
bin/containerd:
	$(call extract,containerd,$@,containerd ctr)

.PHONY: schema-test
schema-test: ## test: Check the JSON Schema of the config file with ajv (needs npm)
	SCHEMA_VALIDATOR='npm exec --yes ajv-cli@5.0.0 --' go test -count=1 -run '^TestSchema' ./manifests

.PHONY: registry
registry:
	@case '$(IMAGE)' in localhost/*) false;; */*) ;; *) false;; esac || { echo 'missing registry: make $(MAKECMDGOALS) IMAGE=REGISTRY/nft-masq-agent' >&2; exit 1; }

# Components of manifests/components that manifest and install add to the base.
COMPONENTS ?=
NAMESPACE   = kube-system
OURS        = -l app.kubernetes.io/name=nft-masq-agent

# Writes bin/install/kustomization.yaml: $(1) with the image and the components.
define kustomization
	@mkdir -p bin/install
	@{ echo 'resources: [../../manifests/$(1)]'; \
	   echo 'components: [$(COMPONENTS:%=../../manifests/components/%,)]'; \
	   echo 'images: [{name: nft-masq-agent, newName: "$(IMAGE)", $(or $(DIGEST:%=digest: "%"),newTag: "$(LAST_TAG)")}]'; } >bin/install/kustomization.yaml
endef
# Of the image, if it was made here.
LAST_TAG = $(or $(GIVEN),$(shell sed -n 's|^$(IMAGE):\([^ ]*\).*|\1|p' $(PUSHED) 2>/dev/null),$(TAG))
DIGEST   = $(shell sed -n 's|^$(IMAGE):$(LAST_TAG) ||p' $(PUSHED) 2>/dev/null)
# kubectl's, if there is one: the other one must be compiled first.
BUILD_INSTALL = $(if $(shell $(KUBECTL) kustomize --help 2>/dev/null),$(KUBECTL) kustomize,$(KUSTOMIZE) build) bin/install

.PHONY: manifest
manifest: ## use: Print the manifest with IMAGE and TAG: COMPONENTS='prometheus …'
	$(call kustomization,base)
	@$(BUILD_INSTALL)

.PHONY: install
install: ## use: Apply the manifest with IMAGE and TAG to the cluster: COMPONENTS
	$(call kustomization,base)
	$(BUILD_INSTALL) | $(KUBECTL) apply -f -

.PHONY: uninstall
uninstall: COMPONENTS =
uninstall: ## use: Remove the agent, its rules on all nodes, and everything that install created
	$(KUBECTL) -n $(NAMESPACE) delete daemonset $(OURS) --cascade=foreground
	$(call kustomization,overlays/removal)
	$(BUILD_INSTALL) | $(KUBECTL) apply -f -
	$(KUBECTL) -n $(NAMESPACE) rollout status daemonset/nft-masq-agent --timeout=10m
	@echo 'What cleanup removed from each node:'
	-@$(KUBECTL) -n $(NAMESPACE) logs --prefix $(OURS)
	$(KUBECTL) -n $(NAMESPACE) delete daemonset,service,serviceaccount $(OURS)
	@# Objects of the Prometheus Operator, which the cluster may not have.
	@for kind in podmonitor prometheusrule; do \
		if $(KUBECTL) get $$kind.monitoring.coreos.com -n $(NAMESPACE) >/dev/null 2>&1; then \
			$(KUBECTL) -n $(NAMESPACE) delete $$kind.monitoring.coreos.com $(OURS); \
		fi; \
	done

.PHONY: fleet
fleet: ## use: Ask the agent of each node of the cluster: a row per node with its policy, and what is wrong
	@KUBECTL='$(KUBECTL)' $(PLUGIN) -n $(NAMESPACE) fleet

# Renders into the directory $(1): the base as a single manifest, the
# overlays for the tests, the alerts as a PrometheusRule and for the chart.
define render
	@mkdir -p "$(1)/testdata" "$(1)/components/prometheus-operator" "$(1)/helm/files"
	@cp manifests/prometheus/rules.yaml "$(1)/helm/files/rules.yaml"
	@{ printf '%s\n' '# Generated from manifests/prometheus/rules.yaml by make manifests.' \
		'apiVersion: monitoring.coreos.com/v1' 'kind: PrometheusRule' 'metadata:' '  name: nft-masq-agent' \
		'  namespace: $(NAMESPACE)' '  labels:' '    app.kubernetes.io/name: nft-masq-agent' 'spec:'; \
		sed '/^#/d; s/^./  &/' manifests/prometheus/rules.yaml; } >"$(1)/components/prometheus-operator/prometheusrule.yaml"
	@{ printf '%s\n' '# Generated from manifests/base by make manifests. The image is a placeholder:' \
		'# make manifest IMAGE=REGISTRY/nft-masq-agent prints this with yours.'; \
		$(KUSTOMIZE) build manifests/base; } >"$(1)/nft-masq-agent.yaml"
	@for overlay in $(notdir $(wildcard manifests/overlays/*)); do \
		$(KUSTOMIZE) build "manifests/overlays/$$overlay" >"$(1)/testdata/$$overlay.yaml"; \
	done
endef

.PHONY: manifests
manifests: ## develop: Regenerate the files generated from kustomizations and alerts
	$(call render,manifests)

.PHONY: manifests-check
manifests-check: bin/tools/kustomize bin/tools/helm ## test: Check that generated manifests are up to date, and test components and Helm chart
	@rm -rf bin/manifests
	$(call render,bin/manifests)
	@for made in nft-masq-agent.yaml testdata components/prometheus-operator/prometheusrule.yaml helm/files; do \
		diff -ru "manifests/$$made" "bin/manifests/$$made"; \
	done
	MANIFEST_TOOLS='$(CURDIR)/bin/tools' go test -count=1 -run '^TestTools' ./manifests

# Builds Kubernetes once, into the user's cache; the tests use the programs that it prints.
CLUSTER = MANIFEST_TOOLS='$(CURDIR)/bin/tools' CLUSTER_PROGRAMS="$$(manifests/cluster/build.sh $(1))" go test -count=1

.PHONY: install-test
install-test: bin/tools/kustomize bin/tools/helm ## test: Run the install section of README.md against a control plane (builds Kubernetes)
	$(call CLUSTER,debian kube-apiserver kube-controller-manager kubectl) -run '^TestInstall' ./manifests

# What a group of CLUSTER_ONLY needs: no kubelet, no image.
LAB = $(if $(filter upgrade,$(CLUSTER_ONLY)),,debian kube-apiserver kube-proxy kubectl cni flanneld)
ALL = debian pause coredns agnhost regression-issue-74839 e2e.test kube-apiserver kube-controller-manager \
	kube-scheduler kubelet kube-proxy kubectl cni flanneld
RUN = $(or $(CLUSTER_RUN),$(CLUSTER_ONLY:%=^TestNextTo$$/^%$$))

.PHONY: test-cluster
test-cluster: deps bin/tools/kustomize bin/tools/helm ## test: Run the agent in a cluster of two nodes, and next to other programs (root): CLUSTER_ONLY=flannel, CLUSTER_RUN=TEST
	@manifests/cluster/needs.sh '$(CLUSTER_ONLY)' '$(CLUSTER_RUN)'
	@[ -n '$(CLUSTER_ONLY)' ] || command -v buildah >/dev/null || { apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends buildah >/dev/null; }
	$(call CLUSTER,$(if $(CLUSTER_ONLY),$(LAB),$(ALL))) -v -timeout 2h $(RUN:%=-run '%') ./manifests/cluster

# Programs that tests run often.
bin/tools/kustomize: manifests/manifests.mk
	GOBIN='$(CURDIR)/bin/tools' go install $(lastword $(KUSTOMIZE))
bin/tools/helm: manifests/manifests.mk
	GOBIN='$(CURDIR)/bin/tools' go install $(lastword $(HELM))
