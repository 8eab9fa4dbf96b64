# Targets for people. CI runs `make lint` and `make test`.
.DEFAULT_GOAL := help
KEEP ?= 0

help: ## list these targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

build: ## install what building needs and build the release programs; their debug symbols lie beside them
	@.ci/install build run
	cargo build --release --bins --workspace
	@.ci/separate-symbols target/release sluiced sluice-controller sluicectl

demo: ## a Service through a gateway in network namespaces (root); KEEP=1 leaves everything running
	@.ci/install build run test
	@cargo build --quiet --release --bins --workspace
	@KEEP=$(KEEP) demo/run

demo-fleet: ## three gateways and a router: a `nat` download survives the kill of its gateway (root); KEEP=1 as above
	@.ci/install build run test
	@cargo build --quiet --release --bins --workspace
	@KEEP=$(KEEP) demo/fleet

fleet-matrix: ## let each failure happen 20 times to a fleet under load; writes docs/reference/fleet-outages.md (root)
	@.ci/install build run test
	@cargo build --quiet --release --bins --workspace
	cargo test --quiet --release --test fleet -- --ignored --exact matrix::outages_of_a_fleet --nocapture

deb: ## build the Debian package, target/debian/sluice_*.deb, and that of its debug symbols, sluice-dbgsym_*.ddeb
	@.ci/install build run package
	cargo build --release --bins --workspace
	@.ci/package target/release target/debian --dbgsym

# With --examples cargo doc uses the features that clippy uses, so no library of others is checked twice.
lint: ## check formatting, clippy, rustdoc, licences and sources of dependencies
	@.ci/install build lint
	cargo fmt --all --check
	cargo clippy --quiet --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --lib --bins --examples --no-deps --all-features \
	  --document-private-items
	cargo deny --log-level error check bans licenses sources

test: ## run every test that this machine allows
	@.ci/install build run test package
	@.ci/install vm || echo "test: no QEMU, so the lab of virtual machines is skipped" >&2
	@.ci/driver-headers >/dev/null || echo "test: no headers of DPDK's drivers, so the card in software is skipped" >&2
	@.ci/test

test-vm: ## the lab: the package on virtual machines with PCI cards, systemd and a whole kernel (root, QEMU)
	@.ci/install build run test package vm
	@$(MAKE) --no-print-directory deb
	SLUICE_DEB=$$(ls -t target/debian/sluice_*.deb | head -1) cargo test --quiet --workspace --all-features --test vm

test-vm-matrix: ## the lab with the long matrix: every mode over every card; writes the table of docs/reference/ports.md
	@.ci/install build run test package vm
	@$(MAKE) --no-print-directory deb
	SLUICE_DEB=$$(ls -t target/debian/sluice_*.deb | head -1) \
	  cargo test --quiet --workspace --all-features --test vm -- --include-ignored

e2e-k8s: ## run the end-to-end scenarios on the cluster of KUBECONFIG, in namespaces that are removed again
	@[ -n "$(KUBECONFIG)" ] || { echo "e2e-k8s: set the cluster: make e2e-k8s KUBECONFIG=/path/to/kubeconfig" >&2; exit 2; }
	@.ci/install build
	SLUICE_TEST_KUBECONFIG=$(abspath $(KUBECONFIG)) cargo test --quiet -p control --test kubernetes -- \
	  --exact scenarios::every_scenario_holds_on_a_real_cluster --nocapture

bench: ## measure the forwarding engine beside targets and DPDK's testpmd; writes docs/reference/performance.md
	@.ci/install build run test
	@.ci/install yardstick || echo "bench: no testpmd, so there are no ratios to it" >&2
	@cargo build --quiet --release --bin sluiced
	@demo/bench

bench-wire: ## compare the gateway with the kernel's nftables on the same traffic in network namespaces (root)
	@.ci/install build run test
	@cargo build --quiet --release --bin sluiced
	@demo/bench-wire

bench-short: ## short connections at full rate until SNAT ports come back early: the last 20 of 75 s beside the first 8 (root)
	@.ci/install build run test
	@cargo build --quiet --release --bins --workspace
	@demo/bench-short

bench-guard: ## compare instructions per packet of the hot stages with the committed ones (callgrind)
	@.ci/install build test
	@.ci/bench-guard

bench-control: ## measure changes of a cluster of 10,000 Services: time, and memory of controller and gateway
	@.ci/install build run test
	@cargo build --quiet --release --bins --workspace
	@cargo bench --quiet --bench control

module-graph: ## write docs/internals/graph-after.md: the modules of each package by their imports
	@cargo run --quiet --example module-graph -- --output docs/internals/graph-after.md

.PHONY: help build demo demo-fleet fleet-matrix deb lint test test-vm test-vm-matrix e2e-k8s bench bench-wire bench-short bench-guard bench-control module-graph
