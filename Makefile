# What a person runs. CI runs `make lint` and `make test`.
.DEFAULT_GOAL := help
KEEP ?= 0

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

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

bench: ## figures of the forwarding engine beside the floor of the same harness
	@.ci/install build run test
	@cargo build --quiet --release --bin sluiced
	@demo/bench

bench-guard: ## instructions per packet of the hot stages, against the committed ones (callgrind)
	@.ci/install build test
	@.ci/bench-guard

.PHONY: help build demo lint test bench bench-guard
