# What a person runs. CI runs `make lint` and `make test`.
.DEFAULT_GOAL := help
KEEP ?= 0

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

build: ## install what building needs, and build the release programs
	@.ci/install build run
	cargo build --release --bins --workspace

demo: ## the main job, in network namespaces that it makes itself (root); KEEP=1 leaves it running
	@.ci/install build run test
	@cargo build --quiet --release --bins --workspace
	@KEEP=$(KEEP) demo/run

lint: ## formatting, clippy, rustdoc, licences and sources of dependencies
	@.ci/install build lint
	cargo fmt --all --check
	cargo clippy --quiet --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --all-features --document-private-items
	cargo deny --log-level error check bans licenses sources

test: ## every test that this machine allows
	@.ci/install build run test
	@.ci/test

e2e-k8s: ## what users observe, on the cluster of KUBECONFIG, each in a namespace of its own that is removed again
	@[ -n "$(KUBECONFIG)" ] || { echo "e2e-k8s: say which cluster: make e2e-k8s KUBECONFIG=/path/to/kubeconfig" >&2; exit 2; }
	@.ci/install build
	SLUICE_TEST_KUBECONFIG=$(abspath $(KUBECONFIG)) cargo test --quiet -p control --test kubernetes -- \
	  --exact scenarios::every_scenario_holds_on_a_real_cluster --nocapture

bench: ## figures of the forwarding engine beside the floor of the same harness
	@.ci/install build run test
	@cargo build --quiet --release --bin sluiced
	@demo/bench

bench-guard: ## instructions per packet of the hot stages, against the committed ones (callgrind)
	@.ci/install build test
	@.ci/bench-guard

bench-control: ## how long changes of a cluster of 10,000 Services take, and what controller and gateway need
	@.ci/install build run test
	@cargo build --quiet --release --bins --workspace
	@cargo bench --quiet --bench control

module-graph: ## docs/internals/graph-after.md: the modules of each package, by their imports
	@cargo run --quiet --example module-graph -- --output docs/internals/graph-after.md

.PHONY: help build demo lint test e2e-k8s bench bench-guard bench-control module-graph
